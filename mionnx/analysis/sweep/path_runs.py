"""Path patching: only chosen receivers read a sender's change.

For one receiver this is the path patching of Wang et al. (2022, arXiv:2211.00593) with all other heads and MLPs between
the two frozen; with several receivers, later ones read the outputs of earlier ones too.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.grid import Grid
from mionnx.analysis.sweep.metric import Metric
from mionnx.analysis.sweep.patched_runs import Cells, LayerPass, PatchedRuns
from mionnx.analysis.sweep.receivers import Receivers
from mionnx.errors import InputError
from mionnx.graph.axes import heads_axis
from mionnx.graph.hook_points import VARIANTS, HookPoint
from mionnx.rewrite.plan import Edit
from mionnx.run.segments import Arrays, Rows, Segments
from mionnx.spec.kinds import KINDS

TRIAL = 3  # tokens of a trial that finds out what a value depends on
# Senders that are the stream itself -> number of stages from the start of their layer to the first reader.
STREAM = {"ResidPre": 0, "ResidMid": 1, "ResidPost": 2}
# Senders that a norm makes the stream of: its change is what they send.
SUMS = {"ResidMidSum": "ResidMid", "ResidPostSum": "ResidPost"}


def written(variant: str, parallel: bool) -> tuple[str | None, int]:
    """Hook point by which a sender's change reaches the stream (None: the stream itself), and stages until read."""
    if variant in STREAM:
        return None, STREAM[variant]
    if variant in SUMS:
        return SUMS[variant], STREAM[SUMS[variant]]
    attention = variant in VARIANTS and VARIANTS[variant].group == "attention"
    # A head's value reaches the stream through the layer's output; in parallel layers the MLP reads what attention
    # reads, so that both outputs are added at the end.
    return ("AttnOut", 2 if parallel else 1) if attention else ("MlpOut", 2)


def reached_layers(grid: Grid, receivers: Receivers) -> dict[int, bool]:
    """Sender layer -> whether any receiver reads its change; refused if none does: no cell would have an effect."""
    _, later = written(HookPoint.parse(grid.hook(0)).variant, receivers.parallel)
    reached = {layer: receivers.after(2 * layer + later) for layer in grid.layers}
    if not any(reached.values()):
        names = ", ".join([*receivers.heads, *(["hook_final_norm"] if receivers.final else [])])
        raise InputError(
            f"what {grid.template} of layer {grid.layers[0]} and later changes is read by none of the receivers "
            f"{names}: all of them come before it; give senders of earlier layers, or later receivers"
        )
    return reached


def refuse_other_ways(graphs: Segments, receivers: Receivers) -> None:
    """Refuse all receivers of a model of which a layer's half reads the stream by another way than these."""
    hooks, flow = graphs.model.metadata.hooks, graphs.flow
    for stage in range(2 * receivers.layers):
        layer, middle = divmod(stage, 2)
        read = str((HookPoint.ResidMid if middle and not receivers.parallel else HookPoint.ResidPre)(layer))
        inputs = receivers.at(stage - 1 if middle and receivers.parallel else stage)
        out = str((HookPoint.MlpOut if middle else HookPoint.AttnOut)(layer))
        if out not in hooks or read not in flow.read_by(flow.ancestors([out], {read, *inputs})):
            continue
        if depends(graphs, out, read, inputs):  # codegen stacks queries, keys and values, and takes them apart again
            raise InputError(
                f"receivers='all': in this {graphs.model.metadata.family} model {out} depends on {read} by another way "
                f"than {', '.join(inputs)}, so these do not read all that a sender changes. Name receivers; "
                "patch_sweep has the effect by all ways"
            )


def depends(graphs: Segments, out: str, read: str, inputs: Sequence[str]) -> bool:
    """Whether a value changes with the stream where the inputs that it is computed from keep theirs."""
    draw, rows = np.random.default_rng(0), Rows.blank(1, TRIAL)
    one, other = draw.standard_normal((2, 1, TRIAL, graphs.model.metadata.sizes.hidden_size))
    fixed = graphs.run(rows, {read: one}, inputs) if inputs else {}
    first, second = (graphs.run(rows, {**fixed, read: stream}, [out])[out] for stream in (one, other))
    return not np.array_equal(first, second)


