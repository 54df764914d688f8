"""Path patching: what a sender changes is read by chosen receivers alone.

The stream that goes on is that of the run that is patched. A sender's change is kept beside it, and a receiver computes
its input from the stream with the change, everybody else from the stream without. So what receivers make of it goes on
as usual, and with everything as a receiver the result is that of plain patching.

For one receiver this is the path patching of Wang et al. (2022, arXiv:2211.00593) with all other heads and MLPs between
the two frozen; several receivers see what earlier ones made of it, too.
"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.grid import Grid
from mionnx.analysis.sweep.layer_graphs import Arrays
from mionnx.analysis.sweep.metric import Metric
from mionnx.analysis.sweep.patched_runs import Cells, LayerPass, PatchedRuns
from mionnx.analysis.sweep.receivers import Receivers
from mionnx.errors import InputError
from mionnx.graph.axes import heads_axis
from mionnx.graph.hook_points import VARIANTS, HookPoint
from mionnx.rewrite.plan import Edit
from mionnx.spec.kinds import KINDS

# What a sender writes into the stream, and how many stages after the beginning of its layer that is read.
STREAM = {"ResidPre": 0, "ResidMid": 1, "ResidPost": 2}


def written(variant: str, parallel: bool) -> tuple[str | None, int]:
    """By which hook point a sender's change reaches the stream (None: it is the stream's own), and when it is read."""
    if variant in STREAM:
        return None, STREAM[variant]
    attention = variant in VARIANTS and VARIANTS[variant].group == "attention"
    return ("AttnOut", 2 if parallel else 1) if attention else ("MlpOut", 2)


def reached_layers(grid: Grid, receivers: Receivers) -> dict[int, bool]:
    """Of each layer that sends, whether a receiver reads what it changes.

    Raises:
        InputError: none does in any layer: every cell would be without effect.
    """
    _, later = written(HookPoint.parse(grid.hook(0)).variant, receivers.parallel)
    found = {layer: receivers.after(2 * layer + later) for layer in grid.layers}
    if not any(found.values()):
        names = ", ".join([*receivers.heads, *(["hook_final_norm"] if receivers.final else [])])
        raise InputError(
            f"what {grid.template} of layer {grid.layers[0]} and later changes is read by none of the receivers "
            f"{names}: all of them come before it; give senders of earlier layers, or later receivers"
        )
    return found


class PathPatchedRuns(PatchedRuns):
    """The path-patched runs of one prompt.

    Attributes:
        receivers: who reads the change.
    """

    def __init__(self, receivers: Receivers, *given: Any) -> None:
        super().__init__(*given)
        self.receivers = receivers
        self.layer_pass = partial(_PathPass, receivers)

    def effective_cells(self) -> NDArray[np.bool_]:
        """[cells]: those whose change somebody receives."""
        found, layers = reached_layers(self.grid, self.receivers), self.grid.layer_of(np.arange(self.grid.cells))
        return super().effective_cells() & np.array([found[layer] for layer in layers.tolist()])

    def row_bytes(self, width: int) -> int:
        """The change and the sums with it take as much again as the stream, and receivers' inputs their own."""
        sizes = self.graphs.model.metadata.sizes
        received = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        return super().row_bytes(width) + 4 * width * (8 * sizes.hidden_size + 2 * received)

    def _read_at_the_end(self, hook: str) -> bool:
        return False


