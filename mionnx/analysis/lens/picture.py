"""The logit lens as a matplotlib figure: a heat map with words, wrapped like text."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from mionnx.view.figure import empty_figure, token_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

LABEL = 12  # characters of a token
COLUMNS = 30  # positions of a row of the figure
WORDS = 240  # positions from which on cells have no words
DENSE, ROWS = 240, 12  # without words: positions of a row, and rows; a still longer text has longer rows


class Readings(Protocol):
    """The parts of a `LensResult` that its figure shows."""

    @property
    def points(self) -> list[str]: ...
    @property
    def positions(self) -> list[int]: ...
    @property
    def tokens(self) -> list[str]: ...
    @property
    def spell(self) -> Callable[[int], str]: ...
    @property
    def top_ids(self) -> NDArray[np.int64]: ...
    @property
    def top_probs(self) -> NDArray[np.float32]: ...


def draw_lens(lens: Readings) -> "Figure":
    """Draw the top token of every point and position, coloured by its probability.

    At most 30 positions stand in a row; more are wrapped into rows of panels below one another.
    """
    count, points = len(lens.positions), len(lens.points)
    words = count <= WORDS
    most = COLUMNS if words else max(DENSE, ceil(count / ROWS))
    panels = ceil(count / most)
    each = ceil(count / panels)
    wide, high = (0.95, 0.32) if words else (0.05, 0.12)
    size = 1.6 + wide * max(each, 4 if words else 60), 0.5 + panels * ((1.0 if words else 0.7) + high * points)
    figure = empty_figure(*size)
    drawn = figure.subplots(panels, 1, squeeze=False)[:, 0]
    for panel, first in zip(drawn, range(0, count, each), strict=True):
        image = _panel(panel, lens, range(first, min(first + each, count)), each, words)
    drawn[-1].set_xlabel("token of the prompt" if words else "position")
    figure.suptitle("top next token after each point", fontsize=10)
    figure.colorbar(image, ax=drawn.tolist(), label="its probability", fraction=0.04, shrink=min(1.0, 3 / size[1]))
    return figure


def _panel(panel: "Axes", lens: Readings, columns: Sequence[int], each: int, words: bool) -> "AxesImage":
    """A heat map of some of the positions; the last row of panels may be shorter than `each`."""
    shown = np.full((len(lens.points), each), np.nan, np.float32)
    shown[:, : len(columns)] = lens.top_probs[:, columns[0] : columns[-1] + 1, 0]
    image = panel.imshow(shown, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    panel.set_yticks(range(len(lens.points)), [label_of(point) for point in lens.points], fontsize=8)
    if words:
        _write(panel, lens, columns, shown)
    else:
        ticks = range(0, len(columns), max(1, len(columns) // 12))
        panel.set_xticks(ticks, [str(lens.positions[columns[i]]) for i in ticks], fontsize=8)
        every = max(1, len(lens.points) // 16)
        panel.set_yticks(range(0, len(lens.points), every), [label_of(one) for one in lens.points[::every]], fontsize=8)
    return image


def _write(panel: "Axes", lens: Readings, columns: Sequence[int], shown: NDArray[np.float32]) -> None:
    """Write the tokens into the cells, and the prompt's below."""
    for i in range(len(lens.points)):
        for j, column in enumerate(columns):
            word = token_label(lens.spell(int(lens.top_ids[i, column, 0])), LABEL)
            colour = "white" if shown[i, j] > 0.6 else "black"
            panel.text(j, i, word, ha="center", va="center", fontsize=8, color=colour)
    labels = [f"{token_label(lens.tokens[column], LABEL)}\n{lens.positions[column]}" for column in columns]
    panel.set_xticks(range(len(columns)), labels, fontsize=8)


def label_of(point: str) -> str:
    """A residual hook point as a label: `2 post` for `blocks.2.hook_resid_post`."""
    return point.removeprefix("blocks.").replace(".hook_resid_", " ")
