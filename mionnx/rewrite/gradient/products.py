"""Rules of matrix products, of floats and of weights in blocks, softmaxes, norms and rotations."""

from collections.abc import Mapping

from onnx import NodeProto, TensorProto

from mionnx.errors import GradientError
from mionnx.graph.builder import integers_of_bytes
from mionnx.graph.packed_weight import PACKED_BITS
from mionnx.rewrite.gradient.backward import NARROW_FLOATS, Backward, Rule, Upstream

BLOCKED = 21  # opset since which DequantizeLinear has blocks


def _matmul(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """With y = x w: dx = dy w^T, dw = x^T dy, each summed over broadcast axes ahead."""
    x, w = node.input
    out, first, second = (op.facts.shapes.get(name) for name in (node.output[0], x, w))
    if first is None or second is None or min(len(first), len(second)) < 2:
        raise GradientError(f"a product of vectors, or of values of unknown shapes: {x} {first}, {w} {second}")
    # a product broadcasts the axes before the last two; the last two of a cotangent are those of its factor
    ahead = None if out is None else out[:-2]
    cotangents = {}
    if op.is_active(x):
        wide = None if ahead is None else (*ahead, *first[-2:])
        cotangents[0] = op.unbroadcast(op.MatMul(upstream[0], op.turned(w)), x, wide)
    if op.is_active(w):
        wide = None if ahead is None else (*ahead, *second[-2:])
        cotangents[1] = op.unbroadcast(op.MatMul(op.turned(x), upstream[0]), w, wide)
    return cotangents


def _gemm(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, w, dy, cotangents = node.input[0], node.input[1], upstream[0], {}
    # y = alpha X W + beta c with X = x or x^T, W = w or w^T: dX = alpha dy W^T, dW = alpha X^T dy, turned as x or w are
    turned_x, turned_w = op.attribute(node, "transA", 0), op.attribute(node, "transB", 0)
    alpha, beta = op.attribute(node, "alpha", 1.0), op.attribute(node, "beta", 1.0)
    if op.is_active(x):
        if turned_x:
            cotangents[0] = op.Gemm(w, dy, transA=turned_w, transB=1, alpha=alpha)
        else:
            cotangents[0] = op.Gemm(dy, w, transB=1 - turned_w, alpha=alpha)
    if op.is_active(w):
        if turned_w:
            cotangents[1] = op.Gemm(dy, x, transA=1, transB=turned_x, alpha=alpha)
        else:
            cotangents[1] = op.Gemm(x, dy, transA=1 - turned_x, alpha=alpha)
    if len(node.input) > 2 and op.is_active(node.input[2]):
        scaled = dy if beta == 1 else op.Mul(dy, beta)
        cotangents[2] = op.unbroadcast(str(scaled), node.input[2], op.facts.shapes.get(node.output[0]))
    return cotangents


def _softmax(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """dx = y (dy - sum(y dy))."""
    y, axis = node.output[0], op.attribute(node, "axis", -1)
    inner = op.ReduceSum(op.Mul(upstream[0], y), [axis], keepdims=1)
    return {0: op.Mul(op.Sub(upstream[0], inner), y)}


def _log_softmax(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """dx = dy - softmax(x) sum(dy)."""
    axis = op.attribute(node, "axis", -1)
    total = op.ReduceSum(upstream[0], [axis], keepdims=1)
    return {0: op.Sub(upstream[0], op.Mul(op.Exp(node.output[0]), total))}


def _norm_parts(op: Backward, node: NodeProto) -> tuple[str, str, list[int], int]:
    """A norm's normed value, the scale it divides by, its axes, and the element type of both."""
    x = node.input[0]
    # weight and bias; models are differentiated by activations alone
    if any(op.is_active(name) for name in node.input[1:]):
        raise GradientError("there is no gradient by the weights of a norm")
    axis, kind = op.attribute(node, "axis", -1), op.facts.type(x)
    # negative axes need no rank, which may not be known
    axes = [*range(axis, 0)] if axis < 0 else [*range(axis, op.rank(x))]
    # stash_type 1, the default: the operator itself computes in float32 where its input is narrower
    inner = TensorProto.FLOAT if kind in NARROW_FLOATS and op.attribute(node, "stash_type", 1) == 1 else kind
    value = x if inner == kind else op.Cast(x, to=inner)
    if node.op_type == "LayerNormalization":
        value = op.Sub(value, op.ReduceMean(value, axes, keepdims=1))
    variance = op.ReduceMean(op.Mul(value, value), axes, keepdims=1)
    scale = op.Sqrt(op.Add(variance, op.attribute(node, "epsilon", 1e-5)))
    return str(op.Div(value, scale)), str(scale), axes, inner


def norm_rule(op: Backward, node: NodeProto, upstream: Upstream, frozen: bool = False) -> Mapping[int, str]:
    """dx = (g - mean(g) - n mean(g n)) / s, with n = (x - mean) / s and g = dy w."""
    # An RMS norm subtracts no mean of x, and none of g. A frozen norm takes s for a constant: no n mean(g n).
    normed, scale, axes, inner = _norm_parts(op, node)
    kind = op.facts.type(node.input[0])
    narrow = inner != kind
    dy, weight = (op.Cast(one, to=inner) if narrow else one for one in (upstream[0], node.input[1]))
    g = op.Mul(dy, weight)
    centred = g if frozen else op.Sub(g, op.Mul(normed, op.ReduceMean(op.Mul(g, normed), axes, keepdims=1)))
    if node.op_type == "LayerNormalization":
        centred = op.Sub(centred, op.ReduceMean(g, axes, keepdims=1))
    centred = op.Div(centred, scale)
    return {0: op.Cast(centred, to=kind) if narrow else centred}


def _rotary(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """A rotation backwards: the same with the other sign of the sine."""
    # a rotation's transpose is its inverse: by the negative angle
    cos, sin, *rest = node.input[1:]
    own = {name: op.attribute(node, name, 0) for name in (one.name for one in node.attribute)}
    return {0: op.RotaryEmbedding(upstream[0], cos, op.Neg(sin), *rest, **own)}


def _matmul_nbits(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """With y = x w^T + b: dx = dy w, db = dy summed."""
    if any(op.is_active(name) for name in node.input[1:5] if name):  # blocks, scales, zero points, order
        raise GradientError("there is no gradient by the blocks of a weight")
    cotangents = {}
    if op.is_active(node.input[0]):
        cotangents[0] = op.MatMul(upstream[0], _numbers(op, node))
    if len(node.input) > 5 and node.input[5] and op.is_active(node.input[5]):
        cotangents[5] = op.unbroadcast(str(upstream[0]), node.input[5], op.facts.shapes.get(node.output[0]))
    return cotangents


def _numbers(op: Backward, node: NodeProto) -> str:
    packed, scale = node.input[1:3]
    bits, block = op.attribute(node, "bits", 4), op.attribute(node, "block_size", 0)
    count, width = op.attribute(node, "N", 0), op.attribute(node, "K", 0)
    zero, order = ([*node.input, "", ""][place] for place in (3, 4))
    if order or bits not in PACKED_BITS:
        raise GradientError(f"MatMulNBits of {bits} bits, or with g_idx, weights in another order")
    blocks = -(-width // block)  # the last one may be filled up
    # A runtime takes the integers out of their bytes once. ONNX Runtime computes a DequantizeLinear anew in each call,
    # and keeps no copy: the graph holds a byte for each number of 4 bits, and floats of one matrix at a time.
    integers = op.Reshape(integers_of_bytes(op, packed, bits), [count, blocks * block])
    scales = op.Reshape(scale, [count, blocks])
    # zero points of floats are fractions, which DequantizeLinear does not subtract
    if (zero and op.facts.type(zero) != TensorProto.UINT8) or op.opset < BLOCKED:
        weight = _of_fractions(op, integers, scales, zero, (count, blocks, block, bits))
    elif zero:
        # each row of zero points is filled up to whole bytes: an odd number of 4-bit ones has one too many
        points = op.Reshape(integers_of_bytes(op, zero, bits), [count, -1])
        weight = op.DequantizeLinear(integers, scales, op.Slice(points, [0], [blocks], [1]), axis=1, block_size=block)
    else:
        # without zero points the middle of the range stands for 0
        middle = op.Expand(op.constant(2 ** (bits - 1), packed), [count, blocks])
        weight = op.DequantizeLinear(integers, scales, middle, axis=1, block_size=block)
    return str(weight if blocks * block == width else op.Slice(weight, [0], [width], [1]))


def _of_fractions(op: Backward, integers: str, scales: str, zero: str, sizes: tuple[int, int, int, int]) -> str:
    """The weight [N, blocks * block] by arithmetic: older opsets, fractional zero points."""
    count, blocks, block, bits = sizes
    numbers = op.Reshape(op.CastLike(integers, scales), [count, blocks, block])
    if not zero:
        points = op.constant(2 ** (bits - 1), scales)
    elif op.facts.type(zero) == TensorProto.UINT8:
        divided = op.Reshape(integers_of_bytes(op, zero, bits), [count, -1])
        points = op.Unsqueeze(op.CastLike(op.Slice(divided, [0], [blocks], [1]), scales), [2])
    else:
        points = op.Reshape(zero, [count, blocks, 1])
    weight = op.Mul(op.Sub(numbers, points), op.Unsqueeze(scales, [2]))
    return str(op.Reshape(weight, [count, blocks * block]))


PRODUCT_RULES: dict[str, Rule] = {
    "Gemm": _gemm,
    "LayerNormalization": norm_rule,
    "LogSoftmax": _log_softmax,
    "MatMul": _matmul,
    "MatMulNBits": _matmul_nbits,
    "RMSNormalization": norm_rule,
    "RotaryEmbedding": _rotary,
    "Softmax": _softmax,
}
