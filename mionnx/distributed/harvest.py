"""`harvest` on a cluster: shards are made by workers, and the folder is the one that a single process writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.harvest.harvest import open_writer
from mionnx.analysis.harvest.rows import HarvestRow
from mionnx.analysis.harvest.settings import Settings
from mionnx.analysis.harvest.shard_maker import FinishedShard, Groups, ShardMaker
from mionnx.analysis.harvest.texts import Source
from mionnx.distributed.cluster import LOCAL, Workers, cluster
from mionnx.errors import InputError
from mionnx.machine.typed import typed
from mionnx.model import MIModel
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
    maker = replace(maker, model=workers.model(maker.model))
    return workers.map(groups.__iter__, _ShardWork, maker)


@dataclass(frozen=True)
class _ShardWork:
    """Makes shards in a worker."""

    maker: ShardMaker

    def __call__(self, task: tuple[int, Sequence[HarvestRow]]) -> FinishedShard:
        number, rows = task
        return self.maker.shard(number, rows)
