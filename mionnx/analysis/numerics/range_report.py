"""`RangeReport`: magnitudes of values over texts as rows, and the map of layers and kinds of values."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, log2
from typing import Any

import numpy as np

from mionnx.analysis.numerics.dtypes import narrow_of
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint, layer_of
from mionnx.machine.brief import count
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.view import Columns, HeatMap, Lines, Series, Shown, Table, View, readable

SHOWN = 12  # rows of a printed list
NO_LAYER = "outside"


@dataclass(frozen=True)
class RangeRow(Storable):
    """One value over all texts.

    Attributes:
        value: a hook point, or a value of the graph.
        what: "value"; "sum of squares" of what a norm reads; "mean square" inside a norm; "cube" inside a GELU;
            "partial sums" of a product.
        operator: that computes it.
        hook: whether it is a hook point.
        largest: magnitude.
        least: the smallest, over positions, of a position's largest magnitude; NaN where it was not looked at.
        text, position, token: of the largest; None and "" where the value has no position.
        absorbed: whether an infinity there is finite again a few nodes on, so that no output shows it.
    """

    value: str
    what: str
    operator: str
    hook: bool
    largest: float
    least: float
    text: int
    position: int | None
    token: str
    absorbed: bool

    @property
    def kind(self) -> str:
        """The value's hook point without its layer, and what it is of it."""
        name = self.value.split(".", 2)[-1] if layer_of(self.value) is not None else self.value
        name = name.removeprefix("attn.").removeprefix("mlp.").removeprefix("rwkv.").removeprefix("hook_")
        return name if self.what == "value" else f"{name}, {self.what}"

    def __str__(self) -> str:
        what = "" if self.what == "value" else f" ({self.what})"
        where = "" if self.position is None else f" at token {self.position} {self.token!r} of text {self.text}"
        return f"{self.value}{what} reaches {readable(self.largest)}{where}"


@dataclass(frozen=True)
class Massive(Storable):
    """One of the largest numbers of the residual stream; the median magnitude beside it."""

    hook: str
    text: int
    position: int
    token: str
    dimension: int
    value: float
    median: float


