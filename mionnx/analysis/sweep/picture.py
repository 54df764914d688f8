"""Sweeps as matplotlib heat maps."""

from collections.abc import Mapping, Sequence
from math import ceil
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mionnx.view.figure import empty_figure, token_label, write_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST = 64  # small maps in one figure; the ones with the largest numbers
CELL, LEAST, NARROWEST, WIDEST = 0.28, 2.2, 5.0, 14.0  # inches
WRITTEN, WIDER = 24, 0.44  # cells in a row of a map up to which they hold numbers, and their width then
LETTERS = 14  # letters of a title, an inch


def draw(
    numbers: NDArray[np.float64],
    over: Sequence[str],
    labels: Mapping[str, list[str]],
    title: str,
    what: str,
    error: NDArray[np.float64] | None = None,
) -> "Figure":
    """Draw heat maps of the first and last axis, one for each entry of the axes between.

    Args:
        numbers: axes in the order of `over`.
        over: names of the axes.
        labels: name of an axis -> names of its entries.
        title: above all maps.
        what: label of the colour scale.
        error: standard errors of the numbers, a map beside theirs where that is one map.
    """
    flat = numbers[None] if numbers.ndim == 1 else numbers
    names = ("", *over) if numbers.ndim == 1 else tuple(over)
    maps = _maps(flat, names, labels)
    if error is not None and len(maps) == 1:
        maps = [("mean", maps[0][1]), ("standard error", error.reshape(maps[0][1].shape))]
    height, width = flat.shape[0], flat.shape[-1]
    columns = _columns(len(maps), width)
    rows = ceil(len(maps) / columns)
    size = (max(LEAST, _cell(width) * width) + 0.6, max(1.0, CELL * height) + (0.8 if len(maps) > 1 else 1.2))
    across = max(NARROWEST, columns * size[0] + 1)
    figure = empty_figure(across, rows * size[1] + 0.9)
    limit = float(np.nanmax(np.abs(numbers), initial=0.0)) or 1.0
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    images = [_map(panel, values, names, labels, limit) for panel, (_, values) in zip(panels, maps, strict=False)]
    for panel, (name, _) in zip(panels, maps, strict=False):
        panel.set_title(name, fontsize=9)
    for panel in panels[len(maps) :]:
        panel.set_axis_off()
    figure.colorbar(images[0], ax=panels.tolist(), shrink=0.8).set_label(fill(what, 24), fontsize=8)
    lines = [fill(line, int(LETTERS * across)) for line in title.splitlines()]
    figure.suptitle("\n".join(lines).replace("$", r"\$"), fontsize=9)
    return figure


def _columns(count: int, width: int) -> int:
    fitting = max(1, int(WIDEST / (max(LEAST, _cell(width) * width) + 0.6)))
    return min(count, fitting, ceil(count**0.5))


def _cell(width: int) -> float:
    """The width of a cell in inches, in a map of so many columns."""
    return WIDER if width <= WRITTEN else CELL


def _maps(
    numbers: NDArray[np.float64], names: Sequence[str], labels: Mapping[str, list[str]]
) -> list[tuple[str, NDArray[np.float64]]]:
    between = list(np.ndindex(numbers.shape[1:-1]))
    size = {index: float(np.abs(numbers[:, *index]).max(initial=0)) for index in between}
    chosen = sorted(sorted(between, key=lambda index: -size[index])[:MOST])
    return [
        (", ".join(f"{name} {token_label(labels[name][i])}" for name, i in zip(names[1:-1], index, strict=True)),
         numbers[:, *index])
        for index in chosen
    ]  # fmt: skip


def _map(
    panel: "Axes", values: NDArray[np.float64], names: Sequence[str], labels: Mapping[str, list[str]], limit: float
) -> "AxesImage":
    image = panel.imshow(values, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    _ticks(panel, names[-1], labels, horizontal=True)
    if names[0]:
        _ticks(panel, names[0], labels, horizontal=False)
    else:
        panel.set_yticks([])
    if values.shape[1] <= WRITTEN:
        write_numbers(panel, values, limit)
    return image


def _ticks(panel: "Axes", name: str, labels: Mapping[str, list[str]], horizontal: bool) -> None:
    shown = [token_label(label) for label in labels[name]]
    step = max(1, len(shown) // 40)
    places = range(0, len(shown), step)
    rotate = horizontal and max(map(len, shown)) > 2
    axis = panel.xaxis if horizontal else panel.yaxis
    axis.set_ticks(list(places), [shown[i] for i in places], fontsize=7, rotation=90 if rotate else 0)
    (panel.set_xlabel if horizontal else panel.set_ylabel)(name, fontsize=8)