class PathPatchedRuns(PatchedRuns):
    """The path-patched runs of one prompt."""

    def __init__(self, receivers: Receivers, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.receivers = receivers
        self.layer_pass = partial(_NormedPathPass if receivers.normed else _PathPass, receivers)

    def effective_cells(self) -> NDArray[np.bool_]:
        """[cells] bool: cells whose change is read by a receiver."""
        reached, layers = reached_layers(self.grid, self.receivers), self.grid.layer_of(np.arange(self.grid.cells))
        return super().effective_cells() & np.array([reached[layer] for layer in layers.tolist()])

    def row_bytes(self, width: int) -> int:
        """Approximate bytes of a row: the change and its sums besides, and the receivers' inputs."""
        sizes = self.graphs.model.metadata.sizes
        received = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        return super().row_bytes(width) + 4 * width * (8 * sizes.hidden_size + 2 * received)

    def _read_at_the_end(self, hook: str) -> bool:
        return False


class _PathPass(LayerPass):
    """The pass of some cells through the layers: the stream without a patch, and the senders' change beside it.

    A receiver computes its input from the stream with the change, everything else from the stream without.
    """

    def __init__(self, receivers: Receivers, patched: PatchedRuns, cells: Cells, start: int) -> None:
        super().__init__(patched, cells, start)
        self.receivers, self.base = receivers, patched.base
        self.through, self.later = written(HookPoint.parse(self.grid.hook(0)).variant, receivers.parallel)
        self.change: NDArray[Any] = np.empty(0)

    def finish(self, metric: Metric) -> NDArray[Any]:
        for layer in range(int(self.begins[0]), self.graphs.layers):
            self.join(layer)
            self.step(layer)
        end = self.stream[self.graphs.end]
        end = self.changed(end) if self.receivers.final else end
        tokens = None if metric.needs is None else np.array(metric.needs)
        return self.graphs.values_at(self.rows(), {self.graphs.end: end}, None, self.base.at, tokens)

    @property
    def has_change(self) -> bool:
        """Whether anything has been sent."""
        return bool(self.change.any())

    def run_one_layer(self) -> None:
        """Run the sender layer with the most receivers, every row with a change."""
        layer = max(reversed(self.grid.layers), key=self.receivers.count)
        self.begins = np.zeros_like(self.begins)
        self.join(layer)
        # The size does not matter; without a change the receivers would be skipped, and a trial would measure too
        # little.
        self.change = self.change + 1
        self.step(layer)

    def join(self, layer: int) -> None:
        """Add rows; they have changed nothing yet."""
        before = self.joined
        super().join(layer)
        stream = self.stream[self.graphs.inputs_of(layer)[0]]
        fresh = np.zeros_like(stream[before:])
        self.change = np.concatenate([self.change, fresh]) if before else fresh

    def _sent(self, layer: int) -> NDArray[Any] | None:
        """Change of the stream by this layer's senders; zero for rows that sent earlier."""
        edits = self.edits(layer)
        if not edits:
            return None
        edit, inputs = next(iter(edits.items()))
        through = edit.hook if self.through is None else str(getattr(HookPoint, self.through)(layer))
        old = self.base.values[through][:, self.start :]
        if edit.hook == through:  # its value is what is added to the stream: nothing to compute
            return np.where(inputs[edit.mask_input], inputs[edit.value_input] - old, 0)
        begins = {name: value[:, self.start :] for name, value in self.base.streams[layer].items()}
        # The senders' new output is computed from the run without a patch: what the rows sent earlier they must not
        # read.
        begins = {name: np.repeat(value, self.joined, axis=0) for name, value in begins.items()}
        new = self.graphs.run(self.rows(), begins, [through], edits)[through]
        # Rows that sent in an earlier layer computed their clean output here; `new - old` would be rounding noise.
        sends = (self.layers[: self.joined] == layer)[:, None, None]
        return np.where(sends, new - old, 0)

    def step(self, layer: int) -> None:
        """Run a layer: senders, then attention and MLP, each with the change at its receivers."""
        sent = self._sent(layer)
        pre, mid, post = (str(point(layer)) for point in (HookPoint.ResidPre, HookPoint.ResidMid, HookPoint.ResidPost))
        # Parallel layers have no stream between attention and MLP to cut at.
        cuts = [pre, post] if self.receivers.parallel else [pre, mid, post]
        stream = self.stream[pre]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            self._send(sent, number)
            edits = self._received(begin, stream, self.receivers.at(2 * layer + number))
            stream = self.graphs.run(self.rows(), {begin: stream}, [end], edits)[end]
        self._send(sent, 2)  # by now the layer has been read: from the next one on
        self.stream = {self.graphs.inputs_of(layer + 1)[0]: stream}

    def changed(self, stream: NDArray[Any]) -> NDArray[Any]:
        """The stream with the senders' change."""
        return stream + self.change

    def _send(self, sent: NDArray[Any] | None, stage: int) -> None:
        if sent is not None and stage == self.later:
            self.change = self.change + sent

    def _received(self, begin: str, stream: NDArray[Any], receivers: list[str]) -> dict[Edit, Arrays]:
        """Edits with the receivers' inputs, computed from the stream with the change."""
        if not receivers or not self.has_change:
            return {}
        inputs = self.graphs.run(self.rows(), {begin: self.changed(stream)}, receivers)
        edits: dict[Edit, Arrays] = {}
        for name in receivers:
            axes = HookPoint.parse(name).axes or ()
            edit = Edit(name, KINDS["replace"], 0, axes, masked=True)
            mask = np.ones([1] * len(axes), bool)
            heads, axis = self.receivers.heads[name], heads_axis(axes)
            if heads is not None and axis is not None:
                line = np.isin(np.arange(inputs[name].shape[axis]), heads)
                mask = line.reshape([-1 if i == axis else 1 for i in range(len(axes))])
            edits[edit] = {edit.value_input: inputs[name], edit.mask_input: mask}
        return edits


class _NormedPathPass(_PathPass):
    """The pass where the stream is normed after each addition: the change is no sum, and is carried as a whole stream.

    What layers add comes from the stream without the change; it is added to both, and each is normed by itself. So
    a receiver reads what the senders' change alone makes of the stream, through every norm on its way, exactly.
    """

    def join(self, layer: int) -> None:
        before = self.joined
        LayerPass.join(self, layer)
        fresh = self.stream[self.graphs.inputs_of(layer)[0]][before:]
        self.change = np.concatenate([self.change, fresh]) if before else fresh.copy()

    def changed(self, stream: NDArray[Any]) -> NDArray[Any]:
        """The stream with the senders' change, which went another way."""
        return self.change

    @property
    def has_change(self) -> bool:
        """Whether a row may have sent: a receiver of one that has not reads what it would."""
        return True

    @property
    def direct(self) -> bool:
        """Whether senders change the stream itself, and not what is added to it."""
        return self.through is None or self.through in STREAM

    def _send(self, sent: NDArray[Any] | None, stage: int) -> None:
        if self.direct:
            super()._send(sent, stage)

    def step(self, layer: int) -> None:
        """Run a layer: senders, then attention and MLP, whose outputs are added to both streams."""
        sent = self._sent(layer)
        pre, mid, post = (str(point(layer)) for point in (HookPoint.ResidPre, HookPoint.ResidMid, HookPoint.ResidPost))
        outputs = [str(HookPoint.AttnOut(layer)), str(HookPoint.MlpOut(layer))]
        stream = self.stream[pre]
        for number, (begin, end, out) in enumerate(zip([pre, mid], [mid, post], outputs, strict=True)):
            self._send(sent, number)
            edits = self._received(begin, stream, self.receivers.at(2 * layer + number))
            values = self.graphs.run(self.rows(), {begin: stream}, [end, out], edits)
            sends = sent is not None and not self.direct and self.later == number + 1
            edit = Edit(out, KINDS["replace"], 0, HookPoint.parse(out).axes or ())
            added = {edit.value_input: values[out] + sent if sends else values[out]}
            self.change = self.graphs.run(self.rows(), {begin: self.change}, [end], {edit: added})[end]
            stream = values[end]
        self._send(sent, 2)
        self.stream = {self.graphs.inputs_of(layer + 1)[0]: stream}
