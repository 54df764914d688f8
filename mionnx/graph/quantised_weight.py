"""Weights of quantised graphs as the numbers that they stand for.

A quantised weight w is integers q with scales s and zero points z, w = (q - z) s; where s and z have one number, it
holds for all of w, where they are [size of an axis], for each slice of it, and where they have the rank of w, for each
block. The scales are found by what the graph does with the integers:

DequantizeLinear   its own inputs; before an operator (QDQ), or behind the rows that a Gather has picked
QLinearMatMul      its own inputs
MatMulInteger      the scale that its result is multiplied with, beside that of its first input (dynamic quantisation)
DynamicQuantizeMatMul, MatMulIntegerToFloat, MatMulNBits, GatherBlockQuantized   their own inputs

Any other weight of integers is refused by its name and dtype: its numbers cannot be told from the integers.
"""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.packed_weight import matmul_nbits

Numbers = NDArray[np.floating]
QUANTISED = "_quantized"  # what ONNX Runtime's quantiser puts behind the name of a weight
# Operator -> places of its weight's scales and zero points among its inputs.
SCALE_INPUTS = {"DynamicQuantizeMatMul": (2, 3), "MatMulIntegerToFloat": (3, 5)}
FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")


def weight_numbers(proto: onnx.ModelProto, folder: Path, name: str) -> Numbers:
    """The numbers of a weight, by its name before it was quantised.

    Args:
        name: an initializer, or a weight that ONNX Runtime's quantiser has renamed.
    """
    initializers = {tensor.name for tensor in proto.graph.initializer}
    if name not in initializers and name + QUANTISED in initializers:
        name += QUANTISED
    elif name not in initializers:
        maker = Dataflow(proto).producer(name)
        if maker is not None and maker.op_type == "DequantizeLinear":
            return dequantised(proto, folder, maker)
    array = onnx_file.weight(proto, folder, name)
    return array if array.dtype.name in FLOAT_NAMES else _scaled(proto, folder, name, array)


def dequantised(proto: onnx.ModelProto, folder: Path, node: onnx.NodeProto) -> Numbers:
    """The output of a DequantizeLinear of weights."""
    integers, scale, *zeros = [onnx_file.weight(proto, folder, name) for name in node.input if name]
    return dequantise(integers, scale, zeros[0] if zeros else None, *_axis(node))


def dequantise(
    integers: NDArray, scale: NDArray, zero: NDArray | None = None, axis: int = 1, block_size: int = 0
) -> Numbers:
    """Numbers of quantised integers, (q - z) s, as ONNX' DequantizeLinear defines it.

    Args:
        integers: q, of any integer or 8-bit floating dtype.
        scale: s: one number; [size of the axis]; or the rank of q, with an entry for each block along the axis.
        zero: z, of the shape of s; 0 if left out.
        axis: of slices and blocks.
        block_size: entries of a block; 0 without blocks.

    Returns:
        the shape of q, the dtype of s.

    Raises:
        ModelError: shapes that do not fit together.
    """

    def spread(values: NDArray) -> NDArray[np.float64]:
        numbers = np.asarray(values).astype(np.float64)
        if numbers.size == 1:
            return numbers.reshape(())
        if block_size:
            blocks = np.repeat(numbers, block_size, axis=axis)
            return np.take(blocks, range(integers.shape[axis]), axis=axis)
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


def rounded(numbers: NDArray, scale: NDArray, zero: NDArray) -> Numbers:
    """Numbers after QuantizeLinear and DequantizeLinear of one scale.

    Raises:
        ModelError: several scales.
    """
    if scale.size != 1 or zero.dtype.kind not in "iu":
        raise ModelError(
            f"a computed weight is rounded with scales {list(scale.shape)} to {zero.dtype}: one is expected"
        )
    limits = np.iinfo(zero.dtype)
    steps = np.rint(numbers / scale.reshape(())).astype(np.float64) + float(zero.reshape(()))
    return dequantise(np.clip(steps, limits.min, limits.max), scale, zero)


