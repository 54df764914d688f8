"""Panels: a result's picture and page, declared once as maps, bars, lines, tables, texts and graphs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Self

import rich.table
from numpy.typing import NDArray
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement

ENDLESS = 10_000  # columns of a terminal in which nothing is folded
Array = NDArray[Any]


class Table(rich.table.Table):
    """A table of rich; as text it is the table itself, as wide as the terminal at most.

    It may be a panel of a page.
    """

    narrower: Self | None = None  # shown instead where this one would have to fold its cells
    # "heading" and "note" above it on a page; "chooses": whether a click on a row chooses it for the whole page;
    # "most": rows shown at first; "styles": heading of a column -> "token" or "share" (coloured from 0 to 1).
    on_page: Mapping[str, Any]

    def __init__(self, *headers: Any, on_page: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*headers, **options)
        self.on_page = on_page or {}

    @classmethod
    def fitting(
        cls,
        cells: Mapping[str, Sequence[str]],
        points: Sequence[str] = (),
        least: Sequence[str] = (),
        folds: str | None = None,
        **options: Any,
    ) -> Self:
        """A table of columns that narrow terminals show in part: no name is cut, numbers are left out.

        Args:
            points: the columns of hook points, which become short first.
            least: the columns that go after that, in this order.
            folds: the column whose cells may be folded; the first if left out, unless it has hook points.
        """
        short = {name: [*map(short_point, one)] if name in points else one for name, one in cells.items()}
        forms = [cells, *([short] if points else [])]
        forms += [{name: one for name, one in short.items() if name not in least[: i + 1]} for i in range(len(least))]
        folds = next((name for name in [*cells][:1] if name not in points), None) if folds is None else folds
        tables = [cls(**options) for _ in forms]
        for form, table in zip(forms, tables, strict=True):
            for name in form:
                table.add_column(name, no_wrap=len(forms) > 1 and name != folds, overflow="fold")
            for row in zip(*form.values(), strict=True):
                table.add_row(*row)
            if form is not cells and any(form.get(name) for name in points):
                short_names = f"{' and '.join(points)}: without blocks. and hook_"
                table.caption = f"{table.caption}; {short_names}" if table.caption else short_names
        for wide, narrow in pairwise(tables):
            wide.narrower = narrow
        return tables[0]

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


def short_point(name: str) -> str:
    """A hook point without "blocks." and "hook_": "3.resid_post", "0.attn.pattern"."""
    return name.removeprefix("blocks.").replace("hook_", "", 1)


@dataclass(kw_only=True)
class Panel:
    """One part of a picture or page; a page writes its heading and note above it."""

    heading: str = ""
    note: str = ""


@dataclass
class HeatMap(Panel):
    """Coloured cells; further axes stand between rows and columns.

    A page lets choose the entry of each further axis; a picture draws a map of each entry.
    """

    axes: Mapping[str, Sequence[str]]  # name -> labels of its entries; rows first, columns last
    # Name -> numbers in the shape of the axes; a page lets choose the one that colours the cells.
    colours: Mapping[str, Array]
    # Name -> the number of the full colour; the largest in size where none is named.
    limits: Mapping[str, float] = field(default_factory=dict)
    logarithmic: Sequence[str] = ()  # names of numbers that are coloured by log(1 + number)
    diverging: bool = True  # blue below zero, white at zero, red above; False: from white at zero to blue
    # Further numbers, in the shape of the axes or one for all, that a page shows under the pointer.
    hover: Mapping[str, Any] = field(default_factory=dict)
    errors: Array | None = None  # standard errors of the first colours, which a picture draws beside them
    marked: Sequence[tuple[int, int]] = ()  # cells with an outline, (row, column)
    words: Sequence[str] = ()  # texts that `ids` refer to; cells show words then, numbers otherwise
    ids: Array | None = None  # [rows, columns, k]: the words of each cell, the first one in it, all under the pointer
    shares: Array | None = None  # [rows, columns, k]: the number of each of these words
    numbers: Sequence[int] = ()  # one for each column, below its label
    chooses: bool = False  # a click on a column chooses it for the whole page


@dataclass
class Bars(Panel):
    """A bar for each label: red above zero, blue below."""

    labels: Sequence[str]
    values: Array
    unit: str  # label of the axis
    errors: Array | None = None  # standard errors
    # A picture draws all, in their order and without labels; False: the largest, from top to bottom.
    upright: bool = False
    level: float = 0.0  # number at which a picture draws a dotted line
    order: str = "in the order of the layers"  # their order, in words


@dataclass
class Series:
    """One line of `Lines`."""

    name: str
    values: Any  # [points]; NaN where there is none
    dotted: bool = False  # without points
    errors: Any = None  # [points], of a picture's error bars
    marks: Sequence[float] = ()  # places on the horizontal axis with a dotted line down to it
    notes: Sequence[str] = ()  # [points], texts under the pointer


@dataclass
class Lines(Panel):
    """Curves over numbers or names."""

    across: Sequence[Any] | Array  # numbers of the horizontal axis, or names of its points
    series: Sequence[Series]
    # unit, vertical: labels of the horizontal and of the vertical axis.
    unit: str
    vertical: str
    # low, high: ends of the vertical axis; those of the numbers where they are None.
    low: float | None = None
    high: float | None = None
    scale: str = "linear"  # "linear" or "log", of the vertical axis; `low` is its end, and what is smaller lies there
    spaced: str = "linear"  # "linear", or "log": log(1 + number) on the horizontal axis
    levels: Mapping[str, float] = field(default_factory=dict)  # name -> height of a horizontal dashed line
    chooses: str = ""  # "series" or "points": what a click chooses for the whole page; all other series are faint
    # Whether one names the series, and hides them; a table that chooses a series is a page's legend.
    legend: bool = True


@dataclass
class Text(Panel):
    """Tokens, coloured by scores."""

    tokens: Sequence[str]  # [seq]
    scores: Sequence[Any] = ()  # for each option of the page, or for the one that there is: numbers by position
    limit: float | None = None  # the size of score with the full colour; the largest of the option where it is None
    diverging: bool = True  # as in `HeatMap`
    least: float = 0.0  # the size from which on a score counts, where colours do not diverge
    facts: Sequence[str] = ()  # a line on the scores, for each option
    # [seq], (option, score) of what is largest at each token; a click chooses the option.
    chips: Sequence[Sequence[tuple[int, float]]] = ()
    chooses: bool = False  # the scores are those of the page's option
    here: int | None = None  # position with an outline
    unit: str = ""
    legend: bool = False  # whether a scale of the colours stands below


@dataclass
class MarkedText(Panel):
    """A text, parts of which are marked with a label and its share, from 0 to 1."""

    pieces: Sequence[tuple[str, str, float]]  # (words, label, share), which make the text; no label where none is
    labels: Sequence[str]  # names of labels in the order of their colours


@dataclass
class Examples(Panel):
    """Texts for each option of the page, their tokens coloured by scores above 0."""

    # For each option (tokens, scores, place of the token with an outline); a colour is full at the option's largest.
    texts: Sequence[Sequence[tuple[Sequence[str], Array, int]]]


@dataclass
class Graph(Panel):
    """Edges between nodes: the page's options are so many leading edges."""

    # (sender, receiver, score), the leading first; labels are `node` or `node<input>`.
    edges: Sequence[tuple[str, str, float]]
    places: Mapping[str, tuple[float, float]]  # node -> (horizontal, vertical)
    shared: Sequence[tuple[str, str]]  # pairs of nodes that a dotted line joins
    sizes: Sequence[int] | Array  # of the circuits, one for each option of the page
    most: int  # number of all edges
    unit: str
    drawn: int  # edges of a picture


class TraceNode(NamedTuple):
    """One node of an attribution graph; tokens are of layer -1, logits of the layer above the last."""

    name: str
    kind: str  # "feature", "error", "token" or "logit"
    layer: int
    position: int
    label: str
    influence: float  # of a logit its probability
    activation: float | None  # of a feature
    group: str  # name of its supernode; empty without one
    words: str = ""  # further words under the pointer


@dataclass
class Trace(Panel):
    """An attribution graph: tokens across, layers up."""

    tokens: Sequence[str]
    layers: int
    nodes: Sequence[TraceNode]
    edges: Sequence[tuple[int, int, float]]  # (source, target, effect), by index of the node; the largest first


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
    """Lines and panels of a result's picture and page."""

    # title, about, facts, meaning: lines above; a picture has the first two.
    title: str
    panels: Sequence[Any]  # below one another; a list is a row, a list in it a column
    about: str = ""
    facts: str = ""
    meaning: str = ""
    # choice, options: a page's list to choose from, its label and entries; none without a label.
    choice: str = ""
    options: Sequence[str] = ()
    chosen: int = 0  # the option with which a page opens
