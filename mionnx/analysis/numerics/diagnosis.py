"""`Diagnosis`: what a narrow dtype does to a model, the evidence, the cure, and what it does in a runtime."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mionnx.analysis.numerics.distance import Distance
from mionnx.analysis.numerics.forecast_result import Forecast, cells, heads
from mionnx.analysis.numerics.range_report import RangeReport
from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.view import Columns, Shown, Table, View


@dataclass(frozen=True)
class Check(Storable):
    """A runtime that ran the sound model, and its distance from float32; None and why where it did not run."""

    runtime: str
    distance: Distance | None
    why: str
    facts: Mapping[str, str]

    INSIDE = (Distance,)


@dataclass(frozen=True, repr=False)
@typed(InputError)
class Diagnosis(Shown):
    """A model's state in float16.

    Attributes:
        target: "float16", "webgpu", "cuda" or "int4".
        bound: of KL in nats, or of the distance of vectors, that counts as sound.
        range: magnitudes of float32.
        forecast: as the file is, with each group and layer alone; `decomposed` with norms in their own nodes.
        after: the forecast with the cure; None where there is none, and `why` says what stands against it.
        cure: lines, the first of them the remedy.
        checks: runtimes that ran the sound model.
        folder: of the sound model; "" where none is kept.
    """

    model: str
    target: str
    bound: float
    range: RangeReport
    forecast: Forecast
    decomposed: Forecast
    after: Forecast | None
    cure: list[str]
    checks: list[Check]
    why: str
    folder: str

    INSIDE = (RangeReport, Forecast, Check)
    frame_height = 900

    @property
    def sound(self) -> bool:
        """Whether the file as it is would be sound: its logits finite and within the bound."""
        return self.forecast.all.sound and self.forecast.kl <= self.bound

    def line(self) -> str:
        """The diagnosis in one line."""
        first, now = self.range.first, self.forecast
        if first is not None and first.largest > 0:
            line = f"float16: {first} (limit 65,504)"
        elif self.range.absorbed:
            line = f"float16: nothing overflows that a fused norm does not hold in float32, {now_told(now)}"
            return f"{line}. With norms in their own nodes: {now_told(self.decomposed)}."
        else:
            line = f"float16: nothing overflows, {now_told(now)}"
        if self.sound:
            return f"{line}; {now_told(now)}." if first is not None else f"{line}."
        state = f"{'vectors' if now.all.vectors else 'logits'} are NaN" if not now.all.compared else now_told(now)
        cure = f"Remedy: {self.cure[0]}" if self.cure else f"No remedy: {self.why}"
        after = f". After it: {self.after.all}" if self.after else ""
        return f"{line}; {state}. {cure}{after}."

    def _facts(self) -> Iterator[str]:
        yield from (self.model, f"target {self.target}", "sound" if self.sound else "not sound")

    def _lines(self) -> Iterator[str]:
        yield self.line()
        yield from self.cure[1:]
        yield from map(_told, self.checks)

    def _rows(self) -> list[tuple[str, Distance]]:
        rows = [("forecast, as it is", self.forecast.all), ("forecast, norms decomposed", self.decomposed.all)]
        if self.after is not None:
            rows += [(f"forecast, cured, {row.name}", row.distance) for row in self.after.rows if row.kind == "all"]
        return rows + [(f"measured, cured, {one.runtime}", one.distance) for one in self.checks if one.distance]

    def _columns(self) -> Columns:
        rows = self._rows()
        names = ("kl", "kl_max", "logit", "top_1", "not_finite", "positions")
        return {"what": [what for what, _ in rows]} | {
            name: [getattr(distance, name) for _, distance in rows] for name in names
        }

    def table(self, k: int = 10) -> Table:
        """Forecasts without and with the cure, and what was measured."""
        table = Table("", *heads(self.forecast.all), title=self.line())
        for what, one in self._rows()[:k]:
            table.add_row(what, *cells(one))
        return table

    def to_dict(self) -> dict[str, Any]:
        """The line, the rows and the lines of the cure."""
        return {
            "model": self.model,
            "target": self.target,
            "line": self.line(),
            "sound": self.sound,
            "bound": self.bound,
            "rows": [{"what": what, **one.to_entry()} for what, one in self._rows()],
            "range": [vars(row) for row in (*self.range.overflows, *self.range.absorbed, *self.range.flushed)],
            "not_finite": [vars(one) for one in self.forecast.not_finite],
            "cure": self.cure,
            "checks": [{"runtime": one.runtime, "why": one.why, "facts": dict(one.facts)} for one in self.checks],
            "why": self.why,
            "folder": self.folder,
        }

    def view(self) -> View:
        """The rows, the cure, then the range and the forecast as their own pages have them."""
        table = self.table()
        table.title, table.on_page = None, {"heading": "Cost"}
        cure = Table("cure", on_page={"heading": "Cure"})
        for line in self.cure or [self.why or "none needed"]:
            cure.add_row(line.replace("[", r"\["))
        if self.folder:
            cure.add_row(f"the sound model: {self.folder}")
        checks = Table("runtime", "what it gave", "versions", on_page={"heading": "Checked in a runtime"})
        for one in self.checks:
            facts = ", ".join(f"{name} {value}" for name, value in one.facts.items())
            cells = (one.runtime, str(one.distance) if one.distance else one.why, facts)
            checks.add_row(*(cell.replace("[", r"\[") for cell in cells))
        panels = [table, cure, *([checks] if self.checks else [])]
        panels += [*self.range.view().panels, *self.forecast.view().panels]
        read = f"{count(self.range.texts, 'text')}, {count(self.range.tokens, 'token')}"
        facts = f"{self.model}, target {self.target}, {read}"
        return View("Numeric diagnosis", panels, self.line(), facts, self.forecast.view().meaning)


def _told(check: Check) -> str:
    return f"{check.runtime}: {check.distance if check.distance else check.why}"


def now_told(forecast: Forecast) -> str:
    """A forecast's distance, and infinities that no output shows."""
    silent = f", {len(forecast.absorbed)} values infinite in silence" if forecast.absorbed else ""
    return f"{forecast.all}{silent}"
