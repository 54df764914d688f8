"""matplotlib figures, made without its global state: no window, no backend, safe in any thread."""

from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mionnx.machine.decimals import decimal

if TYPE_CHECKING:  # it takes as long to import as all the rest
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOTS = 120  # per inch


def empty_figure(width: float, height: float) -> "Figure":
    """A figure of this size in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DOTS, layout="constrained")
    # A notebook that has not started pyplot's backend would show a figure of matplotlib as text.
    figure._repr_png_ = partial(to_png, figure)  # type: ignore[attr-defined]
    return figure


def to_png(figure: "Figure") -> bytes:
    """A figure as a PNG image."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def write_numbers(axes: "Axes", values: NDArray[Any], limit: float, size: float = 7) -> None:
    """Write its number into each cell [rows, columns] of a heat map; the darkest colour stands for `limit`."""
    places = 2 if limit >= 0.1 else 3 if limit >= 0.01 else 4
    for row, column in np.ndindex(*values.shape):
        # Beyond 0.6 of the darkest colour black is hard to read.
        colour = "white" if abs(values[row, column]) > 0.6 * limit else "black"
        text = decimal(values[row, column], places)
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)


def token_label(token: str, most: int | None = None) -> str:
    """A token as a label of at most so many characters: white space made visible, `$` escaped against mathtext."""
    label = token.replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$")
    label = label if label.strip() else "␣" * len(label)
    return label if most is None or len(label) <= most else label[: most - 1] + "…"
