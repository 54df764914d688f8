"""A sweep over prompts or pairs of prompts: ready to be estimated, run, interrupted and resumed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.clean_run import Record, record
from mionnx.analysis.sweep.fingerprint import mark_of
from mionnx.analysis.sweep.grid import Grid
from mionnx.analysis.sweep.layer_graphs import Pieces
from mionnx.analysis.sweep.metric import Metric, Wanted
from mionnx.analysis.sweep.patched_runs import Patched, Shortcuts
from mionnx.analysis.sweep.path import PathPatched, written
from mionnx.analysis.sweep.progress_file import Kept, key_of
from mionnx.analysis.sweep.receivers import Receivers
from mionnx.analysis.sweep.result import SweepResult
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.progress import Progress, silent

if TYPE_CHECKING:
    from mionnx.run.runner import Runner

Ids = NDArray[np.int64]
Donors = Callable[[Record], dict[str, NDArray[Any]]]


@dataclass(frozen=True)
class Prompt:
    """One prompt, or pair of prompts, of a sweep.

    Attributes:
        base: [seq]: the run that is patched.
        other: [seq]: the run that is patched in; None for an ablation.
    """

    base: Ids
    other: Ids | None = None

    @property
    def first(self) -> int:
        """The first position at which the two differ; 0 for an ablation."""
        return 0 if self.other is None else int(np.flatnonzero(self.base != self.other)[0])


@dataclass(frozen=True)
class SweepEstimate:
    """What a sweep will take, about.

    Attributes:
        cells: how many numbers it gives, over all prompts.
        computed: those of them that can differ from the run without a patch, by the first prompt, and are not kept in
            a file already.
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
class Setting:
    """What a sweep is, besides its prompts.

    Attributes:
        grid: the cells.
        wanted: the metric.
        direction: "denoising", "noising" or "ablation".
        donors: what is put in place of the base's values; None for those of the other run.
        kind: for people and for the key of a file to resume from: "patch", "zero", "mean 3f2a..".
        at: the position that is read, as given.
        labels: of the axes.
        title, about: of pictures.
        shortcuts: how cells are computed.
        receivers: of path patching; None where everything reads the change.
    """

    grid: Grid
    wanted: Wanted
    direction: str
    donors: Donors | None
    kind: str
    at: int
    labels: dict[str, list[str]]
    title: str
    about: str
    shortcuts: Shortcuts = field(default_factory=Shortcuts)
    receivers: Receivers | None = None

    @property
    def hooks(self) -> list[str]:
        """The hook points whose values are needed of the runs without patches."""
        points = [HookPoint.parse(self.grid.hook(layer)) for layer in self.grid.layers]
        found = [point.name for point in points]
        if self.receivers is not None:
            ways = [(written(point.variant, self.receivers.parallel)[0], point.layer) for point in points]
            found += [str(getattr(HookPoint, way)(layer)) for way, layer in ways if way is not None]
        return list(dict.fromkeys(found))


