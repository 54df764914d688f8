"""`Facts`: element types, shapes, constants and makers of the values of a graph, as far as they are written down."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from mionnx.errors import GradientError
from mionnx.graph.builder import OUTPUT_DTYPES

DIFFERENTIABLE = frozenset((TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16))
NARROW_FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
Dims = tuple[int | str, ...]  # numbers, or names of lengths that the run decides


def attributes(node: NodeProto) -> dict[str, Any]:
    """A node's attributes by name; texts as `str`."""
    values = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


class NodeFacts:
    """Known types, shapes and constants of a graph's values, and of the graphs around it.

    Attributes:
        types: value -> ONNX's number of its element type.
        shapes: value -> its axes; lengths that are not known have names of their own.
        constants: value -> its tensor, where that lies in the graph.
        makers: value -> the node that makes it.
    """

    def __init__(self, graph: GraphProto | None = None, outer: "NodeFacts | None" = None) -> None:
        self.types: dict[str, int] = dict(outer.types) if outer else {}
        self.shapes: dict[str, Dims] = dict(outer.shapes) if outer else {}
        self.constants: dict[str, TensorProto] = dict(outer.constants) if outer else {}
        self.makers: dict[str, NodeProto] = dict(outer.makers) if outer else {}
        if graph is not None:
            self._read(graph)

    def _read(self, graph: GraphProto) -> None:
        for tensor in graph.initializer:
            self.types[tensor.name], self.shapes[tensor.name] = tensor.data_type, tuple(tensor.dims)
            if tensor.data_location != TensorProto.EXTERNAL:
                self.constants[tensor.name] = tensor
        self.tell([*graph.value_info, *graph.input, *graph.output])
        self.follow(graph.node)

    def tell(self, values: Iterable[onnx.ValueInfoProto]) -> None:
        """Take over what is declared of some values."""
        for value in values:
            kind = value.type.tensor_type
            if kind.elem_type:
                self.types[value.name] = kind.elem_type
            if kind.HasField("shape"):
                self.shapes[value.name] = tuple(_dims(value.name, kind.shape))

    def follow(self, nodes: Iterable[NodeProto]) -> None:
        """Take over the makers of some nodes' outputs, and their types where none is declared."""
        for node in nodes:
            self.makers |= dict.fromkeys(node.output, node)
            for n, output in enumerate(node.output):
                if output not in self.types and (kind := self.type_of(node, n)):
                    self.types[output] = kind
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
                self.shapes.setdefault(node.output[0], tuple(node.attribute[0].t.dims))

    def type_of(self, node: NodeProto, output: int = 0) -> int | None:
        """The element type of a node's output; None if it cannot be told from its inputs."""
        if (kind := OUTPUT_DTYPES.get(node.op_type)) is not None or (node.op_type == "TopK" and output):
            return int(helper.np_dtype_to_tensor_dtype(np.dtype(kind or np.int64)))
        if node.op_type == "Cast":
            return int(attributes(node)["to"])
        if node.op_type in ("Constant", "ConstantOfShape"):
            return next((one.t.data_type for one in node.attribute if one.name == "value"), TensorProto.FLOAT)
        sources = node.input[{"Where": 1, "CastLike": 1, "DequantizeLinear": 1}.get(node.op_type, 0) :]
        return next((self.types[name] for name in sources if name in self.types), None)

    def type(self, name: str) -> int:
        """The element type of a value; float32 where nothing tells."""
        return self.types.get(name, TensorProto.FLOAT)

    def is_float(self, name: str) -> bool:
        """Whether a value can have a gradient."""
        return self.type(name) in DIFFERENTIABLE

    def number(self, name: str) -> NDArray[Any] | None:
        """The numbers of a constant that lies in the graph; None of any other value."""
        return numpy_helper.to_array(self.constants[name]) if name in self.constants else None

    def rank(self, name: str) -> int:
        """The number of axes of a value.

        Raises:
            GradientError: it is not written down.
        """
        shape = self.shapes.get(name)
        if shape is None:
            raise GradientError(f"the number of axes of {name} is not written down in the graph")
        return len(shape)


def _dims(name: str, shape: onnx.TensorShapeProto) -> Iterator[int | str]:
    for i, dim in enumerate(shape.dim):
        yield dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"?{name}.{i}"
