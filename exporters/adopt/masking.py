"""The mask of attention: found between queries times keys and the softmax, understood by its numbers, and replaced.

A mask of a file may know the text alone, with no padding and no past. Where it is nothing but a mask, zeros and lowest
numbers or booleans, `DecoderWriter.visible` stands for it, which heeds `attention_mask` and a past.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from exporters.adopt.flow import CONTENT_KEEPING, Flow, Origin, makers_of, rank
from exporters.adopt.operators.decoder_writer import DecoderWriter
from exporters.op_writer import move
from exporters.probe import feed_of, open_session, run
from mionnx.errors import ExportError
from mionnx.graph.dataflow import Dataflow, extract
from mionnx.graph.fused_operators import MASKED_SCORE

SHORT, LONGEST_PROBE = 64, 4096  # tokens of a text that a mask is computed for: at least, and at most
CHUNK_PROBE = (3, 5)  # tokens, past: of a mask that has to heed both
HEAD_HOOKS = (".attn.hook_q", ".attn.hook_k", ".attn.hook_v")
Seen = NDArray[np.bool_]


@dataclass(frozen=True)
class Masking:
    """A node that masks scores."""

    node: ir.Node  # an `Add`, a `Where`, or a `Mul` with ones and zeros (whose zeros another one masks)
    inner: ir.Value  # the scores before it
    operand: ir.Value  # the mask
    shown: bool | None  # the booleans of a `Where` that keep a score; None of the others

    def seen(self, value: NDArray[Any]) -> Seen | None:
        """Run the masks of a layer: the keys that `seq` queries after a past read, [batch, heads, seq, past + seq]."""
        # None if more than a mask is added to the scores.
        if self.shown is not None:
            return value.astype(np.bool_) == self.shown
        if self.node.op_type == "Mul":
            return value == 1 if np.all((value == 0) | (value == 1)) else None
        # other numbers added are biases by distance (ALiBi), which another mask would lose
        return value == 0 if np.all((value == 0) | (value <= MASKED_SCORE)) else None


def maskings(flow: Flow, layer: int, scores: ir.Value, product: ir.Node) -> list[Masking]:
    """The nodes that mask the product of queries and keys, the last first."""
    masks, value = list[Masking](), scores
    while (node := value.producer()) is not None and node is not product:
        text = flow.text(node)
        if len(text) != 1:
            raise ExportError(f"layer {layer}: {node.op_type} makes scores of {len(text)} values of text")
        value = text[0]
        others = flow.others(node)
        called = [one for one in others if flow.origin.get(one) == Origin.CALL]
        if node.op_type == "Where" and node.inputs[0] in others:
            masks.append(Masking(node, value, node.inputs[0], node.inputs[1] is value))
        elif (node.op_type == "Add" and called) or (node.op_type == "Mul" and called and (rank(called[0]) or 0) > 1):
            masks.append(Masking(node, value, called[0], None))
        elif called and node.op_type not in CONTENT_KEEPING | {"Slice", "Mul", "Div"}:
            raise ExportError(f"layer {layer}: {node.op_type} changes scores by something of the call that is no mask")
    return masks


class MaskProbe:
    """Runs the masks of a graph by themselves: those of all layers in one session for a length."""

    def __init__(
        self, proto: onnx.ModelProto, folder: Path, values: Mapping[str, np.ndarray], masks: Sequence[Masking]
    ) -> None:
        self._flow, self._folder = Dataflow(proto), folder
        self._heads = {name: value for name, value in values.items() if name.endswith(HEAD_HOOKS)}
        self._known: dict[tuple[object, ...], Seen | None] = {}
        self._names = dict.fromkeys(str(one.operand.name) for one in masks)
        self._values: dict[tuple[int, int], dict[str, np.ndarray] | None] = {}
        self.unseen: dict[int, int] = {}  # layer -> a window of the config that no probe was long enough to show

    def seen(self, masks: Sequence[Masking], seq: int, past: int) -> Seen | None:
        """Run the masks of a layer: the keys that `seq` queries after a past read, [batch, heads, seq, past + seq]."""
        # None if more than a mask is added to the scores.
        # layers share masks: each is run once for a length
        key = (*((one.operand.name, one.shown) for one in masks), seq, past)
        if key not in self._known:
            self._known[key] = self._run(masks, seq, past)
        return self._known[key]

    def _run(self, masks: Sequence[Masking], seq: int, past: int) -> Seen | None:
        names = list(dict.fromkeys(str(one.operand.name) for one in masks))
        values = self._all(seq, past)
        if values is None or not values.keys() >= {*names}:
            values = self._made(names, seq, past)
        seen = np.ones((1, 1, seq, past + seq), np.bool_)
        for one in masks:
            value = values[str(one.operand.name)]
            own = one.seen(value)
            if own is None:
                return None
            try:
                seen = seen & own
            except ValueError as error:
                raise ExportError(f"the mask {one.operand.name} has the shape {list(value.shape)}") from error
        if seen.shape[2:] != (seq, past + seq):
            raise ExportError(f"the masks come to the shape {list(seen.shape)}, for {seq} tokens after {past}")
        return seen

    def _all(self, seq: int, past: int) -> dict[str, np.ndarray] | None:
        """All masks that were named; None if one of them cannot be made for such a text."""
        if not self._names:
            return None
        if (seq, past) not in self._values:
            try:
                self._values[seq, past] = self._made([*self._names], seq, past)
            except ExportError:
                self._values[seq, past] = None
        return self._values[seq, past]

    def _made(self, names: list[str], seq: int, past: int) -> dict[str, np.ndarray]:
        # a mask may have its size from the layer's own keys: these are given, so that no layer is computed for it
        part = extract(self._flow, [*self._heads], names)
        read = {name for node in part.graph.node for name in node.input}
        inputs = [entry for entry in part.graph.input if entry.name in read]
        del part.graph.input[:]
        part.graph.input.extend(self._described(entry) for entry in inputs)
        session = open_session(part, self._folder)
        feeds = {
            entry.name: np.zeros((1, own.shape[1], seq, own.shape[3]), own.dtype)
            if (own := self._heads.get(entry.name)) is not None
            else feed_of(entry, 1, seq, past)
            for entry in session.get_inputs()
        }
        return dict(zip(names, run(session, names, feeds), strict=True))

    def _described(self, entry: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
        """An input, with the dtype and the axes of what is given for it."""
        if entry.name not in self._heads:
            return entry
        value = self._heads[entry.name]
        kind = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
        return onnx.helper.make_tensor_value_info(entry.name, kind, ["batch", value.shape[1], "seq", value.shape[3]])


def causal(seq: int, past: int, window: int | None) -> Seen:
    """Visible keys, [seq, past + seq]: a query's own and earlier ones, in a window the last."""
    distance = np.arange(past, past + seq)[:, None] - np.arange(past + seq)
    return (distance >= 0) & (distance < (window or distance.max(initial=0) + 1))


