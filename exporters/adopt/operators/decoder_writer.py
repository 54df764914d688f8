"""`DecoderWriter`: writes the nodes of decoders, with what they share: the inputs of the call, heads, the mask."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from exporters.adopt.flow import static
from exporters.op_writer import OpWriter
from exporters.recurrence.columns import COLUMNS
from exporters.recurrence.expand import RECURRENCE_DOMAIN

END = np.iinfo(np.int64).max  # of an axis
STATE_KIND = ir.DataType.FLOAT  # of states that sum over a text, in models of any dtype
TOKEN_INPUT, MASK_INPUT, POSITIONS = "input_ids", "attention_mask", "position_ids"


class DecoderWriter(OpWriter):
    """Writes nodes of a decoder: those since `begin` are placed before the operator that they stand for."""

    prefix, shapes = "adopted.constant", False

    def __init__(self, model: ir.Model) -> None:
        super().__init__(model.graph)
        self.inputs = {value.name: value for value in model.graph.inputs}
        self._visible: dict[int | None, ir.Value] = {}
        self._real: ir.Value | None = None

    def begin(self) -> None:
        """Begin another operator."""
        self.nodes = []

    def input(self, name: str, axes: Sequence[str]) -> ir.Value:
        """An integer input of the graph by its name, added if need be."""
        if name not in self.inputs:
            value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(axes))
            self.graph.inputs.append(value)
            self.inputs[name] = value
        return self.inputs[name]

    def positions(self) -> ir.Value:
        """The positions of the call's tokens, [batch, seq]."""
        return self.input(POSITIONS, ["batch", "seq"])

    def split(self, x: ir.Value, sizes: Sequence[int], axis: int = -1) -> list[ir.Value]:
        """Parts of a value along an axis."""
        return self.Split(x, sizes, axis=axis, outputs=len(sizes))

    def heads(self, x: ir.Value, count: int, width: int) -> ir.Value:
        """[batch, seq, count * width] -> [batch, count, seq, width]; count may be -1."""
        return self.Transpose(self.Reshape(x, [0, 0, count, width]), perm=[0, 2, 1, 3])

    def merged(self, z: ir.Value, heads: int, width: int) -> ir.Value:
        """[batch, heads, seq, width] -> [batch, seq, heads * width]."""
        turned = self.Transpose(z, perm=[0, 2, 1, 3])
        turned.shape = ir.Shape(["batch", "seq", heads, width])
        return self.Reshape(turned, [0, 0, heads * width])

    def repeated(self, x: ir.Value, groups: int, heads: int, width: int) -> ir.Value:
        """Key/value heads, each repeated for the query heads that read it."""
        if groups == 1:
            return x
        wide = self.Expand(self.Unsqueeze(x, [2]), [1, 1, groups, 1, 1])
        return self.Reshape(wide, [0, heads, -1, width])

    def visible(self, window: int | None) -> ir.Value:
        """[batch, 1, seq, total] bool: the keys that a query reads, padding and later ones left out."""
        if window not in self._visible:  # made once, for all layers of a window
            mask, tokens = self.input(MASK_INPUT, ["batch", "total"]), self.inputs[TOKEN_INPUT]
            total, seq = self._length(mask), self._length(tokens)
            keys = self.Unsqueeze(self.Range(0, total, 1), [0])
            # columns count padding: a query's own column is total - seq + its place, whatever its position
            queries = self.Unsqueeze(self.Range(self.Sub(total, seq), total, 1), [1])
            seen = self.LessOrEqual(keys, queries)
            if window is not None:
                seen = self.And(seen, self.Greater(keys, self.Sub(queries, window)))
            real = self.Unsqueeze(self.Cast(mask, to=int(ir.DataType.BOOL)), [1, 2])
            self._visible[window] = self.And(self.Unsqueeze(seen, [0, 1]), real)
        return self._visible[window]

    def real(self) -> ir.Value:
        """[batch, seq] int64: 1 at the call's tokens, 0 at padding."""
        if self._real is None:  # made once, for all layers
            mask, tokens = self.input(MASK_INPUT, ["batch", "total"]), self.inputs[TOKEN_INPUT]
            own = self.Neg(self.Shape(tokens, start=1, end=2))
            self._real = self.Slice(mask, own, [END], [1])
            self._real.shape = ir.Shape(["batch", "seq"])
        return self._real

    def marked(
        self, name: str, inputs: Sequence[ir.Value], shapes: Sequence[Sequence[int | None]], **sizes: int
    ) -> ir.Node:
        """A node that `exporters.recurrence` makes operators of, once it has a layer: its outputs by their shapes."""
        kind = ir.DataType.INT64 if name == COLUMNS else STATE_KIND
        node = ir.node(name, inputs, domain=RECURRENCE_DOMAIN, attributes=sizes, num_outputs=len(shapes))
        for value, shape in zip(node.outputs, shapes, strict=True):
            value.type, value.shape = ir.TensorType(kind), ir.Shape(shape)
        self.nodes.append(node)
        return node

    def _length(self, value: ir.Value) -> ir.Value:
        return self.Squeeze(self.Slice(self.Shape(value), [1], [2]), [0])


def kind_of(*values: ir.Value | None) -> ir.DataType:
    """The dtype of the first of some values that is known to hold fractions; float32 if none is."""
    for value in values:
        if value is not None and value.dtype is not None and value.dtype.is_floating_point():
            return value.dtype
    return ir.DataType.FLOAT


def input_at(node: ir.Node, place: int) -> ir.Value | None:
    """An input of a node; None where it is left out."""
    return node.inputs[place] if place < len(node.inputs) else None


def width_of(*values: ir.Value | None) -> int | None:
    """The size of the last axis of the first value of which it is known."""
    return next((size for value in values if value is not None and (size := static(value, -1)) is not None), None)
