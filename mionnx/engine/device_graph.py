"""A graph made ready for a device: what the CPU would hand to it is computed there.

1. ONNX Runtime computes shapes on the CPU, and an exporter adds the length of the past, a shape, to the positions of a
call: one number that is copied to the device at every run, and for which CUDA graphs are refused. `Range` reads
numbers of the CPU and writes on the device, so that `Range(0, n, 1) + past` becomes `Range(past, past + n, 1)`: the
same integers.
2. Folding constants would transpose weights on the CPU whenever a session is opened, each into a copy of its own. A
weight that is an input with a default is no constant: the transposition becomes a part of the product, and the weight
can be shared.
"""

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mionnx.graph.dataflow import Dataflow

SHAPES = ("Shape", "Size", "Constant")
WHOLE = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
LARGE = 64  # numbers, above which an initializer is no part of a shape


def shape_values(graph: onnx.GraphProto, outside: frozenset[str] = frozenset()) -> frozenset[str]:
    """The values computed from shapes and constants alone, in subgraphs too."""
    constants = (tensor.name for tensor in graph.initializer if math.prod(tensor.dims) <= LARGE)
    fixed = {*outside, *constants} - {entry.name for entry in graph.input}
    shapes: set[str] = set()
    for node in graph.node:
        inner = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        for one in inner:
            shapes |= shape_values(one, frozenset(fixed))
        if not inner and (node.op_type in SHAPES or all(name in fixed for name in node.input if name)):
            fixed.update(node.output)
            shapes.update(node.output)
    return frozenset(shapes)


def move_positions(model: onnx.ModelProto) -> int:
    """Let `Range(0, n, 1) + past` be made on the device, in place.

    Returns:
        the number of sums that were.
    """
    flow, shapes = Dataflow(model), shape_values(model.graph)
    constants = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type in WHOLE}
    moved = 0
    for node in flow.nodes:
        ends = _positions(node, flow, shapes, constants) if node.op_type == "Add" else None
        if ends is None:
            continue
        counted, past = ends
        limit = helper.make_node("Add", [counted.input[1], past], [f"{node.output[0]}.limit"], f"{node.name}.limit")
        range_node = helper.make_node("Range", [past, limit.output[0], counted.input[2]], list(node.output), node.name)
        at = list(model.graph.node).index(node)
        node.CopyFrom(range_node)
        model.graph.node.insert(at, limit)
        moved += 1
    return moved


def keep_transposed(model: onnx.ModelProto) -> int:
    """Let weights that are transposed be inputs with defaults, in place.

    Returns:
        the number of these weights.
    """
    turned = {node.input[0] for node in model.graph.node if node.op_type == "Transpose"}
    inputs = {entry.name for entry in model.graph.input}
    weights = [
        tensor
        for tensor in model.graph.initializer
        if tensor.name in turned - inputs and tensor.data_location == onnx.TensorProto.EXTERNAL
    ]
    for tensor in weights:
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return len(weights)


def _positions(
    node: onnx.NodeProto, flow: Dataflow, shapes: frozenset[str], constants: dict[str, onnx.TensorProto]
) -> tuple[onnx.NodeProto, str] | None:
    """The `Range` and the past of a sum of the two; None for any other sum."""
    for first, other in (tuple(node.input), tuple(node.input)[::-1]):
        counted = flow.producer(first)
        if counted is None or counted.op_type != "Range" or not _is_scalar(flow.producer(other)) or other not in shapes:
            continue
        if [_number(counted.input[i], flow, constants) for i in (0, 2)] == [0, 1]:
            return counted, other
    return None


def _is_scalar(node: onnx.NodeProto | None) -> bool:
    """Whether a value is one dimension without axes, as torch's exporter writes it."""
    return node is not None and node.op_type == "Squeeze"


def _number(name: str, flow: Dataflow, constants: dict[str, onnx.TensorProto]) -> int | None:
    """The integer that a value is; None for any other value."""
    node = flow.producer(name)
    tensor = constants.get(name)
    if node is not None and node.op_type == "Constant" and node.attribute[0].HasField("t"):
        tensor = node.attribute[0].t
    if tensor is None or tensor.data_type not in WHOLE or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    array = numpy_helper.to_array(tensor)
    return int(array) if array.shape == () and np.issubdtype(array.dtype, np.integer) else None
