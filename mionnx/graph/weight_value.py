"""Numbers of a value that follows from weights alone, of a quantised weight, and of the weight of a linear map.

A weight may be turned, reshaped, cast or dequantised before it is used (tied embeddings, QDQ graphs). Nothing else is
computed: other operators are refused by their name.

A quantised weight w is integers q with scales s and zero points z, w = (q - z) s; where s and z have one number, it
holds for all of w, where they are [size of an axis], for each slice of it, and where they have the rank of w, for each
block. The scales are found by what the graph does with the integers:

Cast and Mul       the other factor of Mul
DequantizeLinear   its own inputs; before an operator (QDQ), or behind the rows that a Gather has picked
QLinearMatMul      its own inputs
MatMulInteger      the scale that its result is multiplied with, beside that of its first input (dynamic quantisation)
DynamicQuantizeMatMul, MatMulIntegerToFloat, MatMulNBits, GatherBlockQuantized   their own inputs

Any other weight of integers is refused by its name and dtype: its numbers cannot be told from the integers.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.offset_products import product_of_sum, row_offsets_of
from mionnx.graph.packed_weight import gather_integers, matmul_nbits

Matrix = NDArray[Any]
QUANTISED = "_quantized"  # what ONNX Runtime's quantiser puts behind the name of a weight
FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")
# Operator -> places of its weight's scales and zero points among its inputs.
SCALE_INPUTS = {"DynamicQuantizeMatMul": (2, 3), "MatMulIntegerToFloat": (3, 5)}
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
PACKED_OPERATORS = ("MatMulNBits", "GatherBlockQuantized")


def weight_value(flow: Dataflow, folder: Path, name: str) -> Matrix:
    """Numbers of an initializer, or of a value made from some."""
    node = flow.producer(name)
    if node is None or node.op_type == "Constant":
        return _weight_numbers(flow, folder, name)
    if node.op_type == "DequantizeLinear":
        return _dequantised(flow, folder, node)
    if node.op_type == "Cast":
        kind = onnx.helper.tensor_dtype_to_np_dtype(attributes(node)["to"])
        return weight_value(flow, folder, node.input[0]).astype(kind)
    return _shaped(flow, folder, node, weight_value(flow, folder, node.input[0]))


def weight_numbers(proto: onnx.ModelProto, folder: Path, name: str) -> Matrix:
    """The numbers of a weight, by its name before ONNX Runtime's quantiser renamed it."""
    flow = Dataflow(proto)
    if name in flow.initializers:
        return _weight_numbers(flow, folder, name)
    if name + QUANTISED in flow.initializers:
        return _weight_numbers(flow, folder, name + QUANTISED)
    maker = flow.producer(name)
    if maker is not None and maker.op_type == "DequantizeLinear":
        return _dequantised(flow, folder, maker)
    return _weight_numbers(flow, folder, name)


def _weight_numbers(flow: Dataflow, folder: Path, name: str) -> Matrix:
    array = onnx_file.weight(flow.proto, folder, name)
    return array if array.dtype.name in FLOAT_NAMES else _scaled(flow, folder, name, array)


def dequantise(
    integers: Matrix, scale: Matrix, zero: Matrix | None = None, axis: int = 1, block_size: int = 0
) -> Matrix:
    """Numbers of quantised integers, (q - z) s, as ONNX' DequantizeLinear defines it: shape of q, dtype of s."""
    # s is one number; [size of the axis]; or of the rank of q, with an entry for each block of `block_size` along the
    # axis. z has the shape of s, and is 0 if left out.

    def spread(values: Matrix) -> NDArray[np.float64]:
        numbers = np.asarray(values).astype(np.float64)
        if numbers.size == 1:
            return numbers.reshape(())
        if block_size:
            blocks = np.repeat(numbers, block_size, axis=axis)
            return np.take(blocks, range(integers.shape[axis]), axis=axis)  # the last block may end beyond the axis
        shape = [1] * integers.ndim
        shape[axis] = -1
        return numbers.reshape(shape)

    try:
        shifted = integers.astype(np.float64) - (0 if zero is None else spread(zero))
        return np.broadcast_to((shifted * spread(scale)).astype(scale.dtype), integers.shape)
    except (ValueError, IndexError) as error:
        raise ModelError(
            f"scales {list(scale.shape)} along axis {axis} do not fit quantised numbers {list(integers.shape)}: {error}"
        ) from error


