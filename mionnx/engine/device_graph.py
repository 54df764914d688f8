"""A graph made ready for a device: what the CPU would hand to it is computed there."""

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mionnx.graph.dataflow import Dataflow

SHAPES = ("Shape", "Size", "Constant")
INTEGERS = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
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
    """Let `Range(0, n, 1) + past` be made on the device, in place; return the number of such sums."""
    # ONNX Runtime computes shapes on the CPU, the length of the past among them: one number that is copied to the
    # device at every run, and for which CUDA graphs are refused. `Range` reads numbers of the CPU and writes on the
    # device: `Range(past, past + n, 1)` are the same integers.
    flow, shapes = Dataflow(model), shape_values(model.graph)
    constants = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type in INTEGERS}
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
    """Let weights that are transposed be inputs with defaults, in place; return their number."""
    # Folding constants would transpose them on the CPU whenever a session is opened, each into a copy of its own. An
    # input is no constant: the transposition becomes a part of the product, and the weight can be shared.
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
        counted, length = flow.producer(first), flow.producer(other)
        if counted is None or counted.op_type != "Range" or length is None or other not in shapes:
            continue
        # torch's exporter writes one dimension without axes as a Squeeze
        if length.op_type == "Squeeze" and [_number(counted.input[i], flow, constants) for i in (0, 2)] == [0, 1]:
            return counted, other
    return None


def _number(name: str, flow: Dataflow, constants: dict[str, onnx.TensorProto]) -> int | None:
    """The integer that a value is; None for any other value."""
    node = flow.producer(name)
    tensor = constants.get(name)
    if node is not None and node.op_type == "Constant" and node.attribute[0].HasField("t"):
        tensor = node.attribute[0].t
    if tensor is None or tensor.data_type not in INTEGERS or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    array = numpy_helper.to_array(tensor)
    return int(array) if array.shape == () and np.issubdtype(array.dtype, np.integer) else None
