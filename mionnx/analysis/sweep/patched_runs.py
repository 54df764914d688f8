"""Patched runs: the cells of a sweep, computed as rows of a batch."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.clean_run import CleanRun
from mionnx.analysis.sweep.grid import Grid
from mionnx.analysis.sweep.metric import Metric
from mionnx.errors import InputError, ModelError
from mionnx.graph.axes import has_sequence, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine import memory
from mionnx.rewrite.plan import Edit
from mionnx.run.segments import Arrays, Rows, Segments
from mionnx.spec.kinds import KINDS

CALL_TOKENS = 4096  # most tokens of one call: more gains nothing, and takes memory
FEW = 512  # a call with fewer tokens is filled with rows that start later
SHARE = 4  # a call may take this part of the free memory: a quarter
Cells = NDArray[np.int64]


@dataclass(frozen=True)
class Shortcuts:
    """Savings in computation; results are the same without them."""

    batch: bool = True  # cells are rows of one batch
    # A row starts at the layer that it patches, from the base's stream, and joins the rows before it.
    truncate: bool = True
    last: bool = True  # after the last layer's attention only the last position is computed, since only that is read
    # Positions before the first that a patch can change are not computed: keys and values are the base's.
    window: bool = True
    # A cell where base and donor are equal, or that nothing reads, is not computed: its effect is exactly 0.
    skip: bool = True


def shortcuts_for(model: HookedModel, shortcuts: Shortcuts | None) -> Shortcuts:
    """The savings of a request, or all that leave results as they are."""
    apart = model.rounds_by_call  # one scale for a call: it must be one cell at all of its positions
    shortcuts = shortcuts or Shortcuts(batch=not apart, last=not apart, window=not apart)
    # in a text that is read whole a change at any position may reach all of them in the next layer
    return replace(shortcuts, last=False, window=False) if model.metadata.reads_whole else shortcuts


class PatchedRuns:
    """The patched runs of one prompt.

    Attributes:
        base: the run without a patch, [1, ...].
        donors: hook point -> new value, broadcast to the old one.
        first: the first position at which donor and base differ.
        read: number of logits of a row that the metric reads.
        rows: largest number of rows of a call; halved when memory runs out.
        layer_pass: makes the pass of some cells through the layers.
    """

    def __init__(
        self,
        graphs: Segments,
        grid: Grid,
        base: CleanRun,
        donors: Mapping[str, NDArray[Any]],
        first: int = 0,
        shortcuts: Shortcuts | None = None,
        read: int = 0,
    ) -> None:
        self.graphs, self.grid, self.shortcuts = graphs, grid, shortcuts or Shortcuts()
        self.base, self.donors, self.first = base, donors, first
        self.seq, self.read = base.ids.shape[1], read
        in_memory = max(1, memory.available() // SHARE // self.row_bytes(self.seq))
        self.rows = min(CALL_TOKENS, in_memory) if self.shortcuts.batch else 1
        self.layer_pass: Callable[[PatchedRuns, Cells, int], LayerPass] = LayerPass
        # Keys and values before a position are at hand, a state after it is not.
        carries_state = self.graphs.model.metadata.carries_state
        self._windowed = self.shortcuts.window and bool(base.past) and not carries_state

    def row_bytes(self, width: int) -> int:
        """Approximate bytes of a row with `width` computed positions: one layer, and its logits."""
        sizes, hooks = self.graphs.model.metadata.sizes, self.graphs.model.metadata.hooks
        neurons = hooks.get(str(HookPoint.MlpAct(0)), [4 * sizes.hidden_size])[-1]
        values = 8 * sizes.hidden_size + 4 * int(neurons) + 3 * sizes.num_heads * self.seq  # stream, neurons, scores
        keys = 4 * self.seq * 4 * sizes.num_kv_heads * sizes.head_dim
        # Logits are 4 bytes each as the graph gives them, and a metric makes four arrays of 8 of them.
        return 4 * width * values + keys + self.read * (4 + 4 * 8)

    def effective_cells(self) -> NDArray[np.bool_]:
        """[cells] bool: cells whose effect is not known to be zero."""
        differing = [self._differing(hook)[0] for hook in map(self.grid.hook, self.grid.layers)]
        return self.grid.by_cell(differing, np.any).ravel()

    def _differing(self, hook: str) -> NDArray[np.bool_]:
        """Entries that differ between base and donor; all of them if that is no reason to skip a cell."""
        old = self.base.values[hook]
        if not self.shortcuts.skip:
            return np.ones(old.shape, bool)
        changed: NDArray[np.bool_] = old != np.broadcast_to(self.donors[hook], old.shape)
        if self._read_at_the_end(hook):
            # The logits are read at the last position only, and nothing carries a change there any more.
            np.moveaxis(changed, sequence_axis(self.grid.axes), 0)[:-1] = False
        return changed

    def _read_at_the_end(self, hook: str) -> bool:
        """Whether a hook point is in the last layer and is read at the last position alone."""
        last = hook == self.grid.hook(self.graphs.layers - 1) and bool(self.graphs.after_attention)
        last = last and not self.graphs.model.metadata.reads_whole
        # Keys, values and the stream before attention are read by other tokens.
        return last and HookPoint.parse(hook).variant not in ("ResidPre", "AttnK", "AttnRotK", "AttnV")

    def run(self, cells: Cells, metric: Metric, done: Callable[[Cells, NDArray[np.float64]], None]) -> None:
        """Compute cells; `done` is called with those of each batch and their values."""
        for chunk, _ in self.batches(cells):
            try:
                values = metric(self._logits(chunk, metric))
            except (MemoryError, ModelError) as error:
                # ONNX Runtime's failed allocations come as a `ModelError`, known by their text alone.
                if isinstance(error, ModelError) and not re.search("alloc|memory", str(error), re.IGNORECASE):
                    raise
                if len(chunk) == 1:
                    raise InputError(f"a single cell of this sweep does not fit into memory: {error}") from error
                # Half as many rows, for the batches to come too; this batch's cells alone are run again.
                self.rows = len(chunk) // 2
                self.run(chunk, metric, done)
            else:
                done(chunk, values)

    def _start(self, cells: Cells) -> NDArray[np.int64]:
        """[cells]: the first position that each can change."""
        if not self._windowed:
            return np.zeros(len(cells), np.int64)
        # At least the last position is computed, since its logits are read.
        return np.minimum(np.maximum(self.grid.position_of(cells), self.first), self.seq - 1)

    def batches(self, cells: Cells) -> Iterator[tuple[Cells, int]]:
        """Divide cells into batches: the cells of a call, and the position at which it starts."""
        starts = self._start(cells)
        # Cells that start late need few positions: sorted, they do not wait in a batch with early ones.
        order = np.argsort(starts, kind="stable")
        waiting, starts = cells[order], starts[order]
        while len(waiting):
            width = self.seq - int(starts[0])
            most = max(1, min(self.rows, CALL_TOKENS // width))
            equal = int(np.searchsorted(starts, starts[0], side="right"))  # these begin at the same position
            count = min(most, max(equal, FEW // width, 1))
            yield waiting[:count], int(starts[0])
            waiting, starts = waiting[count:], starts[count:]

    def layer_seconds(self, cells: Cells, start: int) -> float:
        """Measure the seconds of one token in one layer, on a layer that does as much as any."""
        for _ in range(2):  # the first opens the graphs
            layer_pass, begin = self.layer_pass(self, cells, start), time.perf_counter()
            layer_pass.run_one_layer()
        return (time.perf_counter() - begin) / (len(cells) * (self.seq - start))

    def work(self, cells: Cells) -> int:
        """Number of tokens times layers to be computed for some cells."""
        batches = self.batches(cells)
        return sum(
            int((self.graphs.layers - self.begins(chunk)).sum()) * (self.seq - start) for chunk, start in batches
        )

    def begins(self, cells: Cells) -> NDArray[np.int64]:
        """[cells]: the layer at which each starts."""
        return self.grid.layer_of(cells) if self.shortcuts.truncate else np.zeros(len(cells), np.int64)

    def _logits(self, cells: Cells, metric: Metric) -> NDArray[Any]:
        """[cells, vocab or what the metric needs]: the logits of patched runs."""
        start = int(self._start(cells)[0])
        # Rows join the batch layer by layer, so they are sorted by the layer at which they start.
        order = np.argsort(self.grid.layer_of(cells), kind="stable")
        logits = self.layer_pass(self, cells[order], start).finish(metric)
        back = np.empty_like(logits)
        back[order] = logits
        return back


def first_difference(grid: Grid, base: CleanRun, donors: Mapping[str, NDArray[Any]]) -> int:
    """The first position at which a donor differs from the base, else the last one."""
    first = base.ids.shape[1] - 1
    for hook in map(grid.hook, grid.layers):
        if not has_sequence(grid.axes):
            return 0
        changed = (base.values[hook] != np.broadcast_to(donors[hook], base.values[hook].shape)).swapaxes(
            0, sequence_axis(grid.axes)
        )
        first = min([first, *np.flatnonzero(changed.reshape(len(changed), -1).any(axis=1))[:1].tolist()])
    return int(first)


class LayerPass:
    """The pass of some cells through the layers, in the order in which they join."""

    def __init__(self, patched: PatchedRuns, cells: Cells, start: int) -> None:
        self.patched, self.cells, self.start = patched, cells, start
        self.graphs, self.grid, self.seq = patched.graphs, patched.grid, patched.seq
        self.layers, self.begins = self.grid.layer_of(cells), patched.begins(cells)
        self.stream: Arrays = {}
        self.joined = 0

    def rows(self) -> Rows:
        """The tokens of the rows that have joined."""
        base = self.patched.base
        return Rows(np.repeat(base.ids, self.joined, axis=0), self.start, base.past, base.types)

    def join(self, layer: int) -> None:
        """Add the rows that start at a layer."""
        until = int(np.searchsorted(self.begins, layer, side="right"))
        new = until - self.joined
        if new:
            base = self.patched.base.streams[layer]
            # The new rows come from the run without a patch: before their own layer nothing differs from it.
            for name, array in base.items():
                fresh = np.repeat(array[:, self.start :], new, axis=0)
                self.stream[name] = np.concatenate([self.stream[name], fresh]) if self.joined else fresh
            self.joined = until

    def edits(self, layer: int, narrow: bool = False) -> dict[Edit, Arrays]:
        """The edits of a layer for the rows that have joined: the corruption's, then the patch."""
        rows = self.graphs.last_position(self.rows()) if narrow else self.rows()
        return self.patched.base.corrupted(layer, rows) | self.patch(layer, rows.start)

    def patch(self, layer: int, first: int) -> dict[Edit, Arrays]:
        if layer not in self.grid.layers:
            return {}
        hook, axes, corruption = self.grid.hook(layer), self.grid.axes, self.patched.base.corruption
        # Edits at a hook point are numbered in order: the corruption's first, then the patch, which replaces their
        # result.
        edit = Edit(hook, KINDS["replace"], 0 if corruption is None else corruption.count(hook), axes, masked=True)
        shape = list(self.patched.base.values[hook].shape)
        along = sequence_axis(axes) if has_sequence(axes) else None
        donor = self.patched.donors[hook]
        if along is not None:
            shape[along] -= first
            # A donor of one position, as zeros or a mean, is broadcast by the graph.
            donor = donor if donor.shape[along] == 1 else np.take(donor, range(first, self.seq), axis=along)
        mask = self.grid.selected(self.cells[: self.joined], shape, first)
        # Each row is patched in its own layer alone; in later ones its mask is empty.
        mask &= (self.layers[: self.joined] == layer).reshape([-1, *[1] * (mask.ndim - 1)])
        return {edit: {edit.value_input: np.ascontiguousarray(donor), edit.mask_input: mask}}

    def step(self, layer: int) -> None:
        self.stream, _ = self.graphs.layer(layer, self.rows(), self.stream, self.edits(layer))

    def run_one_layer(self) -> None:
        """Run the last patched layer with all rows."""
        layer = self.grid.layers[-1]
        self.join(layer)
        self.step(layer)

    def finish(self, metric: Metric) -> NDArray[Any]:
        """Run all remaining layers; the logits at the last position."""
        graphs, last = self.graphs, self.graphs.layers - 1
        halves = graphs.after_attention if self.patched.shortcuts.last else ()
        for layer in range(int(self.begins[0]), graphs.layers if not halves else last):
            self.join(layer)
            self.step(layer)
        tokens = None if metric.needs is None else np.array(metric.needs)
        if not halves:
            head = self.patched.base.corrupted(graphs.layers, self.rows())
            if self.patched.graphs.model.metadata.reads_whole:
                return graphs.values_at(self.rows(), self.stream, head, self.patched.base.at, tokens)
            logits = graphs.logits(self.rows(), self.stream, head, last=self.patched.shortcuts.last, tokens=tokens)
            return logits[:, -1]
        # The last layer in two halves: attention at all positions, which it reads, and what follows at the last alone.
        self.join(last)
        order, border = self.graphs.model.order, self.graphs.model.order[halves[0]]
        early = {edit: inputs for edit, inputs in self.edits(last).items() if order[edit.hook] <= border}
        values = graphs.run(self.rows(), self.stream, halves, early)
        ends = {name: np.ascontiguousarray(value[:, -1:]) for name, value in values.items()}
        rows = graphs.last_position(self.rows())
        narrow = {edit: inputs for edit, inputs in self.edits(last, narrow=True).items() if order[edit.hook] > border}
        narrow |= self.patched.base.corrupted(graphs.layers, rows)
        return graphs.logits(rows, ends, narrow, tokens=tokens)[:, -1]
