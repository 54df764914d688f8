"""Activations, sums, products and transpositions that ONNX Runtime's optimizer fuses."""

from math import pi, sqrt

import onnx_ir as ir

from exporters.adopt.flow import perm_of, rank
from exporters.adopt.operators.decoder_writer import DecoderWriter, input_at, kind_of
from mionnx.errors import ExportError

CUBIC = 0.044715  # of the tanh approximation of GELU (Hendrycks and Gimpel, arXiv:1606.08415)
QUICK = 1.702  # of its sigmoid approximation, same source


def gelu(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """Gelu, BiasGelu (exact), FastGelu (tanh) and QuickGelu (sigmoid)."""
    x, bias = node.inputs[0], input_at(node, 1)
    kind = kind_of(x, bias)
    x = x if bias is None else op.Add(x, bias)
    if node.op_type == "QuickGelu":
        rate = op.number(node.attributes.get_float("alpha", QUICK), kind)
        return {0: op.Mul(x, op.Sigmoid(op.Mul(x, rate)))}
    if node.op_type == "FastGelu":
        cube = op.Mul(op.Mul(x, x), x)
        inner = op.Mul(op.Add(x, op.Mul(cube, op.number(CUBIC, kind))), op.number(sqrt(2 / pi), kind))
        grown = op.Tanh(inner)
    else:
        grown = op.Erf(op.Mul(x, op.number(sqrt(0.5), kind)))
    return {0: op.Mul(op.Mul(x, op.number(0.5, kind)), op.Add(grown, op.number(1.0, kind)))}


def fused_product(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """FusedMatMul: alpha * a b, either of them turned, but for its batch axis."""
    a, b = node.inputs[:2]
    if node.attributes.get_int("transBatchA", 0) or node.attributes.get_int("transBatchB", 0):
        raise ExportError(f"FusedMatMul node {node.name!r} turns its batch axis: it cannot be expanded")
    a = _turned(op, a) if node.attributes.get_int("transA", 0) else a
    b = _turned(op, b) if node.attributes.get_int("transB", 0) else b
    alpha, product = node.attributes.get_float("alpha", 1.0), op.MatMul(a, b)
    return {0: product if alpha == 1.0 else op.Mul(product, op.number(alpha, kind_of(a, b)))}


def _turned(op: DecoderWriter, x: ir.Value) -> ir.Value:
    axes = rank(x) or 4
    return op.Transpose(x, perm=[*range(axes - 2), axes - 1, axes - 2])


def gated_sum(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """GatedAdd: x + y gate."""
    x, y, gate = node.inputs[:3]
    return {0: op.Add(x, op.Mul(y, gate))}


def turned_keys(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """Two transpositions in place of one, so that the keys are a value."""
    if perm_of(node) != (0, 2, 3, 1):  # heads first, and keys turned for their product
        return {}
    return {0: op.Transpose(op.Transpose(node.inputs[0], perm=[0, 2, 1, 3]), perm=[0, 1, 3, 2])}
