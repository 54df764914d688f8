"""`OpWriter`: standard operators as calls, `op.Add(a, b)`, on an onnx_ir graph; nodes between others."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike

from exporters.value_types import set_types


class OpWriter:
    """Writes nodes: each operator is a method, inputs positional, attributes keywords.

    Numbers and lists among the inputs become constants: whole ones of int64, fractions of the dtype of the first value
    beside them.
    """

    prefix = "constant"  # begins the names of constants
    shapes = True  # whether shapes are inferred beside dtypes

    def __init__(self, graph: ir.Graph, constants: dict[tuple[Any, ...], ir.Value] | None = None) -> None:
        self.graph = graph  # takes the constants, those of subgraphs too
        self.nodes: list[ir.Node] = []  # what was written, in no graph yet
        self._constants: dict[tuple[Any, ...], ir.Value] = {} if constants is None else constants

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if not operator[:1].isupper():
            raise AttributeError(operator)

        def write(*inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
            node = ir.node(operator, self._values(inputs), attributes=attributes, num_outputs=outputs)
            set_types(node, self.graph.opset_imports, shapes=self.shapes)
            self.nodes.append(node)
            return node.outputs[0] if outputs == 1 else list(node.outputs)

        return write

    def _values(self, inputs: Sequence[Any]) -> list[ir.Value | None]:
        values = [one for one in inputs if isinstance(one, ir.Value)]
        kind = values[0].dtype if values else None

        def value(one: Any) -> ir.Value | None:
            if one is None or isinstance(one, ir.Value):
                return one
            integers = np.asarray(one).dtype.kind in "iu"
            return self.constant(one, np.int64 if integers or kind is None else kind.numpy())

        return [value(one) for one in inputs]

    def constant(self, value: Any, dtype: DTypeLike, name: str | None = None) -> ir.Value:
        """A constant of the graph; equal ones of one name, or of none, are one initializer."""
        array = np.asarray(value, dtype)
        key = (name, array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            taken = self.graph.initializers
            name = name or next(name for number in count() if (name := f"{self.prefix}.{number}") not in taken)
            kind, shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
            initializer = ir.Value(name=name, type=kind, shape=shape, const_value=ir.tensor(array, name=name))
            self.graph.register_initializer(initializer)
            self._constants[key] = initializer
        return self._constants[key]

    def number(self, value: float, kind: ir.DataType) -> ir.Value:
        """A scalar constant of a dtype."""
        return self.constant(value, kind.numpy())

    def subgraph(
        self, name: str, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], write: Callable[..., Any]
    ) -> ir.Graph:
        """A branch or the body of a loop, for an attribute; `write` makes its outputs from a writer and its inputs."""
        op = OpWriter(self.graph, self._constants)  # constants go to the outermost graph, shared by all bodies
        values = list(write(op, *inputs))
        for value, declared in zip(values, outputs, strict=True):
            value.name, value.type, value.shape = declared.name, declared.type, declared.shape or value.shape
        return ir.Graph(inputs, values, nodes=op.nodes, opset_imports=dict(self.graph.opset_imports), name=name)


def node_like(operator: str, inputs: Sequence[ir.Value], like: ir.Value, **attributes: Any) -> ir.Node:
    """A node whose output has the dtype and the shape of a value."""
    node = ir.node(operator, inputs, attributes=attributes)
    node.outputs[0].type, node.outputs[0].shape = like.type, like.shape
    return node


def move(reads: Iterable[tuple[ir.Node, int]], value: ir.Value) -> None:
    """Let nodes read a value, each in the place of one of its inputs."""
    for node, place in list(reads):  # a list: reads of a value change while nodes get others
        node.replace_input_with(place, value)
