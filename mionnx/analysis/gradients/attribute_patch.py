"""`attribute_patch`: every cell of a patching sweep to first order, from one pass forward and back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.gradients.attributed_sweep import AttributedSweep
from mionnx.analysis.gradients.first_order import FirstOrder, Seed, cells_of, check_metric
from mionnx.analysis.sweep.comparison import Comparison, Corrupted, compares
from mionnx.analysis.sweep.grid import axes_to_go_over, hook_kinds
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.analysis.sweep.patching import patching_sweep
from mionnx.analysis.sweep.places import Positions
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Sweep
from mionnx.bind.gradients import differentiable
from mionnx.bind.hook_index import index_hooks
from mionnx.errors import GradientError, InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.ranges import at_least, at_most, listed
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import check_rules

MOST_STEPS = 10_000  # of a path; a few tens do
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
    position: int = -1,
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
    _check(linearize_at, steps, rules, metric, model.hooked.metadata.recurrent)
    kinds, several = _kinds(model.hooked, hook, over, layers)
    compared = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, None, position, positions).on(model)
    sweeps = {}
    for kind in kinds:
        sweep = patching_sweep(model, compared, *kind)
        sweeps[sweep.setting.grid.template] = sweep
        _check_confirm(confirm, sweep)
    hooks = [grid.hook(layer) for grid in (sweep.setting.grid for sweep in sweeps.values()) for layer in grid.layers]
    model.binder.bind(HookSpec().gradient(hooks).set_metric("loss", rules=rules), differentiated=True)
    results = _results(sweeps, FirstOrder(model, hooks, compared, cotangent, rules, linearize_at, steps), confirm)
    return results if several else next(iter(results.values()))


def _check(linearize_at: str, steps: int, rules: str, metric: Measure, recurrent: bool) -> None:
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
    if recurrent and rules.endswith("_pattern"):
        raise InputError(f"rules={rules!r}: this model has no attention patterns to freeze")
    if metric == "kl" and linearize_at == "clean":
        raise GradientError("the KL divergence from the clean run is least at the clean prompt: all gradients are 0")


def _check_confirm(confirm: int, sweep: Sweep) -> None:
    at_least("confirm", confirm, 0)
    grid = sweep.setting.grid
    if confirm > grid.cells:
        raise InputError(f"confirm={confirm}: {grid.template} over {', '.join(grid.over)} has {grid.cells} cells")


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
    """The kinds of a glob that have the axes and a gradient.

    Raises:
        InputError: none of them.
    """
    names, with_gradient = (
        (over,) if isinstance(over, str) else tuple(over),
        differentiable(index_hooks(HookSpec(), model)),
    )
    fitting: list[Cells] = []
    for template, own in kinds.items():
        first = template.format(i=own[0])
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
                by_pair[kind].append(bases[0, number] + cells_of(sweep.setting.grid.at(pair.places), effects))
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
    exact = np.full(result.values.shape, np.nan)
    if confirm:
        leading = np.argsort(-np.abs(result.effect), axis=None, kind="stable")[:confirm]
        exact.flat[leading] = sweep.compute(leading).mean(axis=0)
    own = {field.name: getattr(result, field.name) for field in fields(SweepResult)}
    own["title"] = f"Attribution patching {result.hook.format(i='*')} ({first_order.rules})"
    where = "path" if first_order.steps > 1 else first_order.linearize_at
    return AttributedSweep(**own, rules=first_order.rules, linearize_at=where, steps=first_order.steps, exact=exact)
