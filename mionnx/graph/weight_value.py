"""Numbers of a value that follows from weights alone, and of the weight of a linear map.

A weight may be turned, reshaped, cast or dequantised before it is used (tied embeddings, QDQ graphs). Nothing else is
computed: other operators are refused by their name.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.offset_products import product_of_sum, row_offsets_of
from mionnx.graph.packed_weight import attributes, gather_integers
from mionnx.graph.quantised_weight import FLOAT_NAMES, dequantise, rounded, weight_numbers

Matrix = NDArray[Any]
# Operator -> place of the weight among the inputs of a linear map. MatMulInteger is one with the scale behind it.
WEIGHT_PLACE = {
    "MatMul": 1,
    "Gemm": 1,
    "FusedMatMul": 1,
    "MatMulNBits": 1,
    "MatMulInteger": 1,
    "DynamicQuantizeMatMul": 1,
    "MatMulIntegerToFloat": 1,
    "QLinearMatMul": 3,
}
BIAS_PLACE = {"Gemm": 2, "MatMulNBits": 5, "DynamicQuantizeMatMul": 4, "MatMulIntegerToFloat": 6}


def weight_value(flow: Dataflow, folder: Path, name: str) -> Matrix:
    """Numbers of a value that follows from weights alone.

    Args:
        name: of an initializer, or of a value made from some.
    """
    node = flow.producer(name)
    if node is None or node.op_type == "Constant":
        array = onnx_file.weight(flow.proto, folder, name)
        return array if array.dtype.name in FLOAT_NAMES else weight_numbers(flow.proto, folder, name)
    if node.op_type == "DequantizeLinear":
        return _dequantised(flow, folder, node)
    if node.op_type == "Cast":
        kind = onnx.helper.tensor_dtype_to_np_dtype(attributes(node)["to"])
        return weight_value(flow, folder, node.input[0]).astype(kind)
    return _shaped(flow, folder, node, weight_value(flow, folder, node.input[0]))


def table_of(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> Matrix:
    """Numbers of the table [rows, width] that a (quantised) Gather picks rows from."""
    if node.op_type == "Gather":
        return weight_value(flow, folder, node.input[0])
    scale = onnx_file.weight(flow.proto, folder, node.input[2])
    zero = onnx_file.weight(flow.proto, folder, node.input[3]) if len(node.input) > 3 and node.input[3] else None
    data, zeros, axis, block = gather_integers(node, _as_stored(flow, folder, node.input[0]), zero, scale.shape[-1])
    offsets = row_offsets_of(flow, node)
    numbers = dequantise(data, scale, zeros, axis, block)
    if offsets is None:
        return numbers
    exact = dequantise(data, scale.astype(np.float64), zeros, axis, block)
    rows = onnx_file.weight(flow.proto, folder, offsets)
    return (exact + np.repeat(rows, block, axis=1)).astype(scale.dtype)


def linear_weight(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> Matrix:
    """Numbers of the matrix [in, out] that a linear map multiplies with."""
    matrix = weight_value(flow, folder, node.input[WEIGHT_PLACE[node.op_type]])
    turned = node.op_type == "MatMulNBits" or attributes(node).get("transB", 0)
    return matrix.T if turned else matrix


def linear_bias(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> Matrix | None:
    """The bias that a linear map itself adds; None if it adds none."""
    place = BIAS_PLACE.get(node.op_type, len(node.input))
    has_bias = len(node.input) > place and node.input[place]
    return weight_value(flow, folder, node.input[place]) if has_bias else None


def product_of(flow: Dataflow, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """The matrix product of a node: itself, or the one before its scale or shape."""
    if node.op_type in WEIGHT_PLACE and node.op_type != "MatMulInteger":
        return node
    with_offsets = product_of_sum(flow, node)
    if with_offsets is not None:
        return with_offsets
    if node.op_type == "Reshape":
        before = flow.producer(node.input[0])
        return None if before is None else product_of(flow, before)
    for entry in node.input if node.op_type == "Mul" else ():
        before = flow.producer(entry)
        before = flow.producer(before.input[0]) if before is not None and before.op_type == "Cast" else before
        if before is not None and before.op_type == "MatMulInteger":
            return before
    return None


def _dequantised(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> Matrix:
    scale, *zeros = [onnx_file.weight(flow.proto, folder, name) for name in node.input[1:] if name]
    before = flow.producer(node.input[0])
    if before is not None and before.op_type == "QuantizeLinear" and zeros:
        return rounded(weight_value(flow, folder, before.input[0]), scale, zeros[0])
    facts = attributes(node)
    integers = _as_stored(flow, folder, node.input[0])
    return dequantise(integers, scale, zeros[0] if zeros else None, facts.get("axis", 1), facts.get("block_size", 0))


def _as_stored(flow: Dataflow, folder: Path, name: str) -> Matrix:
    """A weight, turned or reshaped, without its scales."""
    node = flow.producer(name)
    if node is None or node.op_type == "Constant":
        return onnx_file.weight(flow.proto, folder, name)
    return _shaped(flow, folder, node, _as_stored(flow, folder, node.input[0]))


def _shaped(flow: Dataflow, folder: Path, node: onnx.NodeProto, array: Matrix) -> Matrix:
    if node.op_type == "Transpose":
        perm = next((list(entry.ints) for entry in node.attribute if entry.name == "perm"), None)
        return array.transpose(perm)
    if node.op_type == "Reshape":
        shape = [int(size) for size in onnx_file.weight(flow.proto, folder, node.input[1])]
        return array.reshape([array.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])
    if node.op_type == "Identity":
        return array
    raise ModelError(f"{node.output[0]} is made by {node.op_type}, where a weight was looked for")
