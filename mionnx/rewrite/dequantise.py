"""Rewrite: the numbers of a quantised weight as a value of the graph, from the operator that reads the weight.

1. A weight of floats is itself.
2. The numbers of a DequantizeLinear are computed once more, by other operators.
   So are those of a Cast and a Mul with scales, which some tools write.
3. Behind an operator of 8-bit integers stands a DequantizeLinear with the scales and zero points of that operator.
4. Behind a MatMulNBits the bytes are divided into their numbers (the first in the lowest bits), less the zero points,
   times the scales of the blocks, without the numbers that fill up the last block: [N, K]; offsets are added, and
   columns that stand in another order than the inputs, or several for one, are put in theirs and added
   (`mionnx.graph.offset_products`).

All of it follows from weights: a runtime computes it once, while it opens the graph.
"""

import numpy as np

from mionnx.errors import ModelError
from mionnx.graph.builder import Builder, Node, Tensor, integers_of_bytes
from mionnx.graph.edited_graph import numpy_dtype
from mionnx.graph.offset_products import offset_nodes, order_node
from mionnx.graph.packed_weight import PACKED_BITS
from mionnx.graph.weight_value import FLOAT_NAMES, SCALE_INPUTS

INTEGERS = {**SCALE_INPUTS, "QLinearMatMul": (4, 5)}  # places of scales and zero points


def dequantised(op: Builder, weight: Tensor) -> Tensor:
    """Add the nodes of a weight's numbers, in the shape of its use."""
    if _is_float(weight):
        return weight
    for node in weight.outputs:
        if node.op == "DequantizeLinear":
            # A second reader of its output would keep a runtime from fusing it with its product, and change the logits.
            return _of_dequantise(op, node)
        if node.op == "MatMulNBits":
            return _of_blocks(op, node)
        if node.op == "Cast" and (factor := _factor_of(node)) is not None:
            return op.Mul(_cast(op, weight, factor), factor)
        if node.op == "MatMulInteger":
            scale = _scale_of_product(node)
            if scale is not None:
                return _of_columns(op, weight, scale, _input(node, 3))
        if node.op in INTEGERS:
            scale_at, zero_at = INTEGERS[node.op]
            return _of_columns(op, weight, node.inputs[scale_at], _input(node, zero_at))
    raise ModelError(f"{weight.name} is quantised, and the graph does not say its scales where they are known")


def _of_dequantise(op: Builder, node: Node) -> Tensor:
    """Numbers of a DequantizeLinear, (q - z) s."""
    weight, scale, zero = node.inputs[0], node.inputs[1], _input(node, 2)
    axis = node.attrs.get("axis", 1) % max(1, len(weight.shape))  # 1 is ONNX's default
    block, numbers = node.attrs.get("block_size", 0), _cast(op, weight, scale)

    def spread(values: Tensor) -> Tensor:
        sizes = list(scale.shape)
        if block:
            wide = op.Expand(op.Unsqueeze(values, [axis + 1]), [*sizes[: axis + 1], block, *sizes[axis + 1 :]])
            full = op.Reshape(wide, [*sizes[:axis], -1, *sizes[axis + 1 :]])
            return op.Slice(full, [0], [weight.shape[axis]], [axis])  # the last block may end beyond the weight
        if len(sizes) == 1 and sizes[0] > 1:
            return op.Reshape(values, [-1 if place == axis else 1 for place in range(len(weight.shape))])
        return values

    shifted = numbers if zero is None else op.Sub(numbers, spread(_cast(op, zero, scale)))
    return op.Mul(shifted, spread(scale))


