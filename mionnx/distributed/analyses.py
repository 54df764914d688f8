"""`harvest` and `patch_sweep` on a cluster: workers make shards, or sweep pairs of prompts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.harvest.harvest import open_writer
from mionnx.analysis.harvest.rows import HarvestRow
from mionnx.analysis.harvest.settings import Settings
from mionnx.analysis.harvest.shard_maker import FinishedShard, Groups, ShardMaker
from mionnx.analysis.harvest.texts import Source
from mionnx.analysis.sweep.comparison import Comparison, Corrupted, Pairs, compares
from mionnx.analysis.sweep.grid import Positions
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.analysis.sweep.patching import patching_sweep
from mionnx.analysis.sweep.result import SweepResult
from mionnx.analysis.sweep.sweep import Sweep, SweepSetting, run_sweep
from mionnx.distributed.cluster import LOCAL, Workers, cluster
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import Place
from mionnx.machine.progress import Progress, silent
from mionnx.machine.typed import typed
from mionnx.model import MIModel
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_choice import Hooks
from mionnx.spec.hook_spec import HookSpec


@typed(leave=["texts", "points", "options"])
def harvest(
    model: MIModel,
    texts: Source,
    points: Hooks | None,
    folder: str | Path,
    *,
    hooks: HookSpec | None = None,
    address: str = LOCAL,
    workers: int | None = None,
    cpus: int = 1,
    progress: bool | None = None,
    **options: Any,
) -> Activations:
    """Write the activations of a dataset to disk, by the processes of a Ray cluster.

    A worker makes one shard at a time and notes it. What a lost worker had not finished Ray gives to another; a harvest
    whose own process was lost is called again, and goes on. The folder has the same bytes as that of `MIModel.harvest`.

    Args:
        model: the model; workers open its folder, which on a cluster lies on shared storage.
        texts, points, folder, hooks, progress: as for `MIModel.harvest`. Texts are a list, or a file or folder, which
            on a cluster lies on shared storage as `folder` does.
        address: "local" begins a cluster on this machine; "auto" is the one that this machine belongs to, "HOST:PORT"
            another. Where this process is connected already, that cluster is used.
        workers: number of processes; as many as the cluster has room for if left out.
        cpus: of each process, and threads of its model; on CUDA each has one GPU besides.
        options: `context`, `dtype` and all others of `MIModel.harvest`.

    Raises:
        RuntimeMissingError: Ray is not installed.
        InputError: no such cluster, texts of an iterator, or as `MIModel.harvest`.
        HookError, SpecFileError: as `MIModel.harvest`.

    Example:
        made = mionnx.distributed.harvest(model, "texts.jsonl", "blocks.*.hook_resid_post", "activations", workers=2)
    """
    writer = open_writer(model, texts, points, hooks, folder, Settings(**options))
    if not writer.rows.texts.again:
        raise InputError("texts of an iterator stay in this process: give a file, a folder or a list to workers")
    with cluster(address, model, workers, cpus) as processes:
        return writer.write(partial(_by_workers, processes), progress)


def _by_workers(workers: Workers, maker: ShardMaker, groups: Groups) -> Iterator[FinishedShard]:
    # The model is opened in the workers, with their number of threads.
    maker = replace(maker, model=workers.model(maker.model))
    return workers.map(groups.__iter__, _ShardWork, maker)


class _ShardWork:
    """Makes shards in a worker."""

    def __init__(self, maker: ShardMaker) -> None:
        self.maker = maker

    def __call__(self, task: tuple[int, Sequence[HarvestRow]]) -> FinishedShard:
        return self.maker.shard(*task)


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
    position: Place | None = None,
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
        begin, grid, count = time.perf_counter(), self.setting.grid, len(self.pairs)
        stored, unpatched, idle = self._stored(), np.empty((2, count)), 0
        # Cells of the file are not computed again; the pairs are, since the metric without a patch is in no file.
        pieces = [(pair, stored.missing(pair)) for pair in range(count)]
        work = _PairWork, self.workers.model(self.model), self.compared, self.setting
        try:
            for pair, cells, (values, runs, without) in self.workers.map(pieces.__iter__, *work):
                stored.store(pair, cells, values)
                unpatched[:, pair], idle = runs, idle + without
                progress("cells", count * grid.cells - int(np.isnan(stored.values).sum()), count * grid.cells)
        finally:
            stored.write()
        cost = {"cells": float(count * grid.cells), "without effect": float(idle)}
        cost["seconds"] = time.perf_counter() - begin
        return self.result(stored.values.reshape(count, *grid.sizes), unpatched, cost)


class _PairWork:
    """Sweeps pairs in a worker."""

    def __init__(self, model: Runner, compared: Pairs, setting: SweepSetting) -> None:
        self.sweep = Sweep(model, compared, setting)

    def __call__(self, piece: tuple[int, NDArray[np.int64]]) -> tuple[int, NDArray[np.int64], tuple[Any, ...]]:
        """The piece, and what `Sweep.compute_pair` returns for it."""
        return *piece, self.sweep.compute_pair(*piece)