def refuse_integers(name: str, array: NDArray) -> None:
    """Refuse a weight of integers whose scales are unknown.

    Raises:
        ModelError: naming it and its dtype.
    """
    if array.dtype.name not in FLOAT_NAMES:
        raise ModelError(
            f"the weight {name!r} is quantised, {array.dtype} {list(array.shape)}, and the graph does not say its "
            "scales where they are known: DequantizeLinear, QLinearMatMul, MatMulInteger, MatMulNBits. Open the model "
            "that it was quantised from"
        )


def _scaled(proto: onnx.ModelProto, folder: Path, name: str, integers: NDArray) -> Numbers:
    """Integers with the scales that their first known consumer gives them."""
    flow = Dataflow(proto)
    for node in (flow.nodes[i] for i in flow.consumers[name]):
        place = list(node.input).index(name) if name in node.input else -1
        if node.op_type == "DequantizeLinear" and place == 0:
            return dequantised(proto, folder, node)
        if node.op_type == "Gather" and place == 0:
            picked = [flow.nodes[i] for i in flow.consumers[node.output[0]]]
            following = next((one for one in picked if one.op_type == "DequantizeLinear"), None)
            if following is not None:
                return _picked(proto, folder, following, integers)
        if node.op_type == "QLinearMatMul" and place == 3:
            return _by_column(proto, folder, integers, node.input[4], node.input[5])
        if place == 1 and node.op_type in SCALE_INPUTS:
            scales, zeros = (node.input[at] if at < len(node.input) else "" for at in SCALE_INPUTS[node.op_type])
            return _by_column(proto, folder, integers, scales, zeros)
        if node.op_type == "MatMulNBits" and place == 1:
            return matmul_nbits(flow, folder, node)
        if node.op_type == "MatMulInteger" and place == 1:
            scale = _scale_of_product(flow, node.output[0], {tensor.name for tensor in proto.graph.initializer})
            if scale is not None:
                return _by_column(proto, folder, integers, scale, node.input[3] if len(node.input) > 3 else "")
    refuse_integers(name, integers)
    raise AssertionError("unreachable: integers were refused")


def _picked(proto: onnx.ModelProto, folder: Path, node: onnx.NodeProto, integers: NDArray) -> Numbers:
    """A table whose rows are dequantised after they were picked: by one scale."""
    scale = onnx_file.weight(proto, folder, node.input[1])
    zero = onnx_file.weight(proto, folder, node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if scale.size != 1:
        refuse_integers(node.input[0], integers)
    return dequantise(integers, scale, zero)


def _by_column(proto: onnx.ModelProto, folder: Path, integers: NDArray, scale: str, zero: str) -> Numbers:
    """A second factor [in, out], with one scale or one for each column."""
    zeros = onnx_file.weight(proto, folder, zero) if zero else None
    return dequantise(integers, onnx_file.weight(proto, folder, scale), zeros, axis=integers.ndim - 1)


def _scale_of_product(flow: Dataflow, value: str, held: set[str]) -> str | None:
    """The weight's scale b in `Cast(MatMulInteger) * (a * b)`, a being the activation's."""
    seen = [value]
    for name in seen:
        for node in (flow.nodes[i] for i in flow.consumers[name]):
            if node.op_type == "Cast":
                seen += node.output
            elif node.op_type == "Mul":
                others = [entry for entry in node.input if entry != name]
                scales = [entry for other in others for entry in _factors(flow, other) if entry in held]
                if len(scales) == 1:
                    return scales[0]
    return None


def _factors(flow: Dataflow, name: str) -> list[str]:
    """A value, or the factors of the product that it is."""
    maker = flow.producer(name)
    return list(maker.input) if maker is not None and maker.op_type == "Mul" else [name]


def _axis(node: onnx.NodeProto) -> tuple[int, int]:
    """Axis and block size of a DequantizeLinear."""
    facts = {attribute.name: attribute.i for attribute in node.attribute}
    return facts.get("axis", 1), facts.get("block_size", 0)