def window_of(
    probe: MaskProbe, masks: Sequence[Masking], window: int | None, layer: int, longest: int = LONGEST_PROBE
) -> int | None:
    """The window of a layer's mask: that of the config or none, whichever its numbers are."""
    # longer than the window, so that its edge shows
    length = min(max(2 * (window or 0), SHORT) + 3, LONGEST_PROBE + 3, longest)
    seen = probe.seen(masks, length, 0)
    if seen is None:
        raise ExportError(f"layer {layer}: what is added to the scores is more than a mask: {masks[0].operand.name}")
    for candidate in (window, None):
        if np.all(seen == causal(length, 0, candidate)):
            return candidate if window is None or window < length else _far_window(probe, masks, window, layer)
    if np.all(seen):  # made for one token a call, which reads all keys
        return window
    raise ExportError(f"layer {layer}: the mask {masks[0].operand.name} is not causal, and has no window of {window}")


def _far_window(probe: MaskProbe, masks: Sequence[Masking], window: int, layer: int) -> int | None:
    """The window of one token behind a past as long as the window of the config."""
    try:
        seen = probe.seen(masks, 1, window)
    except ExportError:  # made for whole texts: so long a one would take gigabytes
        seen = None
    if seen is None or not np.all(seen[..., 1:]):
        probe.unseen[layer] = window
        return window
    return None if np.all(seen) else window


def serves_chunks(probe: MaskProbe, masks: Sequence[Masking], window: int | None) -> bool:
    """Whether masks are right for several tokens after a past; more than a mask is taken to be right."""
    seq, past = CHUNK_PROBE
    try:
        seen = probe.seen(masks, seq, past)
    except ExportError:
        return False
    return seen is None or any(np.all(seen == causal(seq, past, one)) for one in (window, None))


def replace_masks(
    op: DecoderWriter,
    masks: Sequence[Masking],
    scores: ir.Value,
    window: int | None,
    kind: ir.DataType,
    adds: bool = False,
) -> None:
    """Mask scores by `DecoderWriter.visible` instead of their own masks; a fused operator that adds one reads it."""
    bare = scores
    for one in masks:
        if one.node.outputs[0] is scores:
            bare = one.inner
        else:
            ir.convenience.replace_all_uses_with(one.node.outputs[0], one.inner)
            bare = one.inner if bare is one.node.outputs[0] else bare
    seen = op.visible(window)
    if adds:
        _add_mask(op, seen, kind)
    # the lowest number, not -inf: a row of padding alone would be NaN
    lowest = op.number(float(np.finfo(kind.numpy()).min), kind)
    masked = op.Where(seen, bare, lowest)
    reads = [(node, place) for node, place in scores.uses() if node is not masked.producer()]
    masked.type, masked.shape, name = scores.type, scores.shape, scores.name
    scores.name = None
    masked.name = name
    move(reads, masked)


def _add_mask(op: DecoderWriter, seen: ir.Value, kind: ir.DataType) -> None:
    """Make an added mask unless there is one: 0 for a key that is seen, else a number near the lowest of its dtype."""
    masks = [node for node, place in seen.uses() if place == 0 and node.op_type == "Where"]
    if not any(one.inputs[1].is_initializer() for one in masks):
        # half of the lowest: added to a score it must not go beyond the range
        op.Where(seen, op.number(0, kind), op.number(float(np.finfo(kind.numpy()).min) / 2, kind))


def sweep_away(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Remove unread nodes, and those above them that are read by no others."""
    outputs, waiting = set(graph.outputs), list(nodes)
    while waiting:
        node = waiting.pop()
        if node.graph is None or any(value.uses() or value in outputs for value in node.outputs):
            continue
        above = makers_of(node)
        graph.remove(node, safe=True)
        waiting += [one for one in above if one is not None]