def _of_columns(op: Builder, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Numbers [in, out] of 8-bit integers with one scale or one for each column."""
    if len(scale.shape) == 2:  # [1, out]
        scale = op.Reshape(scale, [-1])
    if zero is None:
        return op.DequantizeLinear(weight, scale, axis=1, dtype=scale.dtype)
    return op.DequantizeLinear(weight, scale, op.Reshape(zero, op.Shape(scale)), axis=1, dtype=scale.dtype)


def _of_blocks(op: Builder, node: Node) -> Tensor:
    """Numbers [N, K] of a MatMulNBits."""
    count, width, block = node.attrs["N"], node.attrs["K"], node.attrs["block_size"]
    bits, blocks = node.attrs.get("bits", 4), -(-width // block)
    if _input(node, 4) is not None or bits not in PACKED_BITS:
        raise ModelError(f"{node.name}: MatMulNBits of {bits} bits, or with g_idx, weights in another order")
    packed, scale, zero = node.inputs[1], node.inputs[2], _input(node, 3)
    numbers = _cast(op, op.Reshape(integers_of_bytes(op, packed, bits), [count, blocks, -1]), scale)
    if zero is None:
        shift = op.constant(np.array(2 ** (bits - 1), scale.dtype))
    else:
        # fractional zero points come unpacked; integers have the bits of the weight, rows filled up to whole bytes
        plain = (
            zero if _is_float(zero) else _cast(op, op.Reshape(integers_of_bytes(op, zero, bits), [count, -1]), scale)
        )
        shift = op.Reshape(op.Slice(op.Reshape(plain, [count, -1]), [0], [blocks], [1]), [count, blocks, 1])
    matrix = op.Mul(op.Sub(numbers, shift), op.Reshape(scale, [count, blocks, 1]))
    offsets, order = offset_nodes(node), order_node(node)
    if offsets:
        of_rows = op.Transpose(offsets[1].inputs[1], perm=[1, 0])  # [blocks, N] as the graph multiplies by them
        matrix = op.Add(matrix, op.Reshape(of_rows, [count, blocks, 1]))
    rows = op.Slice(op.Reshape(matrix, [count, -1]), [0], [width], [1])
    if order is None:
        return rows
    # the width of the product's own input: the largest place in the order, and one
    inputs = op.Add(op.ReduceMax(order.inputs[1], keepdims=1), [1])
    # added, not put: several columns may read one input
    none = op.Expand(op.constant(np.array(0, scale.dtype)), op.Concat(inputs, [count], axis=0))
    places = op.Unsqueeze(order.inputs[1], [1])
    return op.Transpose(op.ScatterND(none, places, op.Transpose(rows, perm=[1, 0]), reduction="add"), perm=[1, 0])


def _cast(op: Builder, value: Tensor, like: Tensor) -> Tensor:
    return op.Cast(value, to=like.dtype)


def _is_float(value: Tensor) -> bool:
    """Whether a tensor holds fractions; graphsurgeon says 4-bit integers by ONNX's number."""
    return numpy_dtype(value.dtype).name in FLOAT_NAMES


def _input(node: Node, place: int) -> Tensor | None:
    """An input that may be left out."""
    return node.inputs[place] if place < len(node.inputs) and node.inputs[place].name else None


def _factor_of(cast: Node) -> Tensor | None:
    """The scale that integers are multiplied with behind their cast; None where it is no weight."""
    for user in cast.outputs[0].outputs:
        if user.op == "Mul":
            return next((one for one in user.inputs if one is not cast.outputs[0] and not one.inputs), None)
    return None


def _scale_of_product(node: Node) -> Tensor | None:
    """The weight's scale b in `Cast(MatMulInteger) * (a * b)`, a being the activation's."""
    # grows while it is gone through: casts of the product are products too
    values = [*node.outputs]
    for value in values:
        for user in value.outputs:
            if user.op == "Cast":
                values += user.outputs
            elif user.op == "Mul":
                others = [entry for entry in user.inputs if entry is not value]
                products = [other.inputs[0] if other.inputs else None for other in others]
                factors = [
                    factor
                    for other, node in zip(others, products, strict=True)
                    for factor in (node.inputs if node is not None and node.op == "Mul" else [other])
                ]
                constants = [factor for factor in factors if not factor.inputs]
                if len(constants) == 1:  # the weight's scale; the activation's is computed in each run
                    return constants[0]
    return None