class Sweep:
    """A sweep that is ready to run.

    Attributes:
        model, pieces: the model, and its pieces.
        prompts: what it runs on; texts end at the position that is read.
        setting: what it measures.
        file: keeps what is done, and is gone on from if it is there already; None for neither.
    """

    file: Path | None = None

    def __init__(self, model: "Runner", pieces: Pieces, prompts: Sequence[Prompt], setting: Setting) -> None:
        self.model, self.pieces, self.prompts, self.setting = model, pieces, list(prompts), setting
        for number, prompt in enumerate(self.prompts):
            if prompt.other is not None and np.array_equal(prompt.base, prompt.other):
                raise InputError(f"pair {number}: the clean and the corrupted prompt are the same up to what is read")

    @property
    def key(self) -> str:
        """The hash of everything that the values depend on.

        Raises:
            InputError: a metric that cannot be told from others.
        """
        setting, metadata = self.setting, self.model.hooked.metadata
        return key_of(
            {
                "mionnx": version("mionnx"),
                "model": [metadata.family, metadata.dtype, metadata.weights_sha256],
                "prompts": [[prompt.base.tolist(), _listed(prompt.other)] for prompt in self.prompts],
                "cells": [setting.grid.template, setting.grid.over, setting.grid.layers, setting.grid.sizes],
                "metric": [setting.wanted.name, mark_of(setting.wanted.measure)],
                "tokens": mark_of([setting.wanted.answer, setting.wanted.versus]),
                "how": [setting.direction, setting.kind, repr(setting.receivers)],
            }
        )

    def estimate(self) -> SweepEstimate:
        """What the sweep will take, by its first prompt and a trial of one layer."""
        patched, kept, count = self._first[0], self._kept(), len(self.prompts)
        alive = np.flatnonzero(patched.alive())
        todo = [np.intersect1d(alive, kept.missing(pair)) for pair in range(count)]
        calls = [list(patched.chunks(cells)) for cells in todo]
        made = max(
            (call for of in calls for call in of), key=lambda call: len(call[0]) * (patched.seq - call[1]), default=None
        )
        seconds = patched.trial(*made) * sum(map(patched.work, todo)) if made else 0.0
        largest = len(made[0]) * patched.row_bytes(patched.seq - made[1]) if made else 0
        records = patched.base.nbytes * (1 if self.prompts[0].other is None else 2)
        computed, batches = sum(map(len, todo)), sum(map(len, calls))
        return SweepEstimate(self.setting.grid.cells * count, computed, batches, seconds, largest + records)

    def _kept(self) -> Kept:
        """What is done already."""
        shape = (len(self.prompts), self.setting.grid.cells)
        return Kept(shape) if self.file is None else Kept(shape, self.key, self.file)

    def run(self, progress: Progress = silent) -> SweepResult:
        """Compute all cells.

        Args:
            progress: told of the cells that are done.

        Raises:
            InputError: a file of another sweep; a metric that gives no numbers; too little memory for one cell.
        """
        begin, grid, total = time.perf_counter(), self.setting.grid, self.setting.grid.cells * len(self.prompts)
        kept, bases = self._kept(), np.empty((2, len(self.prompts)))
        idle = 0
        try:
            for pair in range(len(self.prompts)):
                patched, metric, found = self._first if pair == 0 else self._prepare(pair)
                bases[:, pair] = found
                alive = patched.alive()
                idle += int((~alive).sum())
                kept.put(pair, np.flatnonzero(~alive), np.full(int((~alive).sum()), found[0]))

                def done(cells: NDArray[np.int64], values: NDArray[np.float64], pair: int = pair) -> None:
                    kept.put(pair, cells, values)
                    progress("cells", total - int(np.isnan(kept.values).sum()), total)

                patched.run(kept.missing(pair), metric, done)
        finally:
            kept.write()
        cost = {"cells": float(total), "without effect": float(idle), "seconds": time.perf_counter() - begin}
        return self._result(kept.values.reshape(len(self.prompts), *grid.sizes), bases, cost)

    def _result(self, by_pair: NDArray[np.float64], bases: NDArray[np.float64], cost: dict[str, float]) -> SweepResult:
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
            setting.wanted.name,
            setting.grid.template,
            setting.title,
            setting.about,
            cost,
        )

    @cached_property
    def _first(self) -> tuple[Patched, Metric, tuple[float, float]]:
        return self._prepare(0)

    def _prepare(self, pair: int) -> tuple[Patched, Metric, tuple[float, float]]:
        """The runs without patches: what patched runs begin with, the metric, and its values at base and other."""
        prompt, setting, grid = self.prompts[pair], self.setting, self.setting.grid
        ids = np.stack([prompt.base] if prompt.other is None else [prompt.base, prompt.other])
        begins = {*grid.layers} if setting.shortcuts.truncate else {0}
        made = record(self.pieces, ids, begins | {grid.layers[-1]}, setting.hooks)
        base, other = made.row(0), made.row(len(ids) - 1)
        donors = other.values if setting.donors is None else setting.donors(base)
        clean, corrupted = (other, base) if setting.direction == "denoising" else (base, other)
        second = None if prompt.other is None else corrupted.logits[0]
        metric = setting.wanted.bind(self.model, pair, len(self.prompts), clean.logits[0], second)
        read = made.logits if metric.needs is None else made.logits[:, list(metric.needs)]
        values = metric(read)
        runs = (self.pieces, grid, base, donors, prompt.first, setting.shortcuts, read.shape[1])
        patched = Patched(*runs) if setting.receivers is None else PathPatched(setting.receivers, *runs)
        return patched, metric, (float(values[0]), float(values[-1]))


def _listed(ids: Ids | None) -> list[int] | None:
    return None if ids is None else ids.tolist()
