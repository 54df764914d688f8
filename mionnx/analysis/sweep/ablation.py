"""`ablation_sweep`: zero, mean or resample ablation of every cell of a grid, and the values that are put in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from mionnx.analysis.sweep.clean_run import CleanRun, run_clean
from mionnx.analysis.sweep.comparison import Comparison, Pairs, compares
from mionnx.analysis.sweep.corruption import check_repeats
from mionnx.analysis.sweep.grid import Grid, Positions
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.analysis.sweep.patched_runs import Shortcuts, shortcuts_for
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Before, Donors, Sweep, SweepSetting, run_sweep
from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.axes import sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import Place
from mionnx.machine.moments import Moments
from mionnx.machine.typed import typed
from mionnx.run.prompt import By, Ids, check_by, classes_of, prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.segments import Arrays, Segments
from mionnx.run.tokenizing import Prompt

ABLATIONS = ("zero", "mean", "resample")


@compares
@typed(leave=["layers", "over", "answer", "versus", "seed", "positions", "by"])
def ablation_sweep(
    model: Runner,
    prompts: Prompt | Comparison,
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
    position: Place | None = None,
    resume: str | Path | bool = False,
    resume_key: str | None = None,
    before: Before | None = None,
    progress: bool | None = None,
    shortcuts: Shortcuts | None = None,
) -> SweepResult:
    """Ablation of every cell of a grid: zeros, means or resampled values replace its value.

    Args:
        hook, over, layers, resume, resume_key, before, progress, shortcuts: see `patch_sweep`.
        kind: "zero"; "mean", over all tokens of the reference prompts, for each head and feature; or "resample",
            the value in a reference prompt, drawn for each prompt, not the prompt itself; of a longer one its
            beginning counts.
        reference: prompts for "mean" and "resample"; by default the prompts themselves.
        by: classes of tokens for "mean", whose means are put in apart: "position", "token", or a function: ids [seq] ->
            integers [seq]; by default all tokens together.
        seed: of the draw of "resample"; by default 0.
        repeats: draws of "resample" for each prompt, 1 to 1,000, whose values are averaged (of a single prompt they are
            the pairs).

    Raises:
        HookError: no such hook point.
        InputError: prompts, axes, tokens or a metric that do not fit.

    Example:
        result = model.ablation_sweep("The capital of France is", "hook_z", kind="mean")
        result.top(3)  # the three heads whose ablation changes the prediction most
    """
    _check(kind, reference, seed, by, repeats)
    compared = Comparison(cast(Prompt, prompts), None, metric, answer, versus, None, position, positions).on(model)
    others = compared.bases if reference is None else prompt_ids(model, reference)
    grid, identity = compared.grid(model, hook, over, layers), kind
    donors: Donors | None = _zeros
    if kind != "resample":
        _refuse_numbers_of_experts(grid, kind)
    if kind == "mean":
        donors, digest = _mean_donors(model.opened(Segments.of_sweep), grid, others, by)
        identity = f"mean {digest}"
    elif kind == "resample":
        seed = 0 if seed is None else seed
        compared, donors = _resampled(compared, others, seed, repeats or 1), None
        identity = f"resample {seed}"  # drawn values make new pairs, whose other runs are the donors
    shortcuts = shortcuts_for(model.hooked, shortcuts)
    setting = SweepSetting(grid, f"{kind.capitalize()} ablation of", shortcuts, donors, identity)
    return run_sweep(Sweep(model, compared, setting), progress, resume, resume_key, before)


def _check(kind: str, reference: Prompt | None, seed: int | None, by: By, repeats: int | None) -> None:
    check_by(by)
    if kind not in ABLATIONS:
        raise InputError(f"ablation {kind!r}; one of {', '.join(ABLATIONS)}{nearest(str(kind), ABLATIONS)}")
    if kind == "zero" and reference is not None:
        raise InputError("a zero ablation has no use for reference prompts")
    for name, number in (("seed", seed), ("repeats", repeats)):
        if kind != "resample" and number is not None:
            raise InputError(f"a {kind} ablation draws nothing: {name}={number!r} would have no effect")
    if repeats is not None:
        check_repeats(repeats)
    if kind != "mean" and by is not None:
        raise InputError(f"by= is of a mean ablation: a {kind} ablation has no use for classes of tokens")


def _refuse_numbers_of_experts(grid: Grid, kind: str) -> None:
    point = HookPoint.parse(grid.hook(grid.layers[0]))
    if point.variant == "MlpExpertIndices":
        raise HookError(
            f"{grid.template} holds the numbers of experts: {'the first' if kind == 'zero' else 'their mean'} would be "
            f'chosen in place of others. Ablate {HookPoint.MlpExpertWeights(0).short}, or resample: kind="resample"'
        )


def _zeros(base: CleanRun) -> Arrays:
    # Size 1 on every axis: broadcast to the value wherever it is put in.
    return {hook: np.zeros([1] * value.ndim, value.dtype) for hook, value in base.values.items()}


def _mean_donors(graphs: Segments, grid: Grid, prompts: Sequence[Ids], by: By) -> tuple[Donors, str]:
    """Mean of each head and feature over the tokens of each class; and a digest of the prompts and classes."""
    if "seq_k" in grid.axes:
        raise InputError(f"{grid.template}: its last axis is keys, of which different texts have others: no mean")
    hooks = [grid.hook(layer) for layer in grid.layers]
    axis = sequence_axis(grid.axes)
    moments: dict[str, Moments] = {}
    digest = hashlib.sha256()
    for prompt in prompts:
        classes = classes_of(by, prompt)
        # The means are part of a sweep's key: a file of cells must not continue with means of other prompts.
        digest.update(prompt.tobytes() + b"|" + (b"" if by is None else classes.tobytes() + b"|"))
        for hook, value in run_clean(graphs, prompt[None], (), hooks).values.items():
            own = Moments.of(np.moveaxis(value, axis, 1)[0], classes)  # tokens as the first axis, one prompt at a time
            moments[hook] = moments[hook].merged(own) if hook in moments else own

    def donors(base: CleanRun) -> Arrays:
        places = class_places(moments[hooks[0]], classes_of(by, base.ids[0]), by)
        means = {hook: np.moveaxis(one.mean[places][None], 1, axis) for hook, one in moments.items()}
        # Moments are float64; a donor has the dtype of the graph's value.
        return {hook: mean.astype(base.values[hook].dtype) for hook, mean in means.items()}

    return donors, digest.hexdigest()[:16]


def class_places(moments: Moments, classes: Ids, by: By) -> Ids:
    """The place of each token's class among the means."""
    if by is None:
        return np.zeros(1, np.int64)  # one mean, broadcast to all tokens
    places = moments.places(classes)
    if (places < 0).any():
        first = int(np.argmax(places < 0))
        raise InputError(
            f"{by if isinstance(by, str) else 'class'} {classes[first]}, of the token at {first}, is in none of the "
            "reference prompts: there is no mean for it"
        )
    return places


def _resampled(compared: Pairs, reference: Sequence[Ids], seed: int, repeats: int) -> Pairs:
    """Each prompt `repeats` times, each time with another prompt drawn, whose values are put in."""
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"seed={seed!r}: an integer of 0 or above")
    draw, pairs = np.random.default_rng(seed), []
    for number in range(len(compared) * repeats):
        pair, prompt = compared.pairs[number // repeats], compared.bases[number // repeats]
        # Of a longer text the beginning counts: what follows cannot change its values, and positions correspond.
        cut = [other[: len(prompt)] for other in reference if len(other) >= len(prompt)]
        fitting = [other for other in cut if not np.array_equal(other, prompt)]
        if not fitting:
            raise InputError(f"prompt {number}: no other reference prompt has {len(prompt)} tokens to resample from")
        # The draw is among uncut prompts; the pair itself ends where its logits are read.
        pairs.append(replace(pair, other=fitting[int(draw.integers(len(fitting)))][: len(pair.base)]))
    return replace(compared, pairs=pairs, metric=compared.metric.for_repeats(repeats), repeats=repeats)
