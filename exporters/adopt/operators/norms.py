"""Norms: RMS norms that ONNX has not, gated ones, norms with the residual addition inside, vectors of length 1."""

import numpy as np
import onnx_ir as ir

from exporters.adopt.flow import LINEAR_PRODUCTS, climb, static
from exporters.adopt.operators.decoder_writer import DecoderWriter, input_at, kind_of
from mionnx.errors import ExportError

EPSILON = 1e-5  # of ONNX Runtime's operators where a node names none


def rms(op: DecoderWriter, x: ir.Value, weight: ir.Value, epsilon: float) -> ir.Value:
    """x / sqrt(mean(x²) + epsilon) * weight, over the last axis."""
    kind = kind_of(weight, x)
    root = op.Sqrt(op.Add(op.ReduceMean(op.Mul(x, x), [-1], keepdims=1), op.number(epsilon, kind)))
    return op.Mul(op.Div(x, root), weight)


def simplified_norm(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """SimplifiedLayerNormalization: x / sqrt(mean(x²) + epsilon) * weight."""
    return {0: rms(op, node.inputs[0], node.inputs[1], node.attributes.get_float("epsilon", EPSILON))}


def skip_norm(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """SkipLayerNormalization and its simplified form: the norm of x + skip, and the sum."""
    # The bias is one of the branch, not of the stream: it is added to the summand that a matrix product makes.
    x, skip, weight = node.inputs[:3]
    simplified = node.op_type == "SkipSimplifiedLayerNormalization"
    bias, epsilon = input_at(node, 3 if simplified else 4), node.attributes.get_float("epsilon", EPSILON)
    product = climb(x, ("Reshape", "Cast")).producer()
    if bias is not None and product is not None and product.op_type in LINEAR_PRODUCTS:
        x = op.Add(x, bias)
    elif bias is not None:
        skip = op.Add(skip, bias)
    total = op.Add(x, skip)
    if simplified:
        return {0: rms(op, total, weight, epsilon), 3: total}
    shift = [value for value in [input_at(node, 3)] if value is not None]
    return {0: op.LayerNormalization(total, weight, *shift, axis=-1, epsilon=epsilon), 3: total}


def gated_norm(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """GatedRMSNorm: the RMS norm of as many numbers of x as there are weights, times an activated gate."""
    x, weight, gate = node.inputs[:3]
    width, kind = static(weight, 0), kind_of(weight, x)
    if width is None:
        raise ExportError(f"GatedRMSNorm node {node.name!r} has weights of unknown number: it cannot be expanded")
    heads = op.Reshape(x, [0, 0, -1, width])
    normed = op.Reshape(rms(op, heads, weight, node.attributes.get_float("epsilon", EPSILON)), [0, 0, -1])
    bent = op.Sigmoid(gate)
    bent = bent if node.attributes.get_string("activation", "silu") == "sigmoid" else op.Mul(gate, bent)
    normed.type = bent.type = ir.TensorType(kind)
    return {0: op.Mul(normed, bent)}


def unit_length(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """LpNormalization over the last axis by its length; of zeros it makes zeros, as the operator does."""
    attributes = node.attributes
    if attributes.get_int("p", 2) != 2 or attributes.get_int("axis", -1) != -1:
        return {}
    x = node.inputs[0]
    kind = kind_of(x)
    length = op.Clip(op.ReduceL2(x, [-1], keepdims=1), op.number(float(np.finfo(kind.numpy()).tiny), kind))
    return {0: op.Div(x, length)}
