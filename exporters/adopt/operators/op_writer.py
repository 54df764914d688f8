"""`OpWriter`: standard operators as calls, `op.Add(a, b)`, on an onnx_ir graph."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike

from exporters.adopt.flow import static
from exporters.adopt.value_types import set_types

TOKENS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"


class OpWriter:
    """Writes nodes; each operator is a method, inputs positional, attributes keywords.

    Attributes:
        nodes: the nodes written since `begin`, to be placed before the operator that they stand for.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model, self.graph = model, model.graph
        self.inputs = {value.name: value for value in model.graph.inputs}
        self.nodes: list[ir.Node] = []
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._visible: dict[int | None, ir.Value] = {}

    def begin(self) -> None:
        """Begin another operator."""
        self.nodes = []

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if not operator[:1].isupper():
            raise AttributeError(operator)

        def write(*inputs: ir.Value | None, outputs: int = 1, **attributes: Any) -> Any:
            node = ir.node(operator, list(inputs), attributes=attributes, num_outputs=outputs)
            set_types(node, self.model.opset_imports)
            self.nodes.append(node)
            return node.outputs[0] if outputs == 1 else list(node.outputs)

        return write

    def ints(self, values: Sequence[int] | int) -> ir.Value:
        """An int64 constant."""
        return self.constant(values, np.int64)

    def number(self, value: float, kind: ir.DataType) -> ir.Value:
        """A scalar constant of a dtype."""
        return self.constant(value, kind.numpy())

    def constant(self, value: Any, dtype: DTypeLike) -> ir.Value:
        """A constant; equal ones are one initializer."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            held = self.graph.initializers
            name = next(name for number in count() if (name := f"adopted.constant.{number}") not in held)
            kind, shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
            made = ir.Value(name=name, type=kind, shape=shape, const_value=ir.tensor(array, name=name))
            self.graph.register_initializer(made)
            self._constants[key] = made
        return self._constants[key]

    def input(self, name: str, axes: Sequence[str]) -> ir.Value:
        """An integer input of the graph by its name, added if need be."""
        if name not in self.inputs:
            made = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(axes))
            self.graph.inputs.append(made)
            self.inputs[name] = made
        return self.inputs[name]

    def positions(self) -> ir.Value:
        """The positions of the call's tokens, [batch, seq]."""
        return self.input(POSITIONS, ["batch", "seq"])

    def split(self, x: ir.Value, sizes: Sequence[int], axis: int = -1) -> list[ir.Value]:
        """Parts of a value along an axis."""
        return self.Split(x, self.ints(sizes), axis=axis, outputs=len(sizes))

    def mean(self, x: ir.Value) -> ir.Value:
        """The mean over the last axis, which stays."""
        return self.ReduceMean(x, self.ints([-1]), keepdims=1)

    def heads(self, x: ir.Value, count: int, width: int) -> ir.Value:
        """[batch, seq, count * width] -> [batch, count, seq, width]; count may be -1."""
        return self.Transpose(self.Reshape(x, self.ints([0, 0, count, width])), perm=[0, 2, 1, 3])

    def merged(self, z: ir.Value, size: int) -> ir.Value:
        """[batch, heads, seq, width] -> [batch, seq, size]."""
        return self.Reshape(self.Transpose(z, perm=[0, 2, 1, 3]), self.ints([0, 0, size]))

    def repeated(self, x: ir.Value, groups: int, heads: int, width: int) -> ir.Value:
        """Key/value heads, each repeated for the query heads that read it."""
        if groups == 1:
            return x
        wide = self.Expand(self.Unsqueeze(x, self.ints([2])), self.ints([1, 1, groups, 1, 1]))
        return self.Reshape(wide, self.ints([0, heads, -1, width]))

    def visible(self, window: int | None) -> ir.Value:
        """[batch, 1, seq, total] bool: the keys that a query reads, padding and later ones left out."""
        if window not in self._visible:
            mask, tokens = self.input(MASK, ["batch", "total"]), self.inputs[TOKENS]
            total, seq = self._length(mask), self._length(tokens)
            keys = self.Unsqueeze(self.Range(self.ints(0), total, self.ints(1)), self.ints([0]))
            queries = self.Unsqueeze(self.Range(self.Sub(total, seq), total, self.ints(1)), self.ints([1]))
            seen = self.LessOrEqual(keys, queries)
            if window is not None:
                seen = self.And(seen, self.Greater(keys, self.Sub(queries, self.ints(window))))
            real = self.Unsqueeze(self.Cast(mask, to=int(ir.DataType.BOOL)), self.ints([1, 2]))
            self._visible[window] = self.And(self.Unsqueeze(seen, self.ints([0, 1])), real)
        return self._visible[window]

    def _length(self, value: ir.Value) -> ir.Value:
        return self.Squeeze(self.Slice(self.Shape(value), self.ints([1]), self.ints([2])), self.ints([0]))


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
