"""First-order effects: the difference of two prompts' values times the gradient, at every hook point in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.gradients.gradients import Seed, metric_name
from mionnx.analysis.sweep.comparison import Pair, Pairs
from mionnx.analysis.sweep.metric import Measure
from mionnx.analysis.sweep.patched_runs import CALL_TOKENS
from mionnx.bind.logit_selection import Logits
from mionnx.errors import GradientError, InputError
from mionnx.graph.axes import has_sequence, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_rows import IDS, TYPES
from mionnx.run.hook_cache import HookCache
from mionnx.run.metric_place import values_read
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

Arrays = dict[str, NDArray[Any]]
LAST_LOGITS = Logits(positions=-1)


@dataclass(frozen=True)
class FirstOrder:
    """First-order effects, ready for pairs of prompts; the arguments are those of `attribute_patch`."""

    model: Runner
    hooks: Sequence[str]
    compared: Pairs
    cotangent: ArrayLike | Seed | None
    rules: str
    linearize_at: str
    steps: int

    def of(self, number: int) -> tuple[Arrays, tuple[float, float]]:
        """Hook point -> (clean - corrupted) * gradient on one pair; and the metric of corrupted and clean prompt."""
        pair, compared = self.compared.pairs[number], self.compared
        part = Logits() if self.reads_all else part_of(pair, self.model)
        # Row 0 is the corrupted prompt, which is patched; row 1 the clean one.
        ids = rows_of(pair, [pair.base, cast(NDArray[np.int64], pair.other)])
        both: Any = (None, None)
        # Top tokens, and the reference of "kl", are known only from logits, and the graph needs them as its inputs.
        if compared.metric.needs_logits:
            both = self._read(self.model.forward(ids, _corrupted(pair, [0]), logits=part))
        reads = compared.reads(self.model, number, *both)
        spec = _corrupted(pair, [0]).capture([*self.hooks]).gradient([*self.hooks])
        cache = self.model.forward(ids, self._with_metric(spec, reads, ids, pair), logits=part)
        values = {hook: cache[hook].astype(np.float64) for hook in self.hooks}
        differences = {hook: _difference(value, pair.first, hook) for hook, value in values.items()}
        gradients = self._along(pair, differences, reads) if self.steps > 1 else self._at(cache.grad or {})
        last = self._read(cache)
        base, other = compared.bind(self.model, number, *last).measure(last).tolist()
        return {hook: differences[hook] * gradients[hook] for hook in self.hooks}, (base, other)

    @property
    def reads_all(self) -> bool:
        """Whether the metric reads all of the main output."""
        return self.compared.metric.measure == "span"

    def _read(self, cache: HookCache) -> NDArray[Any]:
        return values_read(self.model.hooked, cache.output())

    def _with_metric(self, spec: HookSpec, reads: Mapping[str, Any], ids: Any, pair: Pair) -> HookSpec:
        measure = self.compared.metric.measure
        if self.reads_all:
            return spec.set_metric("cotangent", cotangent=_ends(reads["answer"], pair), rules=self.rules)
        return with_metric(self.model, spec, measure, self.cotangent, reads, self.rules, ids, pair)

    def _at(self, gradients: Mapping[str, NDArray[Any]]) -> Arrays:
        """Gradients [...] of one row, or the mean of both."""
        rows = {"corrupted": [0], "clean": [1], "mean": [0, 1]}[self.linearize_at]
        return {hook: gradients[hook].astype(np.float64)[rows].mean(axis=0) for hook in self.hooks}

    def _along(self, pair: Pair, differences: Arrays, reads: Mapping[str, Any]) -> Arrays:
        """Gradients [...], each the mean along its own hook point's straight path."""
        # The midpoint rule: its error falls with the square of the number of steps.
        path = (np.arange(self.steps) + 0.5) / self.steps
        most = max(1, CALL_TOKENS // len(pair.base))
        gradients: Arrays = {hook: np.zeros(differences[hook].shape) for hook in self.hooks}
        for hook, begin in product(self.hooks, range(0, self.steps, most)):
            shares = path[begin : begin + most]
            ids = rows_of(pair, [pair.base] * len(shares))
            spec = _corrupted(pair, range(len(shares)))
            for other in self.hooks:
                # Nothing is added at the other hook points, but the interventions are there: one graph serves all
                # paths.
                added = np.multiply.outer(shares if other == hook else 0 * shares, differences[other])
                spec.intervene(other, Intervention.Add(added.astype(np.float32)))
            spec = self._with_metric(spec.gradient([*self.hooks]), reads, ids, pair)
            part = Logits() if self.reads_all else part_of(pair, self.model)
            grad = cast(HookCache, self.model.forward(ids, spec, logits=part).grad)[hook]
            gradients[hook] += grad.sum(axis=0, dtype=np.float64) / self.steps
        return gradients


def _corrupted(pair: Pair, rows: Sequence[int]) -> HookSpec:
    """The interventions of some rows of a batch of one prompt; none for a corrupted text."""
    spec = HookSpec()
    if pair.corruption is None:
        return spec
    for hook, one in pair.corruption.interventions:
        if one.rows is not None or any(isinstance(at, tuple) for at in one.positions or ()):
            raise InputError(f"{one.kind} at {hook}: a corruption is of one prompt: leave rows out of it")
        spec.intervene(hook, replace(one, rows=tuple(rows)))
    return spec


def _difference(values: NDArray[np.float64], first: int, hook: str) -> NDArray[np.float64]:
    """Clean minus corrupted, [...]: zero before the first token that differs."""
    corrupted, clean = values
    with np.errstate(invalid="ignore"):  # equal infinities have no difference
        difference = np.where(clean == corrupted, 0.0, clean - corrupted)
    axes = HookPoint.parse(hook).axes or ()
    if has_sequence(axes):
        # Equal tokens at the beginning have equal values: a difference there is rounding.
        difference[(slice(None),) * (sequence_axis(axes) - 1) + (slice(first),)] = 0
    return difference


def check_metric(metric: Measure, cotangent: ArrayLike | Seed | None, estimated: str) -> None:
    """Refuse a metric without a gradient; `estimated` is the verb with the exact numbers."""
    if callable(metric) and cotangent is not None:
        return
    if cotangent is not None:
        raise GradientError(f"cotangent= is the derivative of a metric that is a function; {metric!r} has its own")
    if metric != "span" and metric_name(metric) == "loss":
        raise InputError(f"metric {metric!r} is none of `{estimated}`, which this estimates: give logit_diff")


def with_metric(
    model: Runner,
    spec: HookSpec,
    metric: Measure,
    cotangent: ArrayLike | Seed | None,
    reads: Mapping[str, Any],
    rules: str,
    ids: Any,
    pair: Pair | None = None,
) -> HookSpec:
    """Set the metric; a cotangent that is a function is called with the logits of these rows."""
    at = None if pair is None else pair.at
    if not callable(metric):
        return spec.set_metric(metric, **reads, position=at, rules=rules)
    if callable(cotangent):
        # Interventions alone: the metric that gradients need is made of these logits.
        plain = HookSpec()
        plain.interventions += spec.interventions
        part = LAST_LOGITS if pair is None else part_of(pair, model)
        cotangent = cast(Seed, cotangent)(values_read(model.hooked, model.forward(ids, plain, logits=part).output()))
    return spec.set_metric("cotangent", cotangent=np.asarray(cotangent), position=at, rules=rules)


def part_of(pair: Pair, model: Runner) -> Logits:
    """The part of the main output that the metric of a pair reads."""
    if pair.at is not None:
        return Logits(positions=pair.at)
    return LAST_LOGITS if model.hooked.metadata.positional else Logits()


def rows_of(pair: Pair, texts: Sequence[NDArray[np.int64]]) -> Any:
    """Texts of a pair's length as rows, with its token types."""
    ids = np.stack(texts)
    return ids if pair.types is None else {IDS: ids, TYPES: np.repeat(pair.types[None], len(ids), axis=0)}


def _ends(ends: tuple[int, int], pair: Pair) -> NDArray[np.float32]:
    """[1, seq, 2]: 1 at the start and the end of a span."""
    seed = np.zeros((1, len(pair.base), 2), np.float32)
    seed[0, ends[0], 0] = seed[0, ends[1], 1] = 1
    return seed
