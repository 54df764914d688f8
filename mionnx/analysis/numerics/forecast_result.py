"""`Forecast`: the cost of a narrow dtype, of all, of each group of nodes and of each layer by itself."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mionnx.analysis.numerics.distance import VECTOR_MEASURE, Distance
from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.view import Bars, Columns, Shown, Table, View, readable

NOT_MODELLED = (
    "what a runtime does inside an operator: the order of its sums, approximations of exp and tanh; numbers below the "
    "smallest normal one, which some processors make 0; scores and mixes of attention always add up in float32"
)

DISTANCE_HEADS = ("KL, nats", "at most", "logits apart", "top-1", "not finite")  # of a distance in a table
VECTOR_HEADS = (VECTOR_MEASURE, "at most", "numbers apart", "top-1", "not finite")


@dataclass(frozen=True)
class ForecastRow(Storable):
    """The cost of some numbers alone.

    Attributes:
        kind: "all", "group" or "layer".
        values: how many values of the graph are rounded; weights not counted.
    """

    kind: str
    name: str
    values: int
    distance: Distance

    INSIDE = (Distance,)


@dataclass(frozen=True)
class NotFinite(Storable):
    """A value with an infinity or NaN: its group, in how many texts, and whether it is absorbed behind it."""

    value: str
    group: str
    texts: int
    absorbed: bool


@dataclass(frozen=True, repr=False)
@typed(InputError)
class Forecast(Shown):
    """What a narrow dtype does to next-token distributions.

    Attributes:
        accumulate: dtype in which products add up.
        norms: how norms are computed: "as written", "fused" or "decomposed".
        rows: of all first, then of each group and layer alone.
        not_finite: values with infinities, in order of execution; masks and scores are left out.
        flushed: value -> how many of its numbers become 0.
    """

    model: str
    dtype: str
    accumulate: str
    norms: str
    rows: list[ForecastRow]
    not_finite: list[NotFinite]
    flushed: dict[str, int]
    texts: int
    tokens: int

    INSIDE = (ForecastRow, NotFinite)
    frame_height = 640

    @property
    def all(self) -> Distance:
        """The distance with every number rounded."""
        return self.rows[0].distance

    @property
    def kl(self) -> float:
        """KL(float32 || rounded) in nats, the mean over positions; infinite where a logit is not finite."""
        return self.all.kl if self.all.sound else float("inf")

    @property
    def first(self) -> NotFinite | None:
        """The first value that is not finite and is not absorbed."""
        return next((one for one in self.not_finite if not one.absorbed), None)

    @property
    def absorbed(self) -> list[NotFinite]:
        """Values whose infinities no output shows."""
        return [one for one in self.not_finite if one.absorbed]

    def line(self) -> str:
        """The forecast in one line."""
        how = f"{self.dtype}, norms {self.norms}, sums in {self.accumulate}"
        if not self.all.sound:
            where = f", first at {self.first.value}" if self.first else ""
            return f"{how}: logits of {self.all.not_finite} of {self.all.positions} positions are not finite{where}"
        silent = f"; {count(len(self.absorbed), 'value')} infinite in silence" if self.absorbed else ""
        return f"{how}: {self.all}{silent}"

    def _facts(self) -> Iterator[str]:
        yield from (self.model, self.dtype, f"norms {self.norms}", count(self.texts, "text"))

    def _lines(self) -> Iterator[str]:
        yield self.line()
        yield from (f"{row.kind} {row.name}: {row.distance}" for row in self.rows[1:])

    def _columns(self) -> Columns:
        rows, distances = self.rows, [row.distance for row in self.rows]
        columns = {name: [getattr(row, name) for row in rows] for name in ("kind", "name", "values")}
        return columns | {
            "kl": np.array([one.kl for one in distances]),
            **{name: [getattr(one, name) for one in distances] for name in ("kl_max", "logit", "top_1", "not_finite")},
        }

    def to_dict(self) -> dict[str, Any]:
        """The forecast in one line, its rows, and values that are not finite or become 0."""
        names = ("model", "dtype", "accumulate", "norms", "texts", "tokens", "flushed")
        rows = [
            {"kind": row.kind, "name": row.name, "values": row.values, **row.distance.to_entry()} for row in self.rows
        ]
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "line": self.line(), "rows": rows, "not_finite": [*map(vars, self.not_finite)]}

    def table(self, k: int = 40) -> Table:
        """The first k rows: KL, its largest, the largest difference of logits, top-1, positions not finite."""
        table = Table("", "rounded", "values", *heads(self.all), title=self.line())
        for row in self.rows[:k]:
            table.add_row(row.kind, row.name, str(row.values), *cells(row.distance))
        return table

    def view(self) -> View:
        """The rows as a table, groups and layers as bars, infinities in order of execution."""
        table = self.table(len(self.rows))
        table.title, table.on_page = None, {"heading": "Rounded alone", "most": 60}
        panels: list[object] = [table]
        measure = heads(self.all)[0]
        kinds = [kind for kind in ("group", "layer") if any(row.kind == kind for row in self.rows)]
        for kind in kinds or ["all"]:
            rows = [row for row in self.rows if row.kind == kind]
            if rows:
                sizes = np.array([row.distance.kl if row.distance.compared else np.nan for row in rows])
                panels.append(
                    Bars(
                        [row.name for row in rows],
                        sizes,
                        measure,
                        heading=f"{measure}, {kind}" if kind == "all" else f"{measure}, each {kind} alone",
                    )
                )
        if self.not_finite:
            heading = {"heading": "Not finite, in order of execution", "most": 30}
            infinite = Table("value", "group", "texts", "", on_page=heading)
            for bad in self.not_finite:
                infinite.add_row(bad.value, bad.group, str(bad.texts), "absorbed" if bad.absorbed else "goes on")
            panels.append(infinite)
        about = f"{self.model}, {count(self.texts, 'text')}, {count(self.tokens, 'token')}"
        return View(f"Forecast of {self.dtype}", panels, about, self.line(), f"Not modelled: {NOT_MODELLED}.")


def heads(distance: Distance) -> tuple[str, ...]:
    """What the cells of a distance are."""
    return VECTOR_HEADS if distance.vectors else DISTANCE_HEADS


def cells(distance: Distance) -> list[str]:
    """A distance as cells of a table, below `heads`."""
    sizes = (distance.kl, distance.kl_max, distance.logit)
    finite = [readable(one if distance.compared else None) for one in sizes]
    top = "-" if distance.vectors else f"{distance.top_1:.1%}"
    return [*finite, top, f"{distance.not_finite} of {distance.positions}"]
