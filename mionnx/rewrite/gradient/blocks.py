"""The rule of products with weights in blocks, ONNX Runtime's MatMulNBits.

The cotangent is multiplied with the numbers of the blocks. The integers are taken out of their bytes, which a runtime
does once; they become floats by a DequantizeLinear, which ONNX Runtime computes anew in each call and keeps no copy of:
a graph with gradients holds a byte for each number of 4 bits, and floats of one matrix at a time.
"""

from collections.abc import Mapping

from onnx import NodeProto

from mionnx.errors import GradientError
from mionnx.graph.packed_weight import PACKED_BITS
from mionnx.rewrite.gradient.backward import Backward, Given, Rule

BLOCKED = 21  # opset since which DequantizeLinear has blocks
UINT8 = 2  # ONNX' number


def _matmul_nbits(op: Backward, node: NodeProto, given: Given) -> Mapping[int, str]:
    """With y = x w^T + b: dx = dy w, db = dy summed."""
    if any(op.is_active(name) for name in node.input[1:5] if name):
        raise GradientError("there is no gradient by the blocks of a weight")
    cotangents = {}
    if op.is_active(node.input[0]):
        cotangents[0] = op.MatMul(given[0], _numbers(op, node))
    if len(node.input) > 5 and node.input[5] and op.is_active(node.input[5]):
        cotangents[5] = op.unbroadcast(str(given[0]), node.input[5], op.facts.shapes.get(node.output[0]))
    return cotangents


def _numbers(op: Backward, node: NodeProto) -> str:
    """The weight [N, K] of a MatMulNBits."""
    packed, scale = node.input[1:3]
    bits, block = op.attribute(node, "bits", 4), op.attribute(node, "block_size", 0)
    count, width = op.attribute(node, "N", 0), op.attribute(node, "K", 0)
    zero, order = ([*node.input, "", ""][place] for place in (3, 4))
    if order or bits not in PACKED_BITS:
        raise GradientError(f"MatMulNBits of {bits} bits, or with g_idx, weights in another order")
    blocks = -(-width // block)
    integers = op.Reshape(_divided(op, packed, bits), [count, blocks * block])
    scales = op.Reshape(scale, [count, blocks])
    if (zero and op.facts.type(zero) != UINT8) or op.opset < BLOCKED:
        whole = _of_fractions(op, integers, scales, zero, (count, blocks, block, bits))
    elif zero:
        points = op.Reshape(_divided(op, zero, bits), [count, -1])
        whole = op.DequantizeLinear(integers, scales, op.Slice(points, [0], [blocks], [1]), axis=1, block_size=block)
    else:
        middle = op.Expand(op.constant(2 ** (bits - 1), packed), [count, blocks])
        whole = op.DequantizeLinear(integers, scales, middle, axis=1, block_size=block)
    return str(whole if blocks * block == width else op.Slice(whole, [0], [width], [1]))


def _of_fractions(op: Backward, integers: str, scales: str, zero: str, sizes: tuple[int, int, int, int]) -> str:
    """The weight [N, blocks * block] by arithmetic: older opsets, fractional zero points."""
    count, blocks, block, bits = sizes
    numbers = op.Reshape(op.CastLike(integers, scales), [count, blocks, block])
    if not zero:
        points = op.constant(2 ** (bits - 1), scales)
    elif op.facts.type(zero) == UINT8:
        divided = op.Reshape(_divided(op, zero, bits), [count, -1])
        points = op.Unsqueeze(op.CastLike(op.Slice(divided, [0], [blocks], [1]), scales), [2])
    else:
        points = op.Reshape(zero, [count, blocks, 1])
    whole = op.Mul(op.Sub(numbers, points), op.Unsqueeze(scales, [2]))
    return str(op.Reshape(whole, [count, blocks * block]))


def _divided(op: Backward, packed: str, bits: int) -> str:
    """Bytes as the numbers in them, the one in the lowest bits first, along a new last axis."""
    if bits == 8:
        return packed
    parts = []
    for shift in range(0, 8, bits):
        moved = op.BitShift(packed, op.constant(shift, packed), direction="RIGHT") if shift else packed
        parts.append(op.Unsqueeze(op.BitwiseAnd(moved, op.constant(2**bits - 1, packed)), [-1]))
    return str(op.Concat(*parts, axis=-1))


BLOCK_RULES: dict[str, Rule] = {"MatMulNBits": _matmul_nbits}
