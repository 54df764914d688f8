"""`attribute_patch`: every cell of a patching sweep to first order, from one pass forward and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.gradients.first_order import FirstOrder, check_metric
from mionnx.analysis.gradients.gradients import Seed
from mionnx.analysis.sweep.comparison import Comparison, Corrupted, compares
from mionnx.analysis.sweep.grid import Positions, axes_to_go_over, hook_kinds
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.analysis.sweep.patching import patching_sweep
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Sweep
from mionnx.bind.gradients import differentiable
from mionnx.bind.hook_index import index_hooks
from mionnx.errors import GradientError, InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import Place
from mionnx.machine.brief import Brief
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least, at_most, listed
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import check_rules
from mionnx.view import Table

MOST_STEPS = 10_000  # of a path; a few tens do
CORRELATED = 2  # cells that a correlation needs
PLACES = ("corrupted", "clean", "mean")
Hook = str | HookPoint
Cells = tuple[Hook, str | Iterable[str], Iterable[int] | None]  # hook point, axes, layers
Numbers = NDArray[np.float64]


@compares
@typed(leave=["corrupted", "hook", "layers", "over", "answer", "versus", "positions"])
def attribute_patch(
    model: Runner,
    clean: Prompt | Comparison,
    corrupted: Corrupted | None = None,
    hook: Hook | Iterable[Hook] = "hook_resid_pre",
    over: str | Iterable[str] = ("layer", "position"),
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    linearize_at: str = "corrupted",
    steps: int = 1,
    rules: str = "gradient",
    confirm: int = 0,
    layers: Iterable[int] | None = None,
    position: Place | None = None,
    positions: Positions | None = None,
    cotangent: ArrayLike | Seed | None = None,
) -> AttributedSweep | dict[str, AttributedSweep]:
    """Attribution patching: `patch_sweep` to first order, from one pass forward and back.

    A cell is worth the sum over its numbers of (clean value - corrupted value) times the gradient of the metric.

    Args:
        over, layers: see `patch_sweep`.
        hook: as for `patch_sweep`; or a glob that means several kinds ("blocks.*.attn.*"), of which those with the axes
            of `over` and a gradient are taken, or a list. All of them come from the same passes.
        linearize_at: the prompt at which gradients are taken, "corrupted", "clean", or the "mean" of both.
        steps: gradients that are averaged along the straight path from the corrupted prompt's value at a hook point to
            the clean one's, each hook point on its own; 1 for none.
        rules: "gradient", or propagation rules: "frozen_norm" (a norm's scale is constant), "relp" (activations too,
            and products give half to each factor), "relp_frozen_pattern", "frozen_norm_pattern" (attention patterns
            too); see `mionnx.rewrite.gradient.propagation`.
        confirm: leading cells that are computed exactly besides, of each kind of hook point.
        cotangent: of a metric that is a function, its derivative by the logits: [vocab], [2, vocab] (the corrupted
            prompt's first), or a function of the logits [rows, vocab] that gives it.

    Returns:
        a sweep's result with `agreement()` and `confirmed()`; for several kinds of hook points, {template: result}.

    Raises:
        HookError: no such hook point.
        GradientError: a metric without a gradient ("rank"), or hook points that it does not depend on.
        InputError: prompts, axes, tokens or a metric that do not fit.

    Example:
        result = model.attribute_patch(clean, corrupted, "z", ("layer", "head", "position"), confirm=10)
        result.top(3), result.agreement().pearson
    """
    check_metric(metric, cotangent, "patch_sweep")
    _check(linearize_at, steps, rules, metric, model.hooked.metadata.attends)
    kinds, several = _kinds(model.hooked, hook, over, layers)
    compared = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, None, position, positions).on(model)
    at_least("confirm", confirm, 0)
    sweeps, hooks = {}, []
    for kind in kinds:
        sweep = patching_sweep(model, compared, *kind)
        grid = sweep.setting.grid
        if confirm > grid.cells:
            raise InputError(f"confirm={confirm}: {grid.template} over {', '.join(grid.over)} has {grid.cells} cells")
        sweeps[grid.template] = sweep
        hooks += [grid.hook(layer) for layer in grid.layers]
    # Refuses hook points without a gradient before anything runs.
    trial = HookSpec().gradient(hooks).set_metric("cotangent", cotangent=[0.0], rules=rules)
    model.binder.bind(trial, differentiated=True)
    results = _results(sweeps, FirstOrder(model, hooks, compared, cotangent, rules, linearize_at, steps), confirm)
    return results if several else next(iter(results.values()))


def _check(linearize_at: str, steps: int, rules: str, metric: Measure, attends: bool) -> None:
    if linearize_at not in PLACES:
        raise InputError(
            f"linearize_at={linearize_at!r}; {', '.join(PLACES)}{nearest(linearize_at, PLACES)} "
            "(position= says which logits are read)"
        )
    at_least("steps", steps, 1)
    at_most("steps", steps, MOST_STEPS)
    if steps > 1 and linearize_at != "corrupted":
        raise InputError(
            f"linearize_at={linearize_at!r} has no effect with steps={steps}: gradients are taken along the whole path"
        )
    check_rules(rules)
    if not attends and rules.endswith("_pattern"):
        raise InputError(f"rules={rules!r}: this model has no attention patterns to freeze")
    if metric == "kl" and linearize_at == "clean":
        raise GradientError("the KL divergence from the clean run is least at the clean prompt: all gradients are 0")


def _kinds(
    model: HookedModel, hook: Hook | Iterable[Hook], over: str | Iterable[str], layers: Iterable[int] | None
) -> tuple[list[Cells], bool]:
    """The cells of each kind of hook point that is meant, and whether several may be."""
    alone = isinstance(hook, str | HookPoint) or not isinstance(hook, Iterable)
    points: list[Hook] = [hook] if alone else listed("hook", hook)  # type: ignore[list-item,arg-type]
    if not points:
        raise InputError("hook=[] names no hook point")
    cells: list[Cells] = []
    several = not alone
    for one in points:
        kinds = hook_kinds(model, one)
        several = several or len(kinds) > 1
        cells += [(one, over, layers)] if len(kinds) == 1 else _fitting(model, str(one), kinds, over, layers)
    return cells, several


def _fitting(
    model: HookedModel, glob: str, kinds: dict[str, list[int]], over: str | Iterable[str], layers: Iterable[int] | None
) -> list[Cells]:
    """The kinds of a glob that have the axes and a gradient."""
    names = (over,) if isinstance(over, str) else tuple(over)
    with_gradient = differentiable(index_hooks(HookSpec(), model))
    fitting: list[Cells] = []
    for template, own in kinds.items():
        first = template.format(i=own[0])
        # The layers of a kind are alike, so the first tells.
        if {*names} <= {*axes_to_go_over(HookPoint.parse(first))} and first in with_gradient:
            fitting.append((template, names, own if layers is None else layers))
    if not fitting:
        raise InputError(f"{glob}: none of {', '.join(kinds)} has a gradient and the axes {', '.join(names)}")
    return fitting


def _results(sweeps: Mapping[str, Sweep], first_order: FirstOrder, confirm: int) -> dict[str, AttributedSweep]:
    """Attribute all kinds of hook points pair by pair, and compute the leading cells exactly."""
    begin, pairs = time.perf_counter(), first_order.compared.pairs
    bases = np.empty((2, len(pairs)))
    by_pair: dict[str, list[Numbers]] = {kind: [] for kind in sweeps}
    try:
        for number, pair in enumerate(pairs):
            effects, bases[:, number] = first_order.of(number)
            for kind, sweep in sweeps.items():
                grid = sweep.setting.grid.at(pair.places)
                cells = grid.by_cell([effects[grid.hook(layer)] for layer in grid.layers], np.sum)
                # The metric of the patched run plus the change: in the form of an exact sweep's values.
                by_pair[kind].append(bases[0, number] + cells)
        seconds = time.perf_counter() - begin
        results = {}
        for kind, sweep in sweeps.items():
            cost = {"cells": float(sweep.setting.grid.cells * len(pairs)), "seconds": seconds}
            result = sweep.result(np.stack(by_pair[kind]), bases, cost)
            results[kind] = _result(result, sweep, first_order, confirm)
        return results
    finally:
        first_order.model.give_back(later=True)


def _result(result: SweepResult, sweep: Sweep, first_order: FirstOrder, confirm: int) -> AttributedSweep:
    exact = np.full(result.values.shape, np.nan)  # NaN: not computed exactly
    if confirm:
        leading = np.argsort(-np.abs(result.effect), axis=None, kind="stable")[:confirm]
        exact.flat[leading] = sweep.compute(leading).mean(axis=0)
    own = {field.name: getattr(result, field.name) for field in fields(SweepResult)}
    own["title"] = f"Attribution patching {result.hook.format(i='*')} ({first_order.rules})"
    where = "path" if first_order.steps > 1 else first_order.linearize_at
    return AttributedSweep(**own, rules=first_order.rules, linearize_at=where, steps=first_order.steps, exact=exact)


@dataclass(frozen=True, repr=False)
class Agreement(Brief):
    """Agreement of effects to first order with exact ones.

    Attributes:
        cells: compared cells.
        pearson: correlation of the effects; NaN if either does not vary.
        top, shared: number of leading cells that are compared, and how many are leading in both.
    """

    cells: int
    pearson: float
    top: int
    shared: int

    def __str__(self) -> str:
        same = f"{self.shared} of the leading {self.top} in common"
        return f"{self.cells} cells computed exactly: Pearson {decimal(self.pearson, 3)}, {same}"


@dataclass(repr=False)
@typed(InputError)
class AttributedSweep(SweepResult):
    """First-order estimates of a sweep: the metric without a patch, plus each cell's effect.

    Attributes:
        rules, steps: see `attribute_patch`.
        linearize_at: "corrupted", "clean", "mean" of both, or "path" between them.
        exact: the metric at the cells that were computed exactly, in the shape of `values`; NaN elsewhere.
    """

    rules: str = "gradient"
    linearize_at: str = "corrupted"
    steps: int = 1
    exact: Numbers = field(default_factory=lambda: np.empty(0))

    @property
    def meaning(self) -> str:
        return f"Estimated to first order, by {self.how}. {super().meaning}"

    @property
    def how(self) -> str:
        """The rules, and where they are used."""
        where = f"along {self.steps} steps of the path" if self.steps > 1 else f"at {self.linearize_at}"
        return f"{self.rules} {where}"

    def agreement(self, exact: SweepResult | None = None, k: int | None = None) -> Agreement:
        """Compare with exact values.

        Args:
            exact: `patch_sweep` over the same cells; those that `confirm` computed if left out.
            k: leading cells, by the size of the effect, of which the common ones are counted; by default 10, and of
                cells that `confirm` computed the leading half.

        Raises:
            InputError: no cell was computed exactly, a sweep over others, or `k` below 1.

        Example:
            result = model.attribute_patch(clean, corrupted, "z", confirm=10)
            result.agreement().pearson
        """
        values = self.exact if exact is None else exact.values
        if exact is not None and (exact.hook, exact.over, exact.labels) != (self.hook, self.over, self.labels):
            raise InputError(
                f"a sweep over other cells: {exact.hook} {exact.over}; this one is {self.hook} {self.over}"
            )
        # A sweep over other positions has another shape, and no cell in common.
        compared = np.isfinite(values) if values.shape == self.values.shape else np.zeros(self.values.shape, bool)
        if not compared.any():
            raise InputError("no cell was computed exactly: give confirm=10, or a patch_sweep to compare with")
        estimates, truth = self.effect[compared], values[compared] - (self.base if exact is None else exact.base)
        # All of the confirmed cells would be leading in both: only a part of them can tell.
        default = min(10, len(estimates)) if exact is not None else max(1, len(estimates) // 2)
        at_least("top", default if k is None else k, 1)
        count = min(default if k is None else k, len(estimates))
        leading = [{*np.argsort(-np.abs(one), kind="stable")[:count].tolist()} for one in (estimates, truth)]
        return Agreement(len(estimates), _pearson(estimates, truth), count, len(leading[0] & leading[1]))

    def confirmed(self) -> Table:
        """The cells that were computed exactly, the largest exact effect first: estimated and exact."""
        table = Table(*self.over, "to first order", "exact", title=str(self.agreement()))
        effect = self.exact - self.base
        order = [cell for cell in np.argsort(-np.abs(effect), axis=None) if np.isfinite(effect.flat[cell])]
        for cell in map(tuple, np.transpose(np.unravel_index(order, effect.shape)).tolist()):
            table.add_row(*self._labels_of(cell), decimal(self.effect[cell], 4), decimal(effect[cell], 4))
        return table

    def facts(self) -> str:
        """One line with the metric of the runs without a patch, and the agreement with exact cells."""
        agreement = f"; {self.agreement()}" if np.isfinite(self.exact).any() else ""
        return f"{super().facts()}; {self.how}{agreement}"

    def _facts(self) -> Iterator[str]:
        yield from super()._facts()
        yield self.how

    def to_dict(self) -> dict[str, Any]:
        own = {"rules": self.rules, "linearize_at": self.linearize_at, "steps": self.steps}
        return {**super().to_dict(), **own, "exact": self.exact if self.exact.size else None}


def _pearson(one: Numbers, other: Numbers) -> float:
    # A correlation with a constant is undefined.
    if len(one) < CORRELATED or not np.ptp(one) or not np.ptp(other):
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])
