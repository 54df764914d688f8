"""Donors of an ablation: zeros, means, or prompts whose values are resampled."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.clean_run import CleanRun, run_clean
from mionnx.analysis.sweep.grid import Grid
from mionnx.analysis.sweep.layer_graphs import LayerGraphs
from mionnx.errors import InputError
from mionnx.graph.axes import sequence_axis

Ids = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]


def zero_donors(base: CleanRun) -> Arrays:
    """Zeros for every value."""
    return {hook: np.zeros([1] * value.ndim, value.dtype) for hook, value in base.values.items()}


def mean_donors(graphs: LayerGraphs, grid: Grid, prompts: Sequence[Ids]) -> tuple[Callable[[CleanRun], Arrays], str]:
    """Mean of each head and feature over all tokens of some prompts.

    Returns:
        a function that makes the donors, and a digest of the prompts.

    Raises:
        InputError: a value with keys along its last axis, which have no mean over prompts, or without tokens.
    """
    if "seq_k" in grid.axes:
        raise InputError(f"{grid.template}: its last axis is keys, of which different texts have others: no mean")
    if "seq" not in grid.axes:
        raise InputError(f"{grid.template} is [{', '.join(grid.axes)}]: it has no tokens to take the mean over")
    hooks = [grid.hook(layer) for layer in grid.layers]
    axis = sequence_axis(grid.axes)
    sums: Arrays = {}
    for prompt in prompts:
        values = run_clean(graphs, prompt[None], (), hooks).values
        for hook, value in values.items():
            sums[hook] = sums.get(hook, 0) + value.sum(axis=(0, axis), keepdims=True, dtype=np.float64)
    count = sum(map(len, prompts))
    digest = hashlib.sha256(b"".join(prompt.tobytes() + b"|" for prompt in prompts)).hexdigest()[:16]
    return lambda base: {hook: (total / count).astype(base.values[hook].dtype) for hook, total in sums.items()}, digest


def draw_donors(prompts: Sequence[Ids], reference: Sequence[Ids], seed: int) -> list[Ids]:
    """Draw for each prompt another one of the same length.

    Raises:
        InputError: no other prompt of that length, or a seed that is no natural number.
    """
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"seed={seed!r}: an integer of 0 or above")
    draw = np.random.default_rng(seed)
    drawn = []
    for number, prompt in enumerate(prompts):
        fitting = [other for other in reference if len(other) == len(prompt) and not np.array_equal(other, prompt)]
        if not fitting:
            raise InputError(f"prompt {number}: no other reference prompt has {len(prompt)} tokens to resample from")
        drawn.append(fitting[int(draw.integers(len(fitting)))])
    return drawn
