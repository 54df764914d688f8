"""A view as a matplotlib figure: each panel in a part of its own, rows of panels below one another."""

from collections.abc import Callable, Sequence
from itertools import product
from math import ceil
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mionnx.view.figure import empty_figure, token_label, write_numbers
from mionnx.view.node_pictures import draw_graph, draw_trace, trace_size
from mionnx.view.panels import Bars, Graph, HeatMap, Lines, MarkedText, Patterns, Text, Trace, View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

    Part = Figure | SubFigure

RED, BLUE, GREY = "#b2182b", "#2166ac", "#888"
WIDEST, TALLEST = 24.0, 24.0  # inches of one map
MAPS = 64  # small maps of one panel; those with the largest numbers
NUMBERED = 24  # columns up to which cells hold numbers
BARS = 24
TEXTS = 6  # texts of a figure
SERIES = 8  # curves that a legend tells apart
LABEL = 12  # characters of a token
LETTERS = 14  # of a title, an inch
WRAP, DENSE, WORD_ROWS = 30, 240, 12  # columns of words in a row; above DENSE columns no words, in at most so many rows
LINE, LETTER = 100, 0.068  # letters of a line of a marked text, and inches of one
NAMED_WEIGHTS = 40  # tokens up to which a pattern names them


def draw(view: View) -> "Figure":
    """A figure of the panels that have a picture: all but tables, and panels of an option."""
    rows = [row for row in map(_drawn, view.panels) if row]
    texts = [row for row in rows if isinstance(row[0], Text)]
    # After so many texts a picture says how many more there are.
    rows = [row for row in rows if row not in texts[TEXTS:]]
    sizes = [[_size(panel, len(row)) for panel in row] for row in rows]
    heights = [max(tall for _, tall in row) for row in sizes]
    width = max(sum(wide for wide, _ in row) for row in sizes)
    lines = [fill(line, max(40, int(LETTERS * width))) for line in (view.title, *view.about.splitlines()) if line]
    if len(texts) > TEXTS:
        lines.append(f"({len(texts) - TEXTS} texts more)")
    figure = empty_figure(max(5.0, width), sum(heights) + 0.25 * len("\n".join(lines).split("\n")))
    figure.suptitle("\n".join(lines).replace("$", r"\$"), fontsize=9)
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, row, own in zip(parts, rows, sizes, strict=True):
        for panel, place in zip(
            row, part.subfigures(1, len(row), squeeze=False, width_ratios=[wide for wide, _ in own])[0], strict=True
        ):
            _DRAWN[type(panel)].draw(place, panel, len(row))
    return figure


def _drawn(panel: Any) -> list[Any]:
    if isinstance(panel, list):
        return [one for part in panel for one in _drawn(part)]
    # With several scores a page lets choose; a picture has no option.
    without = isinstance(panel, Text) and len(panel.scores) != 1
    return [] if without or type(panel) not in _DRAWN else [panel]


def _size(panel: Any, beside: int) -> tuple[float, float]:
    return _DRAWN[type(panel)].size(panel, beside)


def _ticks(axis: "Axis", labels: Sequence[Any], inches: float, upright: bool = False) -> None:
    """As many labels as there is room for; turned where they are long."""
    texts = [token_label(str(label), LABEL * 2) for label in labels]
    letters = max((max(map(len, text.split("\n"))) for text in texts), default=1)
    # In inches: a letter of size 7 is 0.075 wide, a line 0.13 high.
    turned = not upright and letters * 0.075 > inches / max(1, len(texts))
    room = 0.13 if turned or upright else 0.075 * letters + 0.08
    places = range(0, len(texts), max(1, ceil(room * len(texts) / inches)))
    axis.set_ticks(list(places), [texts[i] for i in places], fontsize=7, rotation=90 if turned else 0)


# Heat maps


class _Map(NamedTuple):
    title: str
    values: NDArray[Any]
    columns: range


def _maps(panel: HeatMap) -> tuple[list[_Map], float]:
    """The maps of a panel, [rows, columns] each, and the number of the full colour."""
    name, values = next(iter(panel.colours.items()))
    # Where all numbers are 0 or missing, any limit gives white.
    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    limit = panel.limits.get(name, largest)
    array = np.asarray(values)[None] if np.ndim(values) == 1 else np.asarray(values)
    columns = array.shape[-1]
    if len(panel.words):
        each = _wrapped(columns)
        return [
            _Map("", array[:, i : i + each], range(i, min(i + each, columns))) for i in range(0, columns, each)
        ], limit
    between = [*np.ndindex(array.shape[1:-1])]
    size = {index: float(np.nanmax(np.abs(array[:, *index]), initial=0)) for index in between}
    names, labels = [*panel.axes][1:-1], [*panel.axes.values()][1:-1]
    maps = [
        _Map(", ".join(f"{name} {token_label(of[i])}" for name, of, i in zip(names, labels, index, strict=True)),
             array[:, *index], range(columns))
        # The maps with the largest numbers, in their own order.
        for index in sorted(sorted(between, key=lambda index: -size[index])[:MAPS])
    ]  # fmt: skip
    if panel.errors is not None and len(maps) == 1:
        errors = np.reshape(panel.errors, maps[0].values.shape)
        maps = [_Map("mean", maps[0].values, maps[0].columns), _Map("standard error", errors, maps[0].columns)]
    return maps, limit