def rounded(numbers: Matrix, scale: Matrix, zero: Matrix) -> Matrix:
    """Numbers after QuantizeLinear and DequantizeLinear of one scale."""
    if scale.size != 1 or zero.dtype.kind not in "iu":
        raise ModelError(
            f"a computed weight is rounded with scales {list(scale.shape)} to {zero.dtype}: one is expected"
        )
    limits = np.iinfo(zero.dtype)
    # to even at a half, as QuantizeLinear rounds
    steps = np.rint(numbers / scale.reshape(())).astype(np.float64) + float(zero.reshape(()))
    return dequantise(np.clip(steps, limits.min, limits.max), scale, zero)


def _scaled(flow: Dataflow, folder: Path, name: str, integers: Matrix) -> Matrix:
    """Integers with the scales that their first known reader gives them."""
    columns = integers.ndim - 1  # of a second factor [in, out], with one scale or one for each column
    for node in flow.readers(name):
        place = list(node.input).index(name) if name in node.input else -1
        if node.op_type == "DequantizeLinear" and place == 0:
            return _dequantised(flow, folder, node)
        if node.op_type == "Gather" and place == 0:
            following = [one for one in flow.readers(node.output[0]) if one.op_type == "DequantizeLinear"]
            scale = _input(flow, folder, following[0], 1) if following else None
            if scale is not None and scale.size == 1:  # rows of one scale: it holds for the whole table
                return dequantise(integers, scale, _input(flow, folder, following[0], 2))
            if following:  # rows of several scales: none of them holds for the table
                break
        if node.op_type == "Cast" and (factor := _factor_of(flow, node)):
            scales = onnx_file.weight(flow.proto, folder, factor)
            return (integers.astype(scales.dtype) * scales).astype(scales.dtype)
        if node.op_type == "QLinearMatMul" and place == 3:
            scale, zero = (onnx_file.weight(flow.proto, folder, one) for one in node.input[4:6])
            return dequantise(integers, scale, zero, columns)
        if place == 1 and node.op_type in SCALE_INPUTS:
            scale, zeros = (_input(flow, folder, node, at) for at in SCALE_INPUTS[node.op_type])
            return dequantise(integers, np.asarray(scale), zeros, columns)
        if node.op_type == "MatMulNBits" and place == 1:
            return matmul_nbits(flow, folder, node)
        if node.op_type == "MatMulInteger" and place == 1 and (factor := _scale_of_product(flow, node.output[0])):
            return dequantise(
                integers, onnx_file.weight(flow.proto, folder, factor), _input(flow, folder, node, 3), columns
            )
    raise ModelError(
        f"the weight {name!r} is quantised, {integers.dtype} {list(integers.shape)}, and the graph does not say its "
        "scales where they are known: DequantizeLinear, QLinearMatMul, MatMulInteger, MatMulNBits. Open the model "
        "that it was quantised from"
    )


def _factor_of(flow: Dataflow, cast: onnx.NodeProto) -> str | None:
    """The scale that integers are multiplied with behind their cast; None where it is no weight."""
    for user in flow.readers(cast.output[0]):
        if user.op_type == "Mul":
            return next((one for one in user.input if one in flow.initializers), None)
    return None


def _scale_of_product(flow: Dataflow, value: str) -> str | None:
    """The weight's scale b in `Cast(MatMulInteger) * (a * b)`, a being the activation's."""
    casts = [value]  # grows while it is gone through
    for name in casts:
        for node in flow.readers(name):
            if node.op_type == "Cast":
                casts += node.output
            elif node.op_type == "Mul":
                makers = {other: flow.producer(other) for other in node.input if other != name}
                factors = [
                    one
                    for other, maker in makers.items()
                    for one in (maker.input if maker is not None and maker.op_type == "Mul" else [other])
                ]
                scales = [one for one in factors if one in flow.initializers]
                if len(scales) == 1:
                    return scales[0]
    return None


def _input(flow: Dataflow, folder: Path, node: onnx.NodeProto, place: int) -> Matrix | None:
    name = node.input[place] if place < len(node.input) else ""
    return onnx_file.weight(flow.proto, folder, name) if name else None