class _PathPass(LayerPass):
    """Some cells on their way through the layers: the stream, and the change beside it."""

    def __init__(self, receivers: Receivers, patched: PatchedRuns, cells: Cells, start: int) -> None:
        super().__init__(patched, cells, start)
        self.receivers = receivers
        self.base = patched.base
        variant = HookPoint.parse(self.grid.hook(0)).variant
        self.through, self.later = written(variant, self.receivers.parallel)
        self.change: NDArray[Any] = np.empty(0)

    def finish(self, metric: Metric) -> NDArray[Any]:
        """Go through all layers that are left; the logits at the last position."""
        for layer in range(int(self.begins[0]), self.graphs.layers):
            self.join(layer)
            self.step(layer)
        end = self.stream[self.graphs.end] + self.change if self.receivers.final else self.stream[self.graphs.end]
        tokens = None if metric.needs is None else np.array(metric.needs)
        return self.graphs.logits(self.text(), {self.graphs.end: end}, tokens=tokens)[:, -1]

    def step(self, layer: int) -> None:
        """Go through one layer: what is sent there, and who receives it."""
        self._layer(layer, self._sent(layer))

    def time_one_layer(self) -> None:
        """The layer that sends and has the most receivers, every row with a change."""
        count = self.receivers.count
        layer = max(reversed(self.grid.layers), key=count)
        self.begins = np.zeros_like(self.begins)
        self.join(layer)
        self.change = self.change + 1
        self.step(layer)

    def join(self, layer: int) -> None:
        """Let rows join; they have changed nothing yet."""
        before = self.joined
        super().join(layer)
        stream = self.stream[self.graphs.starts(layer)[0]]
        fresh = np.zeros_like(stream[before:])
        self.change = np.concatenate([self.change, fresh]) if before else fresh

    def _sent(self, layer: int) -> NDArray[Any] | None:
        """What senders of this layer add to the stream, zero for rows that sent earlier."""
        edits = self.edits(layer)
        if not edits:
            return None
        edit, inputs = next(iter(edits.items()))
        through = edit.hook if self.through is None else str(getattr(HookPoint, self.through)(layer))
        old = self.base.values[through][:, self.start :]
        if edit.hook == through:
            return np.where(inputs[edit.mask_input], inputs[edit.value_input] - old, 0)
        begins = {name: value[:, self.start :] for name, value in self.base.streams[layer].items()}
        begins = {name: np.repeat(value, self.joined, axis=0) for name, value in begins.items()}
        new = self.graphs.run(self.text(), begins, edits, [through])[through]
        sends = (self.layers[: self.joined] == layer)[:, None, None]
        return np.where(sends, new - old, 0)

    def _layer(self, layer: int, sent: NDArray[Any] | None) -> None:
        """One layer: its attention, then its MLP, each with what its receivers make of the change."""
        pre, mid, post = (str(point(layer)) for point in (HookPoint.ResidPre, HookPoint.ResidMid, HookPoint.ResidPost))
        stages = [(pre, self.receivers.into_attention(layer)), (mid, self.receivers.into_mlp(layer))]
        if self.receivers.parallel:
            stages = stages[:1]
        stream = self.stream[pre]
        for number, (begin, receivers) in enumerate(stages):
            self._send(sent, number)
            end = post if begin == stages[-1][0] else mid
            edits = self._received(begin, stream, receivers)
            stream = self.graphs.run(self.text(), {begin: stream}, edits, [end])[end]
        self._send(sent, 2)
        after = self.graphs.starts(layer + 1)[0]
        self.stream = {after: stream}

    def _send(self, sent: NDArray[Any] | None, stage: int) -> None:
        if sent is not None and stage == self.later:
            self.change = self.change + sent

    def _received(self, begin: str, stream: NDArray[Any], receivers: list[str]) -> dict[Edit, Arrays]:
        """The inputs of receivers, computed from the stream with the change."""
        if not receivers or not self.change.any():
            return {}
        found = self.graphs.run(self.text(), {begin: stream + self.change}, {}, receivers)
        edits: dict[Edit, Arrays] = {}
        for name in receivers:
            axes = HookPoint.parse(name).axes or ()
            edit = Edit(name, KINDS["replace"], 0, axes, masked=True)
            mask = np.ones([1] * len(axes), bool)
            heads, axis = self.receivers.heads[name], heads_axis(axes)
            if heads is not None and axis is not None:
                line = np.isin(np.arange(found[name].shape[axis]), heads)
                mask = line.reshape([-1 if i == axis else 1 for i in range(len(axes))])
            edits[edit] = {edit.value_input: found[name], edit.mask_input: mask}
        return edits
