"""`patch_sweep` on a cluster: pairs of prompts are swept by workers, each of them whole."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.comparison import Comparison, Corrupted, Pairs, compares
from mionnx.analysis.sweep.grid import Positions
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.analysis.sweep.patching import patching_sweep
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Sweep, SweepSetting, run_sweep
from mionnx.distributed.cluster import LOCAL, Workers, cluster
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.progress import Progress, silent
from mionnx.machine.typed import typed
from mionnx.model import MIModel
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt

Numbers = NDArray[np.float64]
Cells = NDArray[np.int64]


@compares
@typed(leave=["clean", "corrupted", "layers", "over", "answer", "versus", "positions"])
def patch_sweep(
    model: MIModel,
    clean: Prompt | Comparison,
    corrupted: Corrupted | None = None,
    hook: str | HookPoint = "hook_resid_pre",
    over: str | Iterable[str] = ("layer", "position"),
    metric: Measure = "logit_diff",
    *,
    address: str = LOCAL,
    workers: int | None = None,
    cpus: int = 1,
    answer: Tokens = None,
    versus: Tokens = None,
    patching: str = "denoising",
    layers: Iterable[int] | None = None,
    position: int = -1,
    positions: Positions | None = None,
    resume: str | Path | bool = False,
    resume_key: str | None = None,
    progress: bool | None = None,
) -> SweepResult:
    """Activation patching over many pairs of prompts, by the processes of a Ray cluster.

    A worker sweeps one pair at a time; what a lost worker had not finished Ray gives to another. The result is that of
    `MIModel.patch_sweep`: mean, values of each pair, and their spread.

    Args:
        model: the model; workers open its folder, which on a cluster lies on shared storage.
        hook, over, layers, resume_key, progress: as for `MIModel.patch_sweep`.
        address, workers, cpus: see `mionnx.distributed.harvest`.
        resume: a file that holds the finished pairs, and from which a sweep that was killed goes on.

    Raises:
        RuntimeMissingError: Ray is not installed.
        HookError, InputError: as `MIModel.patch_sweep`; no such cluster.

    Example:
        result = mionnx.distributed.patch_sweep(model, clean, corrupted, "z", ("layer", "head"), workers=2)
        result.values, result.std  # [layers, heads]
    """
    comparison = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, patching, position, positions)
    sweep = patching_sweep(model, comparison.on(model), hook, over, layers)
    with cluster(address, model, workers, cpus) as workers_of_cluster:
        return run_sweep(_SharedSweep(sweep, workers_of_cluster), progress, resume, resume_key, None)


class _SharedSweep(Sweep):
    """A sweep whose pairs are computed by workers."""

    def __init__(self, sweep: Sweep, workers: Workers) -> None:
        super().__init__(sweep.model, sweep.compared, sweep.setting)
        self.workers = workers

    def run(self, progress: Progress = silent) -> SweepResult:
        """Compute all pairs; see `Sweep.run`."""
        begin, grid, count = time.perf_counter(), self.setting.grid, len(self.pairs)
        stored, unpatched, idle = self._stored(), np.empty((2, count)), 0
        pieces = [(pair, stored.missing(pair)) for pair in range(count)]
        work = _PairWork, self.workers.model(self.model), self.compared, self.setting
        try:
            for one in self.workers.map(pieces.__iter__, *work):
                stored.store(one.pair, one.cells, one.values)
                unpatched[:, one.pair], idle = one.unpatched, idle + one.idle
                progress("cells", count * grid.cells - int(np.isnan(stored.values).sum()), count * grid.cells)
        finally:
            stored.write()
        cost = {"cells": float(count * grid.cells), "without effect": float(idle)}
        cost["seconds"] = time.perf_counter() - begin
        return self.result(stored.values.reshape(count, *grid.sizes), unpatched, cost)


@dataclass(frozen=True)
class _SweptPair:
    """A pair that was swept.

    Attributes:
        cells, values: the cells, and the metric at each.
        unpatched: the metric of the run that is patched and of the one patched in.
    """

    pair: int
    cells: Cells
    values: Numbers
    unpatched: tuple[float, float]
    idle: int


class _PairWork:
    """Sweeps pairs in a worker."""

    def __init__(self, model: Runner, compared: Pairs, setting: SweepSetting) -> None:
        self.sweep = Sweep(model, compared, setting)

    def __call__(self, piece: tuple[int, Any]) -> _SweptPair:
        pair, cells = piece
        return _SweptPair(pair, cells, *self.sweep.compute_pair(pair, cells))
