"""`Verification`: differences of runtimes at each hook point, as numbers, text, table and page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from rich.markup import escape

from mionnx.analysis.quantisation.matrix_loss import MatrixLoss
from mionnx.errors import InputError, nearest
from mionnx.machine.brief import Brief, count
from mionnx.machine.decimals import decimal
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.verify.difference import HookDifference, LayerLoss, Repeat
from mionnx.verify.losses import MatrixLosses, ModelLosses, percent
from mionnx.view import Columns, Each, Lines, Series, Shown, Table, View, readable

LEAST_DIFFERENCE = 1e-9  # where curves on a logarithmic axis begin: what is identical lies there
NAMED_NODES = 8  # nodes of a step that are named
NARROW_WIDTH = 80  # columns of a terminal that has no room for all numbers
LEAST = ("cosine", "absolute", "greedy", "top 1", "KL, nats")  # left out in this order where there is no room


@dataclass(frozen=True)
class Fault(Storable):
    """The first step that adds more than the tolerance by itself.

    Attributes:
        hook: the hook point at its end.
        after: the hook points that it starts from; none if it starts from the tokens.
        local: the difference that it adds, as a share of the largest value there.
        nodes: `name (operator)`; narrowed down where both runtimes run graphs.
        value: the first value of the graph that differs, where one was found.
    """

    hook: str
    after: list[str]
    local: float
    nodes: list[str]
    value: str | None = None

    def __str__(self) -> str:
        more = len(self.nodes) - NAMED_NODES
        named = ", ".join(self.nodes[:NAMED_NODES]) + f" and {more} more" * (more > 0)
        where = f" between {', '.join(self.after) or 'the tokens'} and {self.hook}"
        at = f", first in {self.value}" if self.value else ""
        return f"{self.hook}: this step alone adds {self.local:.2e} of its scale{where}{at}; {named}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


@dataclass(repr=False)
class Beside(Brief, Storable):
    """One runtime beside the first.

    Attributes:
        rows: hook points in execution order.
        logits: KL in nats, of the first's distribution from this one's and back ("kl_back_mean": KL(this || first)),
            shares of positions with the same top token, and of the same top tokens.
        greedy: share of greedily chosen tokens that are the same, up to the first that differs; None if none were.
        layers: for a second model, the distance that each layer adds.
    """

    title: str
    rows: list[HookDifference]
    logits: dict[str, float]
    greedy: float | None
    fault: Fault | None
    environment: dict[str, Any]
    seconds: float
    layers: list[LayerLoss] = field(default_factory=list)

    @property
    def heaviest(self) -> LayerLoss | None:
        """The layer that adds most to the distance of two models; None in a comparison of runtimes."""
        return max(self.layers, key=lambda one: one.added, default=None)

    def _facts(self) -> Iterator[str]:
        yield from (self.title, count(len(self.rows), "hook point"))
        yield f"largest relative difference {self.worst.relative:.1e} at {self.worst.name}"

    def agrees(self, tolerance: float) -> bool:
        """Whether all that was compared is a number, and within the tolerance."""
        return self.worst.relative <= tolerance and all(row.finite for row in self.rows)

    def trouble(self, tolerance: float) -> str | None:
        """Describe the disagreement; None if there is none."""
        strange = next((row.name for row in self.rows if not row.finite), None)
        if strange is not None:
            return f"{strange} has NaN or infinity in the first runtime, and what is computed from it says nothing"
        if self.fault is not None:
            return str(self.fault)
        if self.agrees(tolerance):
            return None
        steps = [(row.local, row.name) for row in self.rows if row.local is not None]
        if not steps:
            return f"largest difference at {self.worst.name}; what single steps add was not measured"
        most, at = max(steps, key=lambda step: step[0])
        return f"no single step adds more than {tolerance:g}: the differences add up, most of all ({most:.2e}) at {at}"

    @property
    def worst(self) -> HookDifference:
        """Hook point with the largest relative difference."""
        return max(self.rows, key=lambda row: row.relative)


@dataclass(repr=False)
@typed(InputError)
class Verification(Shown):
    """Differences of runtimes, hook point by hook point.

    Attributes:
        reference: the runtime that all others are compared with.
        skipped: runtime -> why it did not run, and what would install it.
        failed: runtime -> how it failed while it ran.
        tolerance: largest relative difference that is agreement.
        notes: what a reader has to know: another graph, slices only.
        hashes: of the reference's graph, weights and spec.
        repeats: which runs are bit-identical, if that was asked for.
        matrices: of a quantised model beside its floats, what each matrix costs by itself, the heaviest first.
    """

    title: str
    reference: str
    besides: list[Beside]
    skipped: dict[str, str]
    failed: dict[str, str]
    tolerance: float
    notes: list[str]
    prompts: list[str]
    hashes: dict[str, str]
    environment: dict[str, Any]
    repeats: list[Repeat] = field(default_factory=list)
    matrices: list[MatrixLoss] = field(default_factory=list)
    frame_height = 720
    INSIDE: ClassVar = (Beside, HookDifference, Fault, Repeat, LayerLoss, MatrixLoss)

    @property
    def agrees(self) -> bool:
        """Whether no runtime failed, and all are within the tolerance at every hook point."""
        return not self.failed and all(beside.agrees(self.tolerance) for beside in self.besides)

    def beside(self, title: str) -> Beside:
        """One runtime's part.

        Raises:
            InputError: it was not compared.
        """
        besides = {beside.title: beside for beside in self.besides}
        if title not in besides:
            raise InputError(f"no runtime {title!r} was compared, only {', '.join(besides)}{nearest(title, besides)}")
        return besides[title]

    def to_dict(self) -> dict[str, Any]:
        least = self.tolerance
        besides = [
            {**asdict(one), "worst": one.worst.name, "agrees": one.agrees(least), "trouble": one.trouble(least)}
            for one in self.besides
        ]
        repeats, matrices = [*map(asdict, self.repeats)], [*map(asdict, self.matrices)]
        return {**vars(self), "agrees": self.agrees, "besides": besides, "repeats": repeats, "matrices": matrices}

    def _facts(self) -> Iterator[str]:
        yield from (self.title, self.summary())

    def _lines(self) -> Iterator[str]:
        for beside in self.besides:
            verdict = "agrees" if beside.agrees(self.tolerance) else "differs"
            yield f"{beside.title} {verdict}: {beside.worst.relative:.1e} at {beside.worst.name}"
        yield from (f"{title} failed: {why}" for title, why in self.failed.items())
        yield from (f"{title} skipped: {why}" for title, why in self.skipped.items())
        yield from self.notes

    def summary(self) -> str:
        """Names of the runtimes that agree or disagree, in one line."""
        others = [one.title for one in self.besides if not one.agrees(self.tolerance)]
        parts = [f"{title} FAILED" for title in self.failed]
        if others:
            parts.insert(0, f"{self.reference} and {', '.join(others)} DISAGREE at {self.tolerance:g}")
        elif self.besides:
            agreeing = ", ".join(one.title for one in self.besides)
            parts.insert(0, f"{self.reference} and {agreeing} agree at {self.tolerance:g}")
        return "; ".join(parts) or f"{self.reference} ran; there was nothing to compare it with"

    def view(self) -> View:
        """Error by depth, one curve a runtime, dotted: what each step adds by itself; and tables."""
        lines = [f"{name} failed: {why}" for name, why in self.failed.items()]
        lines += [f"{name} was skipped: {why}" for name, why in self.skipped.items()]
        trouble = [(beside.title, beside.trouble(self.tolerance)) for beside in self.besides]
        lines += [*self.notes, *(f"{name}: {why}" for name, why in trouble if why)]
        panels: list[Any] = [list_of("", lines, "fault")] if lines else []
        panels += [list_of("Prompts", self.prompts, "token"), self._curves(), self._runtimes(), *self._extra_panels()]
        panels.append(Each([self._hook_points(beside) for beside in self.besides]))
        panels.append(list_of("Environment", self._origins(), ""))
        titles = [beside.title for beside in self.besides]
        about, choice = f"beside {self.reference}", "Hook points of" * bool(titles)
        return View(self.title, panels, facts=self.summary(), about=about, choice=choice, options=titles)

    def _curves(self) -> Lines:
        series = []
        for beside in self.besides:
            series.append(Series(beside.title, [row.relative for row in beside.rows]))
            if any(row.local is not None for row in beside.rows):
                series.append(Series("this step", [row.local for row in beside.rows], dotted=True))
        names = [row.name for row in self.besides[0].rows] if self.besides else []
        note = (
            "Largest difference as a share of the largest value at each hook point, in the order in which they are "
            "computed; dotted: what each step adds by itself, run on the first runtime's values; dashed: the "
            "tolerance. What is identical lies on the lowest line."
        )
        # A tolerance of 0 has no place on a logarithmic axis.
        levels = {"tolerance": self.tolerance} if self.tolerance > LEAST_DIFFERENCE else {}
        unit = "largest difference / largest value"
        return Lines(names, series, "", unit, LEAST_DIFFERENCE, scale="log", levels=levels, note=note)

    def _runtimes(self) -> Table:
        heads = [f"beside {self.reference}", "", "largest relative", "at", "largest absolute", "cosine", "largest ulp"]
        heads += ["KL mean, nats", "KL max", "top 1", "top 5", "greedy", "seconds"]
        table = Table(*map(escape, heads), on_page={"heading": "Runtimes", "styles": {"at": "token"}})
        for beside in self.besides:
            row, logits = beside.worst, beside.logits
            verdict = "[green]agrees" if beside.agrees(self.tolerance) else "[red]differs"
            # A vocabulary of fewer than five tokens has a share of another name.
            fifth = next((value for name, value in logits.items() if name.startswith("top_") and name != "top_1"), None)
            numbers = (row.max_abs, row.max_ulp, logits["kl_mean"], logits["kl_max"])
            largest, ulp, mean, most = map(readable, numbers)
            shares = map(percent, (logits["top_1"], fifth, beside.greedy))
            cells = [readable(row.relative), row.name, largest, decimal(row.cosine, 5), ulp, mean, most, *shares]
            table.add_row(escape(beside.title), verdict, *cells, decimal(beside.seconds, 1))
        return table

    def _extra_panels(self) -> Iterator[Any]:
        """Repeated runs, layers of second models, and quantised matrices, where there are any."""
        if self.repeats:
            yield self.repeats_table()
        for beside in self.besides:
            if beside.layers:
                yield self.model_losses(beside.title).layer_table()
        if self.matrices:
            yield from self.matrix_losses().view().panels

    def repeats_table(self) -> Table:
        """Which repeated runs are bit-identical, and where others differ first."""
        cells = {
            "runtime": [escape(one.runtime) for one in self.repeats],
            "repeated": [one.what for one in self.repeats],
            "bits": ["[green]identical" if one.identical else "[red]differ" for one in self.repeats],
            "relative": [readable(one.relative) for one in self.repeats],
            "first at": [one.first or "" for one in self.repeats],
        }
        return Table.fitting(cells, ("first at",), folds="repeated", on_page={"heading": "Repeated"})

    def _hook_points(self, beside: Beside) -> Table:
        heads = ["hook point", "distance", "largest relative", "this step", "largest absolute", "mean absolute"]
        heads += ["scale", "cosine", "largest ulp", "mean ulp", "bits"]
        table = Table(*heads, on_page={"heading": f"Hook points of {beside.title}"})
        for row in beside.rows:
            numbers = map(readable, (row.lost, row.relative, row.local, row.max_abs, row.mean_abs, row.scale))
            units = decimal(row.cosine, 5), readable(row.max_ulp), readable(row.mean_ulp)
            table.add_row(row.name, *numbers, *units, "identical" * row.identical)
        return table

    def _origins(self) -> list[str]:
        own, environments = self.environment, [self.environment, *(beside.environment for beside in self.besides)]
        lines = [f"{one['runtime']}: {_pairs(one['options'])}" for one in environments]
        lines += [f"{own['processor']}, {own['system']}, Python {own['python']}", _pairs(own["versions"])]
        return [*lines, *map(" ".join, self.hashes.items())]

    def _columns(self) -> Columns:
        rows = [{"runtime": beside.title, **asdict(row)} for beside in self.besides for row in beside.rows]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}

    def table(self, k: int | None = None, *, wide: bool = True) -> Table:
        """For a terminal: one row a runtime, the largest differences and where they are.

        Where the terminal has no room for all numbers, some are left out, never a part of a hook point's name.

        Args:
            k: rows at most; all if left out.
            wide: whether there may be more than 80 columns.
        """
        rows = [self._cells(beside) for beside in self.besides[:k]]
        heads = [*rows[0]] if rows else ["runtime", ""]
        others = dict.fromkeys(self.failed, "[red]failed") | dict.fromkeys(self.skipped, "[yellow]skipped")
        rows += [dict.fromkeys(heads, "") | {"runtime": escape(name), "": verdict} for name, verdict in others.items()]
        cells = {head: [row[head] for row in rows] for head in heads}
        title = escape(f"{self.title}, beside {self.reference}")
        table = Table.fitting(cells, ("at",), LEAST, title=title) if self.besides else Table.fitting(cells, title=title)
        while not wide and table.narrower is not None and table.natural_width > NARROW_WIDTH:
            table = table.narrower
        return table

    def model_losses(self, title: str | None = None) -> ModelLosses:
        """What the first model lost of a second one, by hook point and layer.

        Args:
            title: of one of `besides`; the first with another model if left out.

        Raises:
            InputError: no second model was compared.
        """
        models = [beside for beside in self.besides if beside.layers]
        if title is None and not models:
            raise InputError("no second model was compared: give other=")
        beside = models[0] if title is None else self.beside(title)
        if not beside.layers:
            raise InputError(f"no layers were compared with {beside.title}: give other=, and the streams among points=")
        return ModelLosses(self.reference, beside.title, beside.rows, beside.layers, beside.logits)

    def matrix_losses(self) -> MatrixLosses:
        """What each matrix of a quantised model costs by itself, the heaviest first.

        Raises:
            InputError: no matrices were compared.
        """
        if not self.matrices:
            raise InputError("no matrices were compared: give other=, the floats of a quantised model, or the reverse")
        return MatrixLosses(self.matrices)

    def _cells(self, beside: Beside) -> dict[str, str]:
        row, logits = beside.worst, beside.logits
        return {
            "runtime": escape(beside.title),
            "": "[green]agrees" if beside.agrees(self.tolerance) else "[red]differs",
            "relative": f"{row.relative:.1e}",
            "at": row.name,
            "absolute": f"{row.max_abs:.1e}",
            "cosine": decimal(row.cosine, 6),
            "KL, nats": f"{logits['kl_max']:.1e}",
            "top 1": f"{logits['top_1']:.0%}",
            "greedy": "" if beside.greedy is None else f"{beside.greedy:.0%}",
        }


def list_of(heading: str, lines: Sequence[str], style: str) -> Table:
    """Lines of text as a table of one column."""
    table = Table("", on_page={"heading": heading, "styles": {"": style}})
    for line in lines:
        table.add_row(escape(line))
    return table