@dataclass(frozen=True, repr=False)
@typed(InputError)
class RangeReport(Shown):
    """Magnitudes of a model's values over texts, in order of execution.

    Attributes:
        model: its name.
        dtype: the narrow dtype that values are held against.
        massive: the largest numbers of the stream, by position and dimension, where it is largest.
        texts, tokens: how many there were.
    """

    model: str
    dtype: str
    rows: list[RangeRow]
    massive: list[Massive]
    texts: int
    tokens: int

    INSIDE = (RangeRow, Massive)
    frame_height = 720

    def over(self, dtype: str | None = None) -> list[RangeRow]:
        """The rows whose largest magnitude a dtype cannot hold, in order of execution."""
        limit = narrow_of(dtype or self.dtype).limit
        return [row for row in self.rows if row.largest > limit]

    @property
    def overflows(self) -> list[RangeRow]:
        """Rows that overflow, and whose infinity goes on."""
        return [row for row in self.over() if not row.absorbed and row.what != "partial sums"]

    @property
    def absorbed(self) -> list[RangeRow]:
        """Rows that overflow in silence: outputs stay finite and are wrong, as a norm of an infinite square is 0."""
        return [row for row in self.over() if row.absorbed]

    @property
    def flushed(self) -> list[RangeRow]:
        """Rows of norms with a mean square below the least number of the dtype: it becomes 0."""
        least = narrow_of(self.dtype).least
        return [row for row in self.rows if row.what == "mean square" and row.least < least]

    @property
    def first(self) -> RangeRow | None:
        """The first value that overflows."""
        return next(iter(self.overflows), None)

    def line(self) -> str:
        """The finding in one line."""
        limit = f"limit {narrow_of(self.dtype).limit:,.0f}" if self.dtype == "float16" else "its limit"
        if self.first is not None:
            more = len(self.overflows) - 1
            beside = f", and {count(more, 'more value')} behind it" if more else ""
            return f"{self.dtype}: {self.first} ({limit}){beside}"
        if self.absorbed:
            largest = max(self.absorbed, key=lambda row: row.largest)
            where = f"{count(len(self.absorbed), 'value')} inside norms and activations"
            return f"{self.dtype}: no value overflows where norms are fused; {where} would ({largest})"
        return f"{self.dtype}: nothing overflows; the largest is {max(self.rows, key=lambda row: row.largest)}"

    def _facts(self) -> Iterator[str]:
        yield from (self.model, self.dtype, count(self.texts, "text"), count(self.tokens, "token"))
        yield from (f"{len(self.overflows)} overflow", f"{len(self.absorbed)} absorbed", f"{len(self.flushed)} flushed")

    def _lines(self) -> Iterator[str]:
        yield self.line()
        yield from map(str, [*self.overflows[1:], *self.absorbed])

    def _columns(self) -> Columns:
        layers = [layer_of(row.value) for row in self.rows]
        names = ("value", "what", "largest", "least", "text", "position", "token", "operator", "hook", "absorbed")
        return {"layer": layers} | {name: [getattr(row, name) for row in self.rows] for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The finding, all rows, and the names of those that overflow, are absorbed or flushed."""
        groups = {"overflows": self.overflows, "absorbed": self.absorbed, "flushed": self.flushed}
        facts = {name: getattr(self, name) for name in ("model", "dtype", "texts", "tokens")}
        listed = {name: [[row.value, row.what] for row in rows] for name, rows in groups.items()}
        rows = {"rows": [*map(vars, self.rows)], "massive": [*map(vars, self.massive)]}
        return {**facts, "line": self.line(), **listed, **rows}

    def table(self, k: int = 10) -> Table:
        """The first k rows that overflow, are absorbed or flushed; of none the largest ones."""
        title = self.line()
        rows = [("overflows", row) for row in self.overflows] + [("absorbed", row) for row in self.absorbed]
        rows += [("flushed", row) for row in self.flushed]
        if not rows:
            rows = [("fits", row) for row in sorted(self.rows, key=lambda row: -row.largest)]
        table = Table("", "value", "what", "largest", "least", "token", title=title)
        for verdict, row in rows[:k]:
            token = "" if row.position is None else f"{row.position} {row.token!r}"
            table.add_row(
                verdict, _plain(row.value), row.what, readable(row.largest), readable(row.least), _plain(token)
            )
        return table

    def view(self) -> View:
        """Layers by kinds of values, the stream by layer, and everything that the dtype cannot hold."""
        limit = narrow_of(self.dtype).limit
        layered = [row for row in self.rows if layer_of(row.value) is not None and _shown(row)]
        kinds = [*dict.fromkeys(row.kind for row in layered)]
        layers = sorted({layer_of(row.value) or 0 for row in layered})
        sizes = np.full((len(layers), len(kinds)), np.nan)
        for row in layered:
            at = layers.index(layer_of(row.value) or 0), kinds.index(row.kind)
            sizes[at] = np.fmax(sizes[at], row.largest)
        powers = np.log2(np.maximum(sizes, 2.0**-24)) - log2(limit)
        cells = {"powers of two beyond the limit": powers}
        view: list[Any] = [
            HeatMap(
                {"layer": [*map(str, layers)], "kind": kinds},
                cells,
                limits={next(iter(cells)): 16.0},
                hover={"largest": sizes},
                heading=f"Largest magnitudes, as powers of two above (red) or below {limit:,.0f}",
            ),
            self._stream(limit),
        ]
        if self.over() or self.flushed:
            view.append(self._listed())
        if self.massive:
            view.append(self._massive())
        about = f"{self.model}, {count(self.texts, 'text')}, {count(self.tokens, 'token')}"
        return View(f"Range beside {self.dtype}", view, about, self.line())

    def _stream(self, limit: float) -> Lines:
        rows = [row for row in self.rows if row.hook and HookPoint.parse(row.value).group == "stream"]
        most = [row.largest if isfinite(row.largest) else np.nan for row in rows]
        least = [row.least for row in rows]
        names = [row.value.removeprefix("blocks.").replace(".hook_resid", " resid") for row in rows]
        series = [Series("largest", most, notes=[*map(str, rows)]), Series("least of a position's largest", least)]
        levels = {self.dtype: limit}
        return Lines(names, series, "hook point", "magnitude", scale="log", low=1e-3, levels=levels,
                     heading="Residual stream")  # fmt: skip

    def _listed(self) -> Table:
        table = Table("", "value", "what", "largest", "least", "token", "operator",
                      on_page={"heading": f"Beyond {self.dtype}, in order of execution", "most": 40})  # fmt: skip
        verdicts = [("overflows", self.overflows), ("absorbed", self.absorbed), ("flushed", self.flushed)]
        for verdict, rows in verdicts:
            for row in rows:
                token = "" if row.position is None else f"{row.position} {row.token!r}"
                cells = (row.value, row.what, readable(row.largest), readable(row.least), token, row.operator)
                table.add_row(verdict, *map(_plain, cells))
        return table

    def _massive(self) -> Table:
        heading = f"Massive activations at {self.massive[0].hook}"
        table = Table("position", "token", "dimension", "value", "median magnitude", on_page={"heading": heading})
        for one in self.massive:
            cells = (one.position, repr(one.token), one.dimension, readable(one.value), readable(one.median))
            table.add_row(*map(_plain, cells))
        return table


def _plain(cell: object) -> str:
    return str(cell).replace("[", r"\[")


def _shown(row: RangeRow) -> bool:
    return row.hook or row.what in ("sum of squares", "partial sums")


def rows_by(rows: Sequence[RangeRow]) -> dict[str, float]:
    """Value -> its largest magnitude."""
    return {row.value: row.largest for row in rows if row.what == "value"}
