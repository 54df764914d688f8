"""Donors of an ablation: zeros, means, or prompts whose values are resampled."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.clean_run import CleanRun, run_clean
from mionnx.analysis.sweep.grid import Grid
from mionnx.errors import InputError
from mionnx.graph.axes import sequence_axis
from mionnx.machine.moments import Moments
from mionnx.run.segments import Segments
from mionnx.run.token_classes import By, classes_of

Ids = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]


def zero_donors(base: CleanRun) -> Arrays:
    """Zeros for every value."""
    return {hook: np.zeros([1] * value.ndim, value.dtype) for hook, value in base.values.items()}


def mean_donors(
    graphs: Segments, grid: Grid, prompts: Sequence[Ids], by: By = None
) -> tuple[Callable[[CleanRun], Arrays], str]:
    """Mean of each head and feature over the tokens of some prompts, of each class apart.

    Args:
        graphs: the model.
        grid: the cells.
        prompts: [seq] each.
        by: classes of tokens; see `token_classes.classes_of`.

    Returns:
        a function that makes the donors, and a digest of the prompts and classes.

    Raises:
        InputError: a value with keys along its last axis, which have no mean over prompts, or without tokens.
    """
    if "seq_k" in grid.axes:
        raise InputError(f"{grid.template}: its last axis is keys, of which different texts have others: no mean")
    if "seq" not in grid.axes:
        raise InputError(f"{grid.template} is [{', '.join(grid.axes)}]: it has no tokens to take the mean over")
    hooks = [grid.hook(layer) for layer in grid.layers]
    axis = sequence_axis(grid.axes)
    found: dict[str, Moments] = {}
    told = hashlib.sha256()
    for prompt in prompts:
        classes = classes_of(by, prompt)
        told.update(prompt.tobytes() + b"|" + (b"" if by is None else classes.tobytes() + b"|"))
        for hook, value in run_clean(graphs, prompt[None], (), hooks).values.items():
            here = Moments.of(np.moveaxis(value, axis, 1)[0], classes)
            found[hook] = found[hook].merged(here) if hook in found else here

    def donors(base: CleanRun) -> Arrays:
        places = _places(found[hooks[0]], classes_of(by, base.ids[0]), by)
        means = {hook: np.moveaxis(one.mean[places][None], 1, axis) for hook, one in found.items()}
        return {hook: mean.astype(base.values[hook].dtype) for hook, mean in means.items()}

    return donors, told.hexdigest()[:16]


def _places(moments: Moments, classes: Ids, by: By) -> Ids:
    """The place of each token's class; one place for all of them where there is one class."""
    if by is None:
        return np.zeros(1, np.int64)
    places = moments.places(classes)
    if (places < 0).any():
        first = int(np.flatnonzero(places < 0)[0])
        raise InputError(
            f"{by if isinstance(by, str) else 'class'} {classes[first]}, of the token at {first}, is in none of the "
            "reference prompts: there is no mean for it"
        )
    return places


def draw_donors(prompts: Sequence[Ids], reference: Sequence[Ids], seed: int) -> list[Ids]:
    """Draw for each prompt another one; a longer one is cut to its length.

    Raises:
        InputError: no other prompt of that length or above, or a seed that is no natural number.
    """
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"seed={seed!r}: an integer of 0 or above")
    draw = np.random.default_rng(seed)
    drawn = []
    for number, prompt in enumerate(prompts):
        cut = [other[: len(prompt)] for other in reference if len(other) >= len(prompt)]
        fitting = [other for other in cut if not np.array_equal(other, prompt)]
        if not fitting:
            raise InputError(f"prompt {number}: no other reference prompt has {len(prompt)} tokens to resample from")
        drawn.append(fitting[int(draw.integers(len(fitting)))])
    return drawn
