"""ONNX Runtime's operators on weights in blocks as standard ones: products and lookups with the numbers themselves.

MatMulNBits becomes MatMul, and Add where it has a bias; GatherBlockQuantized becomes Gather. For runtimes that have
standard operators only: the weights take the memory of floats.
"""

from pathlib import Path

import numpy as np
import onnx

from mionnx.graph.dataflow import Dataflow
from mionnx.graph.matrices import Matrix
from mionnx.graph.weight_value import linear_weight, table_of

PACKED_OPERATORS = ("MatMulNBits", "GatherBlockQuantized")
BIAS = 5  # place of a MatMulNBits' bias


def in_floats(proto: onnx.ModelProto, folder: Path) -> None:
    """Exchange the operators on blocks of a graph, in place."""
    flow, made, numbers = Dataflow(proto), list[onnx.NodeProto](), dict[str, Matrix]()
    for node in proto.graph.node:
        if node.op_type not in PACKED_OPERATORS:
            made.append(node)
            continue
        lookup = node.op_type == "GatherBlockQuantized"
        weight = f"{node.input[0 if lookup else 1]}_in_floats"
        if weight not in numbers:
            alone = _alone(flow, node)
            numbers[weight] = table_of(alone, folder, node) if lookup else linear_weight(alone, folder, node)
        made += _lookup(node, weight) if lookup else _product(node, weight)
    if not numbers:
        return
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in made]
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    read = {name for node in kept for name in node.input} | {value.name for value in proto.graph.output}
    initializers = [tensor for tensor in proto.graph.initializer if tensor.name in read or not tensor.dims]
    initializers = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in initializers]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(initializers)
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in numbers.items()
    )


def _alone(flow: Dataflow, node: onnx.NodeProto) -> Dataflow:
    """A node with its weights alone.

    Offsets that the graph adds to its product, and another order of its inputs, stay in the graph.
    """
    proto = onnx.ModelProto()
    proto.graph.node.extend(flow.nodes[i] for i in sorted(flow.ancestors(node.input[2:])))
    proto.graph.node.append(node)
    read = {name for one in proto.graph.node for name in one.input}
    proto.graph.initializer.extend(tensor for tensor in flow.proto.graph.initializer if tensor.name in read)
    return Dataflow(proto)


def _lookup(node: onnx.NodeProto, table: str) -> list[onnx.NodeProto]:
    return [onnx.helper.make_node("Gather", [table, node.input[1]], list(node.output), node.name, axis=0)]


def _product(node: onnx.NodeProto, weight: str) -> list[onnx.NodeProto]:
    bias = node.input[BIAS] if len(node.input) > BIAS else ""
    output = f"{node.output[0]}_without_bias" if bias else node.output[0]
    product = onnx.helper.make_node("MatMul", [node.input[0], weight], [output], node.name)
    more = [onnx.helper.make_node("Add", [output, bias], list(node.output), f"{node.name}_bias")] if bias else []
    return [product, *more]
