"""A sweep over prompts or pairs of prompts: ready to be estimated, run, interrupted and resumed."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.clean_run import CleanRun, run_clean
from mionnx.analysis.sweep.grid import Grid, Places
from mionnx.analysis.sweep.layer_graphs import LayerGraphs
from mionnx.analysis.sweep.metric import Metric, MetricRequest
from mionnx.analysis.sweep.patched_runs import PatchedRuns, Shortcuts
from mionnx.analysis.sweep.path_runs import PathPatchedRuns, written
from mionnx.analysis.sweep.progress_file import ProgressFile, key_of
from mionnx.analysis.sweep.receivers import Receivers
from mionnx.analysis.sweep.result import SweepResult
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import Brief
from mionnx.machine.cache_entry import SWEEPS
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.progress import Progress, bars, silent
from mionnx.run.find_model import cache_folder
from mionnx.run.runner import Runner

Ids = NDArray[np.int64]
Donors = Callable[[CleanRun], dict[str, NDArray[Any]]]
FORMAT = 1  # raise it when the same sweep gives other values: files of before are then another sweep's
Before = Callable[["Sweep"], None]


@dataclass(frozen=True)
class Pair:
    """One prompt or pair of prompts; it ends at the position whose logits are read.

    Attributes:
        base: [seq]: the run that is patched.
        other: [seq]: the run that is patched in; None for an ablation.
        places: the token positions under each name, if positions are named.
    """

    base: Ids
    other: Ids | None = None
    places: Places | None = None

    @property
    def first(self) -> int:
        """The first position at which the two differ; 0 for an ablation."""
        return 0 if self.other is None else int(np.flatnonzero(self.base != self.other)[0])


@dataclass(frozen=True, repr=False)
class SweepEstimate(Brief):
    """Approximate cost of a sweep.

    Attributes:
        cells: numbers in the result, over all prompts.
        computed: cells that can differ from the run without a patch, by the first prompt, and that no file holds yet.
        calls: batches.
        seconds: by the speed of a small trial.
        memory: bytes of the largest batch, and of the runs that it starts from.
    """

    cells: int
    computed: int
    calls: int
    seconds: float
    memory: int


@dataclass(frozen=True)
class SweepSetting:
    """Everything that defines a sweep besides its prompts.

    Attributes:
        grid: the cells.
        metric: the metric that is asked for.
        direction: "denoising", "noising" or "ablation".
        donors: make the values that replace the base's; None for those of the other run.
        kind: part of the key of a file to resume from: "patch", "zero", "mean 3f2a..".
        labels: of the axes.
        title, about: of pictures.
        shortcuts: how cells are computed.
        receivers: of path patching; None where everything reads the change.
    """

    grid: Grid
    metric: MetricRequest
    direction: str
    donors: Donors | None
    kind: str
    labels: dict[str, list[str]]
    title: str
    about: str
    shortcuts: Shortcuts = field(default_factory=Shortcuts)
    receivers: Receivers | None = None

    @property
    def hooks(self) -> list[str]:
        """The hook points whose values are needed from the runs without patches."""
        points = [HookPoint.parse(self.grid.hook(layer)) for layer in self.grid.layers]
        names = [point.name for point in points]
        if self.receivers is not None:
            ways = [(written(point.variant, self.receivers.parallel)[0], point.layer) for point in points]
            names += [str(getattr(HookPoint, way)(layer)) for way, layer in ways if way is not None]
        return list(dict.fromkeys(names))


class Sweep:
    """A sweep that is ready to run.

    Attributes:
        model, graphs: the model, and the graphs of its layers.
        pairs: its prompts.
        setting: what it measures.
        file: stores computed cells, and is continued if it exists; None for neither.
    """

    file: Path | None = None

    def __init__(self, model: Runner, graphs: LayerGraphs, pairs: Sequence[Pair], setting: SweepSetting) -> None:
        self.model, self.graphs, self.pairs, self.setting = model, graphs, list(pairs), setting
        for number, pair in enumerate(self.pairs):
            if pair.other is not None and np.array_equal(pair.base, pair.other):
                raise InputError(f"pair {number}: the clean and the corrupted prompt are the same up to what is read")

    @property
    def key(self) -> str:
        """The hash of everything that the values depend on.

        Raises:
            InputError: a metric that is a function and has no `resume_key`.
        """
        setting, metadata = self.setting, self.model.hooked.metadata
        return key_of(
            {
                "format": FORMAT,
                "model": [metadata.family, metadata.dtype, self.model.hooked.weights_sha256],
                "prompts": [
                    [ids if ids is None else ids.tolist() for ids in (pair.base, pair.other)] for pair in self.pairs
                ],
                "cells": [setting.grid.template, setting.grid.over, setting.grid.layers, setting.grid.sizes],
                "metric": setting.metric.identity,
                "how": [setting.direction, setting.kind, repr(setting.receivers)],
                **({} if self.pairs[0].places is None else {"places": [pair.places for pair in self.pairs]}),
            }
        )

    def estimate(self) -> SweepEstimate:
        """Estimate time and memory by the first prompt and a trial of one layer."""
        runs, stored, count = self._first[0], self._stored(), len(self.pairs)
        effective = np.flatnonzero(runs.effective_cells())
        missing = [np.intersect1d(effective, stored.missing(pair)) for pair in range(count)]
        batches = [batch for cells in missing for batch in runs.batches(cells)]
        largest = max(batches, key=lambda batch: len(batch[0]) * (runs.seq - batch[1]), default=None)
        seconds = runs.layer_seconds(*largest) * sum(map(runs.work, missing)) if largest else 0.0
        held = len(largest[0]) * runs.row_bytes(runs.seq - largest[1]) if largest else 0
        clean = runs.base.nbytes * (1 if self.pairs[0].other is None else 2)
        computed = sum(map(len, missing))
        return SweepEstimate(self.setting.grid.cells * count, computed, len(batches), seconds, held + clean)

    def _stored(self) -> ProgressFile:
        """The cells that are computed already."""
        shape = (len(self.pairs), self.setting.grid.cells)
        return ProgressFile(shape) if self.file is None else ProgressFile(shape, self.key, self.file)

    def run(self, progress: Progress = silent) -> SweepResult:
        """Compute all cells.

        Args:
            progress: called as (stage, cells done, cells).

        Raises:
            InputError: a file of another sweep; a metric that gives no numbers; too little memory for one cell.
        """
        begin, grid, total = time.perf_counter(), self.setting.grid, self.setting.grid.cells * len(self.pairs)
        stored, unpatched = self._stored(), np.empty((2, len(self.pairs)))
        without_effect = 0
        try:
            for pair in range(len(self.pairs)):
                runs, metric, unpatched[:, pair] = self._first if pair == 0 else self._prepare(pair)
                idle = np.flatnonzero(~runs.effective_cells())
                without_effect += len(idle)
                stored.store(pair, idle, np.full(len(idle), unpatched[0, pair]))

                def done(cells: NDArray[np.int64], values: NDArray[np.float64], pair: int = pair) -> None:
                    stored.store(pair, cells, values)
                    progress("cells", total - int(np.isnan(stored.values).sum()), total)

                runs.run(stored.missing(pair), metric, done)
        finally:
            stored.write()
        cost = {"cells": float(total), "without effect": float(without_effect), "seconds": time.perf_counter() - begin}
        return self.result(stored.values.reshape(len(self.pairs), *grid.sizes), unpatched, cost)

    def compute(self, cells: NDArray[np.int64]) -> NDArray[np.float64]:
        """Compute some cells alone.

        Args:
            cells: their numbers.

        Returns:
            [pairs, cells]: the metric at each.
        """
        found = np.empty((len(self.pairs), self.setting.grid.cells))
        for pair in range(len(self.pairs)):
            runs, metric, unpatched = self._first if pair == 0 else self._prepare(pair)
            found[pair] = unpatched[0]

            def done(some: NDArray[np.int64], values: NDArray[np.float64], pair: int = pair) -> None:
                found[pair, some] = values

            runs.run(cells[runs.effective_cells()[cells]], metric, done)
        return found[:, cells]

    def result(self, by_pair: NDArray[np.float64], bases: NDArray[np.float64], cost: dict[str, float]) -> SweepResult:
        """The result of some numbers.

        Args:
            by_pair: the metric at every cell, [pairs, ...].
            bases: the metric of the run that is patched and of the one patched in, [2, pairs].
            cost: see `SweepResult`.
        """
        setting = self.setting
        base, other = bases.mean(axis=1).tolist()
        moved = (by_pair - bases[0].reshape([-1, *[1] * len(setting.grid.sizes)])).any(axis=0)
        values = np.where(moved, by_pair.mean(axis=0), base)  # the two means may add up in different orders
        clean, corrupted = (other, base) if setting.direction == "denoising" else (base, other)
        return SweepResult(
            values,
            by_pair,
            setting.grid.over,
            setting.labels,
            clean,
            None if setting.direction == "ablation" else corrupted,
            setting.direction,
            setting.metric.name,
            setting.grid.template,
            setting.title,
            setting.about,
            cost,
            clean_by_pair=bases[1] if setting.direction == "denoising" else bases[0],
            corrupted_by_pair={"denoising": bases[0], "noising": bases[1], "ablation": None}[setting.direction],
        )

    @cached_property
    def _first(self) -> tuple[PatchedRuns, Metric, tuple[float, float]]:
        return self._prepare(0)

    def _prepare(self, pair: int) -> tuple[PatchedRuns, Metric, tuple[float, float]]:
        """Run a pair without a patch: patched runs, metric, its values at base and other."""
        prompts, setting = self.pairs[pair], self.setting
        grid = setting.grid.at(prompts.places)
        ids = np.stack([prompts.base] if prompts.other is None else [prompts.base, prompts.other])
        begins = {*grid.layers} if setting.shortcuts.truncate else {0}
        both = run_clean(self.graphs, ids, begins | {grid.layers[-1]}, setting.hooks)
        base, other = both.row(0), both.row(len(ids) - 1)
        donors = other.values if setting.donors is None else setting.donors(base)
        clean, corrupted = (other, base) if setting.direction == "denoising" else (base, other)
        second = None if prompts.other is None else corrupted.logits[0]
        metric = setting.metric.bind(self.model, pair, len(self.pairs), clean.logits[0], second)
        read = both.logits if metric.needs is None else both.logits[:, list(metric.needs)]
        values = metric(read)
        arguments = (self.graphs, grid, base, donors, prompts.first, setting.shortcuts, read.shape[1])
        receivers = setting.receivers
        runs = PatchedRuns(*arguments) if receivers is None else PathPatchedRuns(receivers, *arguments)
        return runs, metric, (float(values[0]), float(values[-1]))


def run_sweep(sweep: Sweep, progress: Progress | None, resume: str | Path | bool, before: Before | None) -> SweepResult:
    """Run a sweep as its verb was asked to; see `patch_sweep`."""
    sweep.file = _progress_file(sweep, resume)
    temporary = sweep.file if resume is True else None
    if before is not None:
        before(sweep)
    try:
        with bars() if progress is None else nullcontext(progress) as shown:
            result = sweep.run(shown)
    except Exception:  # an interruption is none: its file stays
        _delete(temporary)
        raise
    finally:
        sweep.model.give_back(later=True)
    _delete(temporary)
    return result


def _progress_file(sweep: Sweep, resume: str | Path | bool) -> Path | None:
    """Path of the file for computed cells; None if nothing is stored."""
    if not isinstance(resume, bool):
        return Path(resume)
    if not resume:
        key = sweep.setting.metric.resume_key
        if key is not None:
            raise InputError(f"resume_key={key!r} has no effect without resume=True or resume=FILE")
        return None
    folder = cache_folder() / SWEEPS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EROFS, "it cannot be written", str(folder))
    except OSError as error:
        lost = "an interruption would lose the cells that are computed; resume=FILE keeps them elsewhere"
        DiskCache(cache_folder()).say_unusable(error, lost, SWEEPS)
        return None
    return folder / f"{sweep.key[:32]}.safetensors"


def _delete(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)