def _wrapped(columns: int) -> int:
    """Columns of each row of words: at most 30 unless there are hundreds."""
    most = WRAP if columns <= DENSE else max(DENSE, ceil(columns / WORD_ROWS))
    # As many rows as that needs, of equal length.
    return ceil(columns / ceil(columns / most))


def _map_size(panel: HeatMap, beside: int) -> tuple[float, float]:
    values = next(iter(panel.colours.values()))
    rows, columns = (1 if np.ndim(values) == 1 else len(values)), np.shape(values)[-1]
    if len(panel.words):
        each, worded = _wrapped(columns), columns <= DENSE
        wide, tall = (0.95, 0.32) if worded else (0.05, 0.12)
        return wide * max(each, 4 if worded else 60), tall * rows + 0.7
    if beside > 1:
        return max(2.0, min(0.45 * columns, 14.4 / beside)), max(1.0, min(0.45 * rows, 8.0))
    cell = (0.44 if columns <= NUMBERED else 0.28) if max(rows, columns) <= 60 else 0.16
    return min(WIDEST, max(2.2, cell * columns)), min(TALLEST, max(0.7, min(cell, 0.28) * rows))


def _heat_size(panel: HeatMap, beside: int) -> tuple[float, float]:
    (wide, tall), (down, across) = _map_size(panel, beside), _grid(panel, beside)
    return across * (wide + 0.8) + 0.9, down * (tall + 0.75) + 0.2


def _grid(panel: HeatMap, beside: int) -> tuple[int, int]:
    count = len(_maps(panel)[0])
    across = (
        1 if len(panel.words) else min(count, max(1, int(14 / (_map_size(panel, beside)[0] + 0.6))), ceil(count**0.5))
    )
    return ceil(count / across), across


def _draw_heat(part: "Part", panel: HeatMap, beside: int) -> None:
    maps, limit = _maps(panel)
    (rows, across), (wide, tall) = _grid(panel, beside), _map_size(panel, beside)
    axes = part.subplots(rows, across, squeeze=False).ravel()
    for place, one in zip(axes, maps, strict=False):
        values = one.values
        if len(panel.words):  # the last row of words may be shorter
            values = np.full((len(values), _wrapped(len(panel.numbers))), np.nan)
            values[:, : len(one.columns)] = one.values
        low, shades = (-limit, "RdBu_r") if panel.diverging else (0, "Blues")
        image = place.imshow(values, cmap=shades, vmin=low, vmax=limit, aspect="auto", interpolation="nearest")
        place.set_title(one.title, fontsize=9)
        _label_map(place, panel, one, (wide, tall), first=one is maps[0])
        if len(panel.words):
            _write_words(place, panel, one, values)
        elif values.shape[1] <= NUMBERED and wide / values.shape[1] > 0.3:
            write_numbers(place, values, limit)
    for place in axes[len(maps) :]:
        place.set_axis_off()
    axes[0].figure.suptitle(token_label(panel.heading), fontsize=9)
    shrink = min(1.0, 3 / (rows * tall)) if rows * tall > 3 else 0.9
    bar = part.colorbar(image, ax=axes.tolist(), shrink=shrink)
    bar.set_label(fill(token_label(next(iter(panel.colours))), 32), fontsize=8)


def _label_map(place: "Axes", panel: HeatMap, one: _Map, inches: tuple[float, float], first: bool) -> None:
    names, labels = [*panel.axes], [*panel.axes.values()]
    across = [labels[-1][i] for i in one.columns]
    worded = len(panel.words) and len(labels[-1]) <= DENSE
    if worded:
        texts = [
            f"{token_label(label, LABEL)}\n{panel.numbers[i]}" for i, label in zip(one.columns, across, strict=True)
        ]
        place.set_xticks(range(len(texts)), texts, fontsize=8)
    else:
        _ticks(place.xaxis, [str(panel.numbers[i]) for i in one.columns] if len(panel.words) else across, inches[0])
    place.set_xlabel(names[-1], fontsize=8)
    if len(names) == 1:
        place.set_yticks([])
        return
    _ticks(place.yaxis, labels[0], inches[1], upright=True)
    place.set_ylabel(names[0], fontsize=8)


