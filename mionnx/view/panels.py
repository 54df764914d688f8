"""Panels: a result's picture and page, declared once as maps, bars, lines, tables, texts and graphs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import rich.table
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement

ENDLESS = 10_000  # columns of a terminal in which nothing is folded
Array = NDArray[Any]


class Table(rich.table.Table):
    """A table of rich; as text it is the table itself, as wide as the terminal at most.

    It may be a panel of a page.

    Attributes:
        narrower: shown instead where this one would have to fold its cells.
        on_page: "heading" and "note" above it on a page; "chooses": whether a click on a row chooses it for the whole
            page; "most": rows shown at first; "styles": heading of a column -> "token", "share" (coloured from 0 to 1)
            or "bar".
    """

    narrower: Self | None = None
    on_page: Mapping[str, Any]

    def __init__(self, *headers: Any, on_page: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*headers, **options)
        self.on_page = on_page or {}

    @property
    def natural_width(self) -> int:
        """The columns that it takes if nothing is folded; the title does not count."""
        console = Console(width=ENDLESS)
        return Measurement.get(console, console.options, self).maximum

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.narrower is None or self.natural_width <= options.max_width:
            yield from super().__rich_console__(console, options)
        else:
            yield from self.narrower.__rich_console__(console, options)

    def __str__(self) -> str:
        # Without colours: the text may go into a file or a notebook.
        console = Console(color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get().rstrip("\n")

    __repr__ = __str__


@dataclass(kw_only=True)
class Panel:
    """One part of a picture or page; a page writes its heading and note above it."""

    heading: str = ""
    note: str = ""


@dataclass
class HeatMap(Panel):
    """Coloured cells; further axes stand between rows and columns.

    A page lets choose the entry of each further axis; a picture draws a map of each entry.

    Attributes:
        axes: name -> labels of its entries; rows first, columns last.
        colours: name -> numbers in the shape of the axes; a page lets choose the one that colours the cells.
        limits: name -> the number of the full colour; the largest in size where none is named.
        logarithmic: names of numbers that are coloured by log(1 + number).
        diverging: blue below zero, white at zero, red above; False: from white at zero to blue.
        hover: further numbers, in the shape of the axes or one for all, that a page shows under the pointer.
        errors: standard errors of the first colours, which a picture draws beside them.
        marked: cells with an outline, (row, column).
        words: texts that `ids` refer to; cells show words then, numbers otherwise.
        ids: [rows, columns, k]: the words of each cell, the first one in it, all under the pointer.
        shares: [rows, columns, k]: the number of each of these words.
        numbers: one for each column, below its label.
        chooses: a click on a column chooses it for the whole page.
    """

    axes: Mapping[str, Sequence[str]]
    colours: Mapping[str, Array]
    limits: Mapping[str, float] = field(default_factory=dict)
    logarithmic: Sequence[str] = ()
    diverging: bool = True
    hover: Mapping[str, Any] = field(default_factory=dict)
    errors: Array | None = None
    marked: Sequence[tuple[int, int]] = ()
    words: Sequence[str] = ()
    ids: Array | None = None
    shares: Array | None = None
    numbers: Sequence[int] = ()
    chooses: bool = False


@dataclass
class Bars(Panel):
    """A bar for each label: red above zero, blue below.

    Attributes:
        unit: label of the axis.
        errors: standard errors.
        upright: a picture draws all, in their order and without labels; False: the largest, from top to bottom.
        level: number at which a picture draws a dotted line.
        order: their order, in words.
    """

    labels: Sequence[str]
    values: Array
    unit: str
    errors: Array | None = None
    upright: bool = False
    level: float = 0.0
    order: str = "in the order of the layers"


@dataclass
class Series:
    """One line of `Lines`.

    Attributes:
        values: [points]; NaN where there is none.
        dotted: without points.
        errors: [points], of a picture's error bars.
        marks: places on the horizontal axis with a dotted line down to it.
        notes: [points], texts under the pointer.
    """

    name: str
    values: Any
    dotted: bool = False
    errors: Any = None
    marks: Sequence[float] = ()
    notes: Sequence[str] = ()


@dataclass
class Lines(Panel):
    """Curves over numbers or names.

    Attributes:
        across: numbers of the horizontal axis, or names of its points.
        unit, vertical: labels of the horizontal and of the vertical axis.
        low, high: ends of the vertical axis; those of the numbers where they are None.
        scale: "linear" or "log", of the vertical axis; `low` is its end, and what is smaller lies there.
        spaced: "linear", or "log": log(1 + number) on the horizontal axis.
        levels: name -> height of a horizontal dashed line.
        chooses: "series" or "points": what a click chooses for the whole page; all other series are faint.
        legend: whether one names the series, and hides them; a table that chooses a series is a page's legend.
    """

    across: Sequence[Any] | Array
    series: Sequence[Series]
    unit: str
    vertical: str
    low: float | None = None
    high: float | None = None
    scale: str = "linear"
    spaced: str = "linear"
    levels: Mapping[str, float] = field(default_factory=dict)
    chooses: str = ""
    legend: bool = True


@dataclass
class Text(Panel):
    """Tokens, coloured by scores.

    Attributes:
        tokens: [seq].
        scores: for each option of the page, or for the one that there is: numbers by position.
        limit: the size of score with the full colour; the largest of the option where it is None.
        diverging: as in `HeatMap`.
        facts: a line on the scores, for each option.
        chips: [seq], (option, score) of what is largest at each token; a click chooses the option.
        chooses: the scores are those of the page's option.
        here: position with an outline.
        legend: whether a scale of the colours stands below.
    """

    tokens: Sequence[str]
    scores: Sequence[Any] = ()
    limit: float | None = None
    diverging: bool = True
    facts: Sequence[str] = ()
    chips: Sequence[Sequence[tuple[int, float]]] = ()
    chooses: bool = False
    here: int | None = None
    unit: str = ""
    legend: bool = False


@dataclass
class Graph(Panel):
    """Edges between nodes: the page's options are so many leading edges.

    Attributes:
        edges: (sender, receiver, score), the leading first; labels are `node` or `node<input>`.
        places: node -> (horizontal, vertical).
        shared: pairs of nodes that a dotted line joins.
        sizes: of the circuits, one for each option of the page.
        most: number of all edges.
        drawn: edges of a picture.
    """

    edges: Sequence[tuple[str, str, float]]
    places: Mapping[str, tuple[float, float]]
    shared: Sequence[tuple[str, str]]
    sizes: Sequence[int] | Array
    most: int
    unit: str
    drawn: int


@dataclass
class Patterns(Panel):
    """Attention patterns of layers and heads, [layer, head, query, key], from 0 to 1."""

    tokens: Sequence[str]
    layers: Sequence[int]
    heads: Sequence[int]
    patterns: Array


@dataclass
class Each(Panel):
    """Panels, one for each option of the page, of which the chosen one is shown."""

    panels: Sequence["Panel | Table"]


@dataclass
class View:
    """Lines and panels of a result's picture and page.

    Attributes:
        title, about, facts, meaning: lines above; a picture has the first two.
        panels: below one another; a list is a row, a list in it a column.
        choice, options: a page's list to choose from, its label and entries; none without a label.
        chosen: the option with which a page opens.
    """

    title: str
    panels: Sequence[Any]
    about: str = ""
    facts: str = ""
    meaning: str = ""
    choice: str = ""
    options: Sequence[str] = ()
    chosen: int = 0