def table_of(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> Matrix:
    """Numbers of the table [rows, width] that a (quantised) Gather picks rows from."""
    if node.op_type == "Gather":
        return weight_value(flow, folder, node.input[0])
    scale, zero = onnx_file.weight(flow.proto, folder, node.input[2]), _input(flow, folder, node, 3)
    data, zeros, axis, block = gather_integers(node, _as_stored(flow, folder, node.input[0]), zero, scale.shape[-1])
    offsets = row_offsets_of(flow, node)
    if offsets is None:
        return dequantise(data, scale, zeros, axis, block)
    # offsets are added before the one rounding, as the product's own blocks do it
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
    # MatMulInteger: its product is a number only with the scale behind it, so the Mul is the linear map
    for entry in node.input if node.op_type == "Mul" else ():
        before = flow.producer(entry)
        before = flow.producer(before.input[0]) if before is not None and before.op_type == "Cast" else before
        if before is not None and before.op_type == "MatMulInteger":
            return before
    return None


def _dequantised(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> Matrix:
    scale, zero = onnx_file.weight(flow.proto, folder, node.input[1]), _input(flow, folder, node, 2)
    before = flow.producer(node.input[0])
    if before is not None and before.op_type == "QuantizeLinear" and zero is not None:
        return rounded(weight_value(flow, folder, before.input[0]), scale, zero)
    settings = attributes(node)
    integers = _as_stored(flow, folder, node.input[0])
    return dequantise(integers, scale, zero, settings.get("axis", 1), settings.get("block_size", 0))


def _as_stored(flow: Dataflow, folder: Path, name: str) -> Matrix:
    """A weight, turned or reshaped, without its scales."""
    node = flow.producer(name)
    if node is None or node.op_type == "Constant":
        return onnx_file.weight(flow.proto, folder, name)
    return _shaped(flow, folder, node, _as_stored(flow, folder, node.input[0]))


def _shaped(flow: Dataflow, folder: Path, node: onnx.NodeProto, array: Matrix) -> Matrix:
    if node.op_type == "Transpose":
        return array.transpose(attributes(node).get("perm"))
    if node.op_type == "Reshape":
        shape = [int(size) for size in onnx_file.weight(flow.proto, folder, node.input[1])]
        # ONNX: 0 keeps the input's length
        return array.reshape([array.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])
    if node.op_type == "Identity":
        return array
    raise ModelError(f"{node.output[0]} is made by {node.op_type}, where a weight was looked for")


def in_floats(proto: onnx.ModelProto, folder: Path) -> None:
    """Exchange operators on weights in blocks for standard ones on their numbers, in place."""
    # MatMulNBits becomes MatMul, and Add where it has a bias; GatherBlockQuantized becomes Gather. For runtimes that
    # have standard operators only: the weights take the memory of floats.
    origin = onnx.ModelProto()
    origin.CopyFrom(proto)
    flow, nodes, numbers = Dataflow(origin), list[onnx.NodeProto](), dict[str, Matrix]()
    for node in flow.nodes:
        if node.op_type not in PACKED_OPERATORS:
            nodes.append(node)
            continue
        lookup = node.op_type == "GatherBlockQuantized"
        name = f"{node.input[0 if lookup else 1]}_in_floats"
        if name not in numbers:
            numbers[name] = (table_of if lookup else linear_weight)(_alone(flow, node), folder, node)
        if lookup:
            rows = [name, node.input[1]]
            nodes.append(onnx.helper.make_node("Gather", rows, list(node.output), node.name, axis=0))
        else:
            nodes += _product(node, name)
    if not numbers:
        return
    del proto.graph.node[:], proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {value.name for value in proto.graph.output}
    proto.graph.initializer.extend(one for one in origin.graph.initializer if one.name in read or not one.dims)
    proto.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in numbers.items()
    )


def _alone(flow: Dataflow, node: onnx.NodeProto) -> Dataflow:
    """A node with its weights alone: offsets of its product and another order of its inputs stay in the graph."""
    proto = onnx.ModelProto()
    proto.graph.node.extend(flow.nodes[i] for i in sorted(flow.ancestors(node.input[2:])))
    proto.graph.node.append(node)
    read = {name for one in proto.graph.node for name in one.input}
    proto.graph.initializer.extend(flow.initializers[name] for name in flow.initializers if name in read)
    return Dataflow(proto)


def _product(node: onnx.NodeProto, weight: str) -> list[onnx.NodeProto]:
    bias = [name for name in node.input[BIAS_PLACE["MatMulNBits"] :] if name]
    if not bias:
        return [onnx.helper.make_node("MatMul", [node.input[0], weight], list(node.output), node.name)]
    output = f"{node.output[0]}_without_bias"
    product = onnx.helper.make_node("MatMul", [node.input[0], weight], [output], node.name)
    return [product, onnx.helper.make_node("Add", [output, *bias], list(node.output), f"{node.name}_bias")]