def _write_words(place: "Axes", panel: HeatMap, one: _Map, values: NDArray[Any]) -> None:
    if len(panel.numbers) > DENSE or panel.ids is None:
        return
    for i, (j, column) in product(range(len(values)), enumerate(one.columns)):
        word = token_label(panel.words[panel.ids[i, column, 0]], LABEL)
        colour = "white" if values[i, j] > 0.6 else "black"
        place.text(j, i, word, ha="center", va="center", fontsize=8, color=colour)


# Bars, texts and lines


def _bars_size(panel: Bars, beside: int) -> tuple[float, float]:
    return (6.0, 3.0) if panel.upright else (5.0, max(2.0, 0.8 + 0.2 * min(BARS, len(panel.labels))))


def _draw_bars(part: "Part", panel: Bars, beside: int) -> None:
    axes, values = part.subplots(), np.asarray(panel.values, np.float64)
    if panel.upright:
        _colour_bars(axes, values)
        axes.axhline(panel.level, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlabel(panel.order, fontsize=8)
        axes.set_ylabel(panel.unit)
        axes.spines[["top", "right"]].set_visible(False)
        return
    order = np.argsort(-np.abs(values), kind="stable")[:BARS]
    errors = None if panel.errors is None else np.asarray(panel.errors)[order]
    colours = [RED if value > 0 else BLUE for value in values[order]]
    axes.barh(range(len(order)), values[order], color=colours, xerr=errors, error_kw={"elinewidth": 0.8})
    axes.set_yticks(range(len(order)), [token_label(panel.labels[i], 40) for i in order], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_xlabel(panel.unit)
    all_shown = len(order) == len(values)
    axes.set_title("all components" if all_shown else f"the largest {len(order)} of {len(values)}", fontsize=9)


def _colour_bars(axes: "Axes", values: NDArray[Any]) -> None:
    axes.bar(range(len(values)), values, color=[RED if value > 0 else BLUE for value in values])
    axes.axhline(0, color="black", linewidth=0.6)


def _text_size(panel: Text, beside: int) -> tuple[float, float]:
    return min(1.2 + 0.5 * max(len(panel.tokens), 8), 30), 2.2


def _draw_text(part: "Part", panel: Text, beside: int) -> None:
    axes = part.subplots()
    _colour_bars(axes, np.asarray(panel.scores[0], np.float64))
    labels = [token_label(token, LABEL) for token in panel.tokens]
    axes.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel(token_label(panel.unit), fontsize=8)


def _marked_lines(panel: MarkedText) -> list[list[tuple[str, str]]]:
    """Lines of (words, colour or nothing), each of at most as many letters as fit."""
    lines, left = [list[tuple[str, str]]()], LINE
    for words, label, _ in panel.pieces:
        colour = f"C{panel.labels.index(label)}" if label else ""
        spaced = f" {words} {label} " if label else words.replace("\n", " ")
        for part in [spaced] if label else spaced.replace(" ", " \0").split("\0"):
            if len(part) > left and lines[-1]:
                lines.append([])
                left = LINE
            lines[-1].append((part, colour))
            left -= len(part)
    return lines


def _marked_size(panel: MarkedText, beside: int) -> tuple[float, float]:
    return LINE * LETTER + 0.4, 0.28 * len(_marked_lines(panel)) + 0.3


def _draw_marked(part: "Part", panel: MarkedText, beside: int) -> None:
    axes, lines = part.add_axes((0, 0, 1, 1)), _marked_lines(panel)
    axes.set_axis_off()
    for row, line in enumerate(lines):
        column = 1
        for words, colour in line:
            box = {"facecolor": colour, "alpha": 0.3, "edgecolor": "none", "pad": 1.5} if colour else None
            place = column * LETTER / (LINE * LETTER + 0.4), 1 - (row + 0.5) / len(lines)
            text = token_label(words, LINE) if words.strip() else words
            axes.text(*place, text, family="monospace", fontsize=8, va="center", bbox=box)
            column += len(words)


def _lines_size(panel: Lines, beside: int) -> tuple[float, float]:
    named = not _is_numeric(panel)
    long = named and max(map(len, map(str, panel.across)), default=0) > 10
    return (max(6.0, min(16.0, 2.5 + 0.22 * len(panel.across))) if named else 4.8), (4.6 if long else 3.6)


def _is_numeric(panel: Lines) -> bool:
    return all(isinstance(one, int | float | np.number) for one in panel.across)


def _draw_lines(part: "Part", panel: Lines, beside: int) -> None:
    axes, numeric = part.subplots(), _is_numeric(panel)
    across = np.asarray(panel.across) if numeric else np.arange(len(panel.across))
    for one in panel.series[:SERIES] if panel.chooses == "series" else panel.series:
        values = np.asarray([np.nan if value is None else value for value in one.values], np.float64)
        values = np.maximum(values, panel.low) if panel.low is not None and panel.scale == "log" else values
        if one.dotted:  # it belongs to the series before it
            axes.plot(across, values, ":", color=axes.lines[-1].get_color(), linewidth=1)
            continue
        # Each curve is one container: the next colour of matplotlib's cycle.
        colour = f"C{len(axes.containers)}" if len(panel.series) > 1 else BLUE
        axes.errorbar(
            across, values, one.errors, marker="o", markersize=3, capsize=2, color=colour, label=token_label(one.name)
        )
        for mark in one.marks:
            axes.axvline(mark, color=colour, linewidth=0.8, linestyle=":")
    for name, level in panel.levels.items():
        axes.axhline(level, color=GREY, linewidth=0.8, linestyle="--", label=name)
    axes.set_yscale(panel.scale)
    if panel.scale == "linear" and panel.low is not None:
        # Points at 0 and 1 would be cut in half by the frame.
        margin = 0.0 if panel.high is None else 0.03
        axes.set_ylim(panel.low - margin, panel.high and panel.high + margin)
    if panel.spaced == "log":
        # Linear from 0 to 1, logarithmic above: 0 has a place.
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlim(0, float(across[-1]) * 1.3 + 1)
    elif numeric and np.issubdtype(across.dtype, np.integer):
        axes.locator_params(axis="x", integer=True)
    elif not numeric:
        _ticks(axes.xaxis, [*panel.across], _lines_size(panel, beside)[0] - 1)
    axes.set_xlabel(panel.unit)
    axes.set_ylabel(token_label(panel.vertical))
    axes.set_title(token_label(panel.heading), fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.legend and len(panel.series) > 1:
        more = len(panel.series) - SERIES if panel.chooses == "series" else 0
        axes.legend(fontsize=7, title=f"and {more} more, not shown" if more > 0 else None)


# Attention


def _patterns_size(panel: Patterns, beside: int) -> tuple[float, float]:
    layers, heads, size, _ = panel.patterns.shape
    if layers == heads == 1:
        side = 1.6 + min(12.0, 0.35 * max(size, 6))
        return side + 0.8, side
    return 1.2 + 0.8 * heads, 0.9 + 0.8 * layers


def _draw_patterns(part: "Part", panel: Patterns, beside: int) -> None:
    """All heads side by side, a row a layer; one head alone with its tokens."""
    from matplotlib.colors import Normalize, PowerNorm

    axes, (layers, heads, size, _) = part.subplots(), panel.patterns.shape
    # Weights of many tokens are small: their square roots keep them visible.
    scale = PowerNorm(0.5, 0, 1) if size > NAMED_WEIGHTS and layers * heads > 1 else Normalize(0, 1)
    # A line of NaN, which is drawn as nothing, between neighbouring heads and layers.
    tiles = np.full((layers, size + 1, heads, size + 1), np.nan, np.float32)
    tiles[:, :size, :, :size] = panel.patterns.transpose(0, 2, 1, 3)
    alone, unit = layers == heads == 1, "weight (square-root scale)" if isinstance(scale, PowerNorm) else "weight"
    values = panel.patterns[0, 0] if alone else tiles.reshape(layers * (size + 1), -1)
    image = axes.imshow(values, cmap="Blues", norm=scale, aspect="auto")
    axes.set_title(panel.heading if alone else "queries downwards, keys to the right", fontsize=9)
    axes.set_xlabel("key: what is read" if alone else "head")
    axes.set_ylabel("query: what reads" if alone else "layer")
    middles = (size + 1) * np.arange(max(layers, heads)) + size / 2
    if not alone:
        axes.set_xticks(middles[:heads], [str(head) for head in panel.heads])
        axes.set_yticks(middles[:layers], [str(layer) for layer in panel.layers])
    elif size <= NAMED_WEIGHTS:
        words = [token_label(token, LABEL + 2) for token in panel.tokens]
        axes.set_xticks(range(size), words, rotation=90, fontsize=8)
        axes.set_yticks(range(size), words, fontsize=8)
    part.colorbar(image, ax=axes, fraction=0.03, label=unit)


class _Kind(NamedTuple):
    size: Callable[[Any, int], tuple[float, float]]  # inches, of a panel and the number of panels in its row
    draw: Callable[["Part", Any, int], None]


_DRAWN = {
    HeatMap: _Kind(_heat_size, _draw_heat),
    Bars: _Kind(_bars_size, _draw_bars),
    Text: _Kind(_text_size, _draw_text),
    MarkedText: _Kind(_marked_size, _draw_marked),
    Lines: _Kind(_lines_size, _draw_lines),
    Graph: _Kind(lambda panel, beside: (7.8, 5.0), draw_graph),
    Trace: _Kind(trace_size, draw_trace),
    Patterns: _Kind(_patterns_size, _draw_patterns),
}
