"""`ablation_sweep`: zero, mean or resample ablation of every cell of a grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mionnx.analysis.sweep.donors import draw_donors, mean_donors, zero_donors
from mionnx.analysis.sweep.grid import make_grid
from mionnx.analysis.sweep.metric import Measure, MetricRequest, Tokens
from mionnx.analysis.sweep.pairs import Pair
from mionnx.analysis.sweep.patched_runs import Shortcuts, shortcuts_for
from mionnx.analysis.sweep.places import Positions, find_places
from mionnx.analysis.sweep.prompts import and_more, axis_labels, common_length, quote, until
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.running import Before, run_sweep
from mionnx.analysis.sweep.sweep import Donors, Sweep, SweepSetting
from mionnx.errors import InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.run.prompt import prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.segments import Segments
from mionnx.run.token_classes import By, check_by
from mionnx.run.tokenizing import Prompt

KINDS = ("zero", "mean", "resample")


@typed(leave=["layers", "over", "answer", "versus", "seed", "positions", "by"])
def ablation_sweep(
    model: Runner,
    prompts: Prompt,
    hook: str | HookPoint = "hook_z",
    over: str | Iterable[str] = ("layer", "head"),
    metric: Measure = "kl",
    *,
    kind: str = "zero",
    reference: Prompt | None = None,
    by: By = None,
    seed: int | None = None,
    repeats: int | None = None,
    answer: Tokens = None,
    versus: Tokens = None,
    layers: Iterable[int] | None = None,
    positions: Positions | None = None,
    position: int = -1,
    resume: str | Path | bool = False,
    resume_key: str | None = None,
    before: Before | None = None,
    progress: bool | None = None,
    shortcuts: Shortcuts | None = None,
) -> SweepResult:
    """Ablation of every cell of a grid: zeros, means or resampled values replace its value.

    Args:
        prompts: one or several.
        hook, over, metric, answer, versus, layers, positions, position, resume, resume_key, before, progress,
            shortcuts: see `patch_sweep`; "kl" is the KL divergence from the run without ablation.
        kind: "zero"; "mean", over all tokens of the reference prompts, for each head and feature; or "resample",
            the value in a reference prompt, drawn for each prompt, not the prompt itself; of a longer one its
            beginning counts.
        reference: prompts for "mean" and "resample"; by default the prompts themselves.
        by: classes of tokens for "mean", whose means are put in apart: "position", "token", or a function: ids [seq] ->
            integers [seq]; by default all tokens together.
        seed: of the draw of "resample"; by default 0.
        repeats: draws of "resample" for each prompt, whose values are averaged (of a single prompt they are the pairs).

    Raises:
        HookError: no such hook point.
        InputError: prompts, axes, tokens or a metric that do not fit.

    Example:
        result = model.ablation_sweep("The capital of France is", "hook_z", kind="mean")
        result.top(3)  # the three heads whose ablation changes the prediction most
    """
    _check(kind, reference, seed, by, repeats)
    rows = prompt_ids(model, prompts)
    others = rows if reference is None else prompt_ids(model, reference)
    request = MetricRequest(metric, answer, versus, resume_key)
    places = [None] * len(rows) if positions is None else find_places(model, prompts, rows, positions)
    grid = make_grid(model.hooked, hook, over, layers, common_length(rows), places[0])
    graphs = model.opened(Segments.of_sweep)
    pairs = [Pair(until(position, row), None, place) for row, place in zip(rows, places, strict=True)]
    donors: Donors | None = zero_donors
    identity = kind
    if kind == "mean":
        donors, digest = mean_donors(graphs, grid, others, by)
        identity = f"mean {digest}"
    if kind == "resample":
        donors, identity = None, f"resample {seed or 0}"
        pairs = [pair for pair in pairs for _ in range(repeats or 1)]
        drawn = draw_donors([row for row in rows for _ in range(repeats or 1)], others, seed or 0)
        pairs = [replace(pair, other=other[: len(pair.base)]) for pair, other in zip(pairs, drawn, strict=True)]
    setting = SweepSetting(
        grid,
        request.for_repeats(repeats or 1),
        "ablation",
        donors,
        identity,
        axis_labels(model, grid, rows, positions),
        f"{kind.capitalize()} ablation of {grid.template.format(i='*')}",
        f"{quote(model, rows[0])}{and_more(rows)}",
        shortcuts_for(model.hooked, shortcuts),
        repeats=repeats or 1,
    )
    return run_sweep(Sweep(model, graphs, pairs, setting), progress, resume, before)


def _check(kind: str, reference: Prompt | None, seed: int | None, by: By, repeats: int | None) -> None:
    check_by(by)
    if kind not in KINDS:
        raise InputError(f"ablation {kind!r}; one of {', '.join(KINDS)}{nearest(str(kind), KINDS)}")
    if kind == "zero" and reference is not None:
        raise InputError("a zero ablation has no use for reference prompts")
    if kind != "resample" and seed is not None:
        raise InputError(f"a {kind} ablation draws nothing: seed={seed!r} would have no effect")
    if kind != "resample" and repeats is not None:
        raise InputError(f"a {kind} ablation draws nothing: repeats={repeats!r} would have no effect")
    at_least("repeats", 1 if repeats is None else repeats, 1)
    if kind != "mean" and by is not None:
        raise InputError(f"by= is of a mean ablation: a {kind} ablation has no use for classes of tokens")
