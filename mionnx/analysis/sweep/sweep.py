"""A sweep over prompts or pairs of prompts: ready to be estimated, run, interrupted and resumed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.clean_run import CleanRun, run_clean
from mionnx.analysis.sweep.comparison import Pair, Pairs
from mionnx.analysis.sweep.grid import Grid
from mionnx.analysis.sweep.metric import Metric
from mionnx.analysis.sweep.patched_runs import Cells, PatchedRuns, Shortcuts, first_difference
from mionnx.analysis.sweep.path_runs import PathPatchedRuns, written
from mionnx.analysis.sweep.receivers import Receivers
from mionnx.analysis.sweep.result import SweepResult
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import Brief
from mionnx.machine.cache_entry import SWEEP_MARK, SWEEPS
from mionnx.machine.disk_cache import DiskCache
from mionnx.machine.progress import Progress, shown, silent
from mionnx.machine.tensor_file import read_tensors, write_tensors
from mionnx.run.find_model import cache_folder
from mionnx.run.runner import Runner
from mionnx.run.segments import Arrays, Segments

Numbers = NDArray[np.float64]
Donors = Callable[[CleanRun], Arrays]
Before = Callable[["Sweep"], None]
FORMAT = 2  # raise it when the same sweep gives other values: files of before are then another sweep's
EVERY = 5.0  # seconds between two writes of computed cells


@dataclass(frozen=True, repr=False)
class SweepEstimate(Brief):
    """Approximate cost of a sweep."""

    cells: int  # numbers of the result, over all prompts
    computed: int  # cells that can differ from the run without a patch, by the first prompt, and that no file holds yet
    calls: int  # batches
    seconds: float  # by the speed of a small trial
    memory: int  # bytes of the largest batch, and of the runs that it starts from


@dataclass(frozen=True)
class SweepSetting:
    """Everything that defines a sweep besides its prompts and its metric."""

    grid: Grid
    title: str  # the method, for pictures: "Path patching"
    shortcuts: Shortcuts
    donors: Donors | None = None  # make the values that replace the base's; None for those of the other run
    kind: str = "patch"  # part of the key of a file to resume from: "patch", "zero", "mean 3f2a.."
    receivers: Receivers | None = None  # of path patching; None where everything reads the change

    @property
    def hooks(self) -> list[str]:
        """The hook points whose values are needed from the runs without patches."""
        names = [self.grid.hook(layer) for layer in self.grid.layers]
        if self.receivers is not None:
            # A path-patched head is seen through the layer's output: the base's value of that is subtracted.
            way, _ = written(HookPoint.parse(names[0]).variant, self.receivers.parallel)
            names += [str(getattr(HookPoint, way)(layer)) for layer in self.grid.layers if way is not None]
        return list(dict.fromkeys(names))


class Sweep:
    """A sweep that is ready to run."""

    file: Path | None = None  # stores computed cells, and is continued if it exists; None for neither
    resume_key: str | None = None  # a name for a metric that is a function, in that file

    def __init__(self, model: Runner, compared: Pairs, setting: SweepSetting) -> None:
        self.model, self.graphs, self.compared, self.setting = model, model.opened(Segments.of_sweep), compared, setting
        self.pairs = compared.pairs

    @property
    def key(self) -> str:
        """The hash of everything that the values depend on, SHA-256."""
        setting, metadata = self.setting, self.model.hooked.metadata
        types = [None if pair.types is None else pair.types.tolist() for pair in self.pairs]
        specs = [pair.corruption.spec.sha256 for pair in self.pairs if pair.corruption is not None]
        facts = {
            "format": FORMAT,
            "model": [metadata.family, metadata.dtype, self.model.hooked.weights_sha256],
            "prompts": [
                [ids if ids is None else ids.tolist() for ids in (pair.base, pair.other)] for pair in self.pairs
            ],
            "cells": [setting.grid.template, setting.grid.over, setting.grid.layers, setting.grid.sizes],
            "metric": self.compared.metric.identity(self.resume_key),
            "how": [self.compared.patching, setting.kind, repr(setting.receivers)],
            # Absent where unused, so that files of sweeps without them keep their key.
            **({} if self.pairs[0].places is None else {"places": [pair.places for pair in self.pairs]}),
            **({"specs": specs} if specs else {}),
            **({} if self.pairs[0].at is None else {"at": [pair.at for pair in self.pairs]}),
            **({"types": types} if any(types) else {}),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def estimate(self) -> SweepEstimate:
        """Estimate time and memory by the first prompt and a trial of one layer."""
        runs, stored, count = self._first[0], self._stored(), len(self.pairs)
        effective = np.flatnonzero(runs.effective_cells())
        missing = [np.intersect1d(effective, stored.missing(pair)) for pair in range(count)]
        batches = [batch for cells in missing for batch in runs.batches(cells)]
        largest = max(batches, key=lambda batch: len(batch[0]) * (runs.seq - batch[1]), default=None)
        # Tokens of all batches at the speed of the largest.
        seconds = runs.layer_seconds(*largest) * sum(map(runs.work, missing)) if largest else 0.0
        batch_bytes = len(largest[0]) * runs.row_bytes(runs.seq - largest[1]) if largest else 0
        clean_bytes = runs.base.nbytes * (1 if self.pairs[0].other is None else 2)
        computed = sum(map(len, missing))
        return SweepEstimate(
            self.setting.grid.cells * count, computed, len(batches), seconds, batch_bytes + clean_bytes
        )

    def _stored(self) -> ProgressFile:
        shape = (len(self.pairs), self.setting.grid.cells)
        return ProgressFile(shape) if self.file is None else ProgressFile(shape, self.key, self.file)

    def run(self, progress: Progress = silent) -> SweepResult:
        """Compute all cells; `progress` is called as (stage, cells done, cells)."""
        begin, grid, total = time.perf_counter(), self.setting.grid, self.setting.grid.cells * len(self.pairs)
        stored, unpatched, idle = self._stored(), np.empty((2, len(self.pairs))), np.zeros(len(self.pairs))

        def report() -> None:
            progress("cells", total - int(np.isnan(stored.values).sum()), total)

        try:
            for pair in range(len(self.pairs)):
                # Cells in the file are not computed again; the runs without a patch are, since their metric is in no
                # file.
                store, missing = partial(stored.store, pair), stored.missing(pair)
                _, unpatched[:, pair], idle[pair] = self.compute_pair(pair, missing, store, report)
        finally:
            stored.write()
        cost = {"cells": float(total), "without effect": float(idle.sum()), "seconds": time.perf_counter() - begin}
        return self.result(stored.values.reshape(len(self.pairs), *grid.sizes), unpatched, cost)

    def compute(self, cells: Cells) -> Numbers:
        """Compute some cells alone, by their numbers: the metric at each, [pairs, cells]."""
        return np.stack([self.compute_pair(pair, cells)[0] for pair in range(len(self.pairs))])

    def compute_pair(
        self,
        pair: int,
        cells: Cells,
        # takes the cells without effect, then those of each batch, and their values
        store: Callable[[Cells, Numbers], None] = lambda cells, values: None,
        report: Callable[[], None] = lambda: None,  # called after each batch
    ) -> tuple[Numbers, tuple[float, float], int]:
        """Compute some cells of one pair, by their numbers."""
        # Returns the metric at each cell, [cells]; that of the run that is patched and of the one patched in; how many
        # of the grid's cells have no effect.
        # `estimate` has prepared the first pair already.
        runs, metric, unpatched = self._first if pair == 0 else self._prepare(pair)
        effective = runs.effective_cells()
        # A cell without effect is the run without a patch, exactly.
        by_cell = np.full(self.setting.grid.cells, unpatched[0])
        idle = cells[~effective[cells]]
        store(idle, by_cell[idle])

        def done(batch: Cells, values: Numbers) -> None:
            by_cell[batch] = values
            store(batch, values)
            report()

        runs.run(cells[effective[cells]], metric, done)
        return by_cell[cells], unpatched, int((~effective).sum())

    def result(self, by_pair: Numbers, bases: Numbers, cost: dict[str, float]) -> SweepResult:
        """The result of the metric at every cell, [pairs, ...], and of both runs without a patch, [2, pairs]."""
        compared, grid, repeats = self.compared, self.setting.grid, self.compared.repeats
        if 1 < repeats < len(by_pair):  # draws of one prompt are no independent pairs
            by_pair = by_pair.reshape(-1, repeats, *by_pair.shape[1:]).mean(axis=1)
            bases = bases.reshape(2, -1, repeats).mean(axis=2)
        moved = (by_pair - bases[0].reshape([-1, *[1] * len(grid.sizes)])).any(axis=0)
        # the two means may add up in different orders
        values = np.where(moved, by_pair.mean(axis=0), float(bases[0].mean()))
        clean, corrupted = compared.ordered(*bases)
        alone, how = compared.patching == "ablation", f" ({compared.patching})"
        return SweepResult(
            values,
            by_pair,
            grid.over,
            compared.labels(self.model, grid),
            float(clean.mean()),
            None if alone else float(corrupted.mean()),
            compared.patching,
            compared.metric.name,
            grid.template,
            f"{self.setting.title} {grid.template.format(i='*')}" + ("" if alone else how),
            compared.about,
            cost,
            clean_by_pair=clean,
            corrupted_by_pair=None if alone else corrupted,
            named=compared.names is not None,
        )

    @cached_property
    def _first(self) -> tuple[PatchedRuns, Metric, tuple[float, float]]:
        return self._prepare(0)

    def _prepare(self, pair: int) -> tuple[PatchedRuns, Metric, tuple[float, float]]:
        """Run a pair without a patch: patched runs, metric, its values at base and other."""
        prompts, setting = self.pairs[pair], self.setting
        grid = setting.grid.at(prompts.places)
        base, other = self._unpatched(prompts)
        donors = other.values if setting.donors is None else setting.donors(base)
        metric = self.compared.bind(self.model, pair, base.logits[0], other.logits[0])
        values = metric.measure(np.concatenate([base.logits, other.logits]))
        first = prompts.first if prompts.corruption is None else first_difference(grid, base, donors)
        read = base.logits.shape[1] if metric.needs is None else len(metric.needs)
        arguments = (self.graphs, grid, base, donors, first, setting.shortcuts, read)
        receivers = setting.receivers
        runs = PatchedRuns(*arguments) if receivers is None else PathPatchedRuns(receivers, *arguments)
        return runs, metric, (float(values[0]), float(values[-1]))

    def _unpatched(self, prompts: Pair) -> tuple[CleanRun, CleanRun]:
        """The run that is patched and the one patched in, the same in an ablation."""
        setting = self.setting
        # Rows start at the layer that they patch.
        begins = {*setting.grid.layers} if setting.shortcuts.truncate else {0}
        # The trial of `estimate` runs the last layer, whatever the shortcuts are.
        begins |= {setting.grid.layers[-1]}
        if prompts.corruption is not None:
            ids = prompts.base[None]
            clean = run_clean(self.graphs, ids, begins, setting.hooks, None, prompts.at, prompts.types)
            corrupted = run_clean(
                self.graphs, ids, begins, setting.hooks, prompts.corruption, prompts.at, prompts.types
            )
            base, other = self.compared.ordered(clean, corrupted)
            return base, other
        # One batch for both runs.
        ids = np.stack([prompts.base] if prompts.other is None else [prompts.base, prompts.other])
        both = run_clean(self.graphs, ids, begins, setting.hooks, None, prompts.at, prompts.types)
        return both.row(0), both.row(len(ids) - 1)  # of an ablation the same row twice


def run_sweep(
    sweep: Sweep, progress: bool | None, resume: str | Path | bool, resume_key: str | None, before: Before | None
) -> SweepResult:
    """Run a sweep with progress and a file to resume from; see `patch_sweep`."""
    sweep.resume_key = resume_key
    sweep.file = _progress_file(sweep, resume)
    if before is not None:
        before(sweep)
    # `resume=True` is for interruptions: a sweep that is done or was refused leaves nothing in the store.
    temporary = sweep.file if resume is True else None
    try:
        with shown(progress) as show:
            return sweep.run(show)
    except BaseException as error:
        if not isinstance(error, Exception):  # an interruption leaves its file
            temporary = None
        raise
    finally:
        sweep.model.give_back(later=True)
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _progress_file(sweep: Sweep, resume: str | Path | bool) -> Path | None:
    """Path of the file for computed cells; None if nothing is stored."""
    if not isinstance(resume, bool):
        return Path(resume)
    if not resume:
        if sweep.resume_key is not None:
            raise InputError(f"resume_key={sweep.resume_key!r} has no effect without resume=True or resume=FILE")
        return None
    try:
        # The store may be read-only, or full: the sweep then runs without a file, and says so once.
        folder = DiskCache(cache_folder()).kind_folder(SWEEPS)
        if not os.access(folder, os.W_OK):
            raise OSError(errno.EROFS, "it cannot be written", str(folder))
        file = folder / f"{sweep.key[:32]}.safetensors"
        if file.is_symlink():
            raise OSError(errno.EEXIST, "it is a link, which is not followed", str(file))
    except OSError as error:
        lost = "an interruption would lose the cells that are computed; resume=FILE keeps them elsewhere"
        DiskCache(cache_folder()).say_unusable(error, lost, SWEEPS)
        return None
    return file


class ProgressFile:
    """Computed cells in memory, and in a file if a path is given, from which an interrupted sweep continues.

    The file is safetensors with a checksum (`mionnx.machine.tensor_file`): `values`, and in its metadata the sweep's
    `key`. A damaged file is refused, and never changes a result.
    """

    def __init__(self, shape: tuple[int, int], key: str = "", path: Path | None = None) -> None:
        self.values = np.full(shape, np.nan)  # [pairs, cells] float64, NaN for cells that are not computed yet
        self.key, self.path, self._last_write = key, path, time.monotonic()
        if path is not None and path.exists():
            self.values = self._read(path)

    def _read(self, path: Path) -> Numbers:
        why = f"cannot resume from {path}: it is no file of a sweep"
        try:
            metadata, tensors = read_tensors(path, why, InputError)
        except InputError as error:
            raise InputError(f"{error}; delete it, and the sweep begins anew") from error
        values = tensors.get("values")
        if metadata.get(SWEEP_MARK) != self.key or values is None or values.shape != self.values.shape:
            raise InputError(
                f"cannot resume from {path}: it belongs to another sweep (other prompts, model, hook, metric or cells)"
            )
        return values

    def store(self, pair: int, cells: Cells, values: Numbers) -> None:
        """Store computed cells; write the file at most every 5 s."""
        self.values[pair, cells] = values
        # A write takes all cells, and a batch may take milliseconds.
        if time.monotonic() - self._last_write > EVERY:
            self.write()

    def write(self) -> None:
        """Write the file, if a path was given."""
        if self.path is not None:
            write_tensors(self.path, {"values": self.values}, {SWEEP_MARK: self.key})
            self._last_write = time.monotonic()

    def missing(self, pair: int) -> Cells:
        """The cells of a pair that are not computed yet."""
        return np.flatnonzero(np.isnan(self.values[pair]))
