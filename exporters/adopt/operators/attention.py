"""Fused attention: GroupQueryAttention, MultiHeadAttention and Attention of ONNX Runtime, Attention of opset 23.

An expansion takes positions from `position_ids` and visibility from `attention_mask` [batch, total], as hooked models
do, and appends keys and values to the past: left padding works where the fused operator has none.
"""

import numpy as np
import onnx_ir as ir

from exporters.adopt.flow import rank, static
from exporters.adopt.operators.decoder_writer import DecoderWriter, input_at, kind_of, width_of
from exporters.adopt.operators.norms import EPSILON, rms
from exporters.adopt.operators.rotary import angles, rotate
from mionnx.errors import ExportError


def _attend(
    op: DecoderWriter,
    node: ir.Node,
    heads: tuple[ir.Value, ...],
    width: int,
    kind: ir.DataType,
    seen: ir.Value | None = None,
    bias: ir.Value | None = None,
    sink: ir.Value | None = None,
) -> ir.Value:
    """softmax(cap tanh(q kᵀ scale / cap) + bias, masked) v, [batch, heads, seq, width], by a node's scale and cap."""
    queries, keys, values = heads
    # a scale of 0 is none: then it is 1 / sqrt(width)
    scale, cap = node.attributes.get_float("scale", 0.0) or width**-0.5, node.attributes.get_float("softcap", 0.0)
    scores = op.Mul(op.MatMul(queries, op.Transpose(keys, perm=[0, 1, 3, 2])), op.number(scale, kind))
    if cap:
        scores = op.Mul(op.Tanh(op.Div(scores, op.number(cap, kind))), op.number(cap, kind))
    if bias is not None:
        scores = op.Add(scores, bias)
    if seen is not None:
        # the lowest number, not -inf: a row of padding alone would be NaN
        scores = op.Where(seen, scores, op.number(float(np.finfo(kind.numpy()).min), kind))
    if sink is None:
        return op.MatMul(op.Softmax(scores, axis=-1), values)
    # a column that takes a share of the softmax and multiplies no value
    column = op.Expand(sink, op.Concat(op.Slice(op.Shape(scores), [0], [3]), [1], axis=0))
    pattern = op.Softmax(op.Concat(scores, column, axis=-1), axis=-1)
    return op.MatMul(op.Slice(pattern, [0], [-1], [3]), values)


def grouped_query(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """GroupQueryAttention: packed or not; q/k norm, rotation, soft cap, window, bias, sinks."""
    queries, keys, values, past_keys, past_values = (input_at(node, place) for place in range(5))
    heads, groups = node.attributes.get_int("num_heads", 0), node.attributes.get_int("kv_num_heads", 0)
    # without keys the first input is queries, keys and values side by side
    width = _head_width(node, queries, heads + 2 * groups if keys is None else heads)
    if keys is None:
        queries, keys, values = op.split(queries, [heads * width, groups * width, groups * width])
    counts = heads, groups, groups
    queries, keys, values = (op.heads(x, n, width) for x, n in zip((queries, keys, values), counts, strict=True))
    queries, keys = _normed(op, node, queries, keys)
    if node.attributes.get_int("do_rotary", 0):
        tables = input_at(node, 7), input_at(node, 8)
        part = 2 * (static(tables[0], 1) or 0)  # a table has a column for each pair
        at = input_at(node, 9) or op.positions()
        cos, sin = (angles(op, table, at) for table in tables)
        pairs = bool(node.attributes.get_int("rotary_interleaved", 0))
        queries, keys = (rotate(op, x, cos, sin, width, part, pairs) for x in (queries, keys))
    for past in (past_keys, past_values):
        if past is not None:
            past.shape = ir.Shape(["batch", groups, "past", width])
    keys = keys if past_keys is None else op.Concat(past_keys, keys, axis=2)
    values = values if past_values is None else op.Concat(past_values, values, axis=2)
    window, kind = node.attributes.get_int("local_window_size", -1), kind_of(past_keys, node.inputs[0])
    repeated = (op.repeated(x, heads // groups, heads, width) for x in (keys, values))
    z = _attend(
        op,
        node,
        (queries, *repeated),
        width,
        kind,
        seen=op.visible(window if window > 0 else None),
        bias=input_at(node, 10),
        sink=_sink(op, node, heads, kind),
    )
    return {0: op.merged(z, heads, width), 1: keys, 2: values}


def _normed(op: DecoderWriter, node: ir.Node, queries: ir.Value, keys: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Queries and keys after their RMS norms over a head, where the operator has such weights."""
    if any(input_at(node, place) is not None for place in (12, 13)):  # scales of keys and values
        raise ExportError(f"GroupQueryAttention node {node.name!r} has a quantised past: it cannot be expanded")
    weights, epsilon = (input_at(node, 14), input_at(node, 15)), node.attributes.get_float("qk_norm_epsilon", EPSILON)
    pairs = zip((queries, keys), weights, strict=True)
    normed = [heads if weight is None else rms(op, heads, weight, epsilon) for heads, weight in pairs]
    return normed[0], normed[1]


def _sink(op: DecoderWriter, node: ir.Node, heads: int, kind: ir.DataType) -> ir.Value | None:
    """Logits of the column without a key, [1, heads, 1, 1]: given, or 0 of a smooth softmax."""
    logits = input_at(node, 11)
    if logits is not None:
        return op.Reshape(logits, [1, heads, 1, 1])
    smooth = node.attributes.get_int("smooth_softmax", 0) > 0
    return op.constant(np.zeros((1, heads, 1, 1)), kind.numpy()) if smooth else None


def _head_width(node: ir.Node, queries: ir.Value | None, heads: int) -> int:
    size = width_of(queries)
    if size is None or not heads:
        raise ExportError(f"{node.op_type} node {node.name!r} reads queries of unknown width: it cannot be expanded")
    return size // heads


def multi_head(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """MultiHeadAttention: three axes, packed [batch, seq, heads, 3, width], or heads first."""
    queries, keys, values, bias, mask, added, past_keys, past_values = (input_at(node, place) for place in range(8))
    heads = node.attributes.get_int("num_heads", 0)
    kind = kind_of(queries, keys, values, bias)
    if keys is None:
        if static(queries, 4) is None:
            raise ExportError(
                f"MultiHeadAttention node {node.name!r} is packed to unknown sizes: it cannot be expanded"
            )
        width = static(queries, 4)
        parts = op.split(queries, [1, 1, 1], axis=3)
        queries, keys, values = (op.Reshape(part, [0, 0, heads * width]) for part in parts)
    size = next((s for x in (queries, keys, values) if rank(x) == 3 and (s := static(x, 2)) is not None), None)
    size = size or (static(bias, 0) or 0) // 3 if size is None and bias is not None else size
    if not size:
        raise ExportError(
            f"MultiHeadAttention node {node.name!r} reads queries of unknown width: it cannot be expanded"
        )
    width = size // heads
    if bias is not None:
        shifts = op.split(bias, [size] * 3, axis=0)  # one bias for queries, keys and values, side by side
        queries, keys, values = (op.Add(x, shift) for x, shift in zip((queries, keys, values), shifts, strict=True))
    queries, keys, values = (x if rank(x) == 4 else op.heads(x, heads, width) for x in (queries, keys, values))
    if past_keys is not None and past_values is not None:
        keys, values = op.Concat(past_keys, keys, axis=2), op.Concat(past_values, values, axis=2)
    causal = node.attributes.get_int("unidirectional", 0) or mask is not None
    seen = op.visible(None) if causal else None
    z = _attend(op, node, (queries, keys, values), width, kind, seen, bias=added)
    return {0: op.merged(z, heads, width), 1: keys, 2: values}


def packed_attention(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """com.microsoft Attention: its projection inside; a past [2, batch, heads, past, width]."""
    x, weight, bias, mask, past, added = (input_at(node, place) for place in range(6))
    heads = node.attributes.get_int("num_heads", 0)
    width, kind = _head_width(node, weight, 3 * heads), kind_of(weight, x)
    size = heads * width
    projected = op.MatMul(x, weight) if bias is None else op.Add(op.MatMul(x, weight), bias)
    queries, keys, values = (op.heads(part, heads, width) for part in op.split(projected, [size] * 3))
    presents: dict[int, ir.Value] = {}
    if past is not None:
        before = [op.Squeeze(part, [0]) for part in op.split(past, [1, 1], axis=0)]
        keys, values = (op.Concat(old, new, axis=2) for old, new in zip(before, (keys, values), strict=True))
        presents[1] = op.Concat(op.Unsqueeze(keys, [0]), op.Unsqueeze(values, [0]), axis=0)
    causal = node.attributes.get_int("unidirectional", 0) or mask is not None
    seen = op.visible(None) if causal else None
    z = _attend(op, node, (queries, keys, values), width, kind, seen, bias=added)
    return {0: op.merged(z, heads, width), **presents}


def standard_attention(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """Attention of opset 23 and 24: three or four axes, a boolean or added mask, a past."""
    queries, keys, values, mask, past_keys, past_values = (input_at(node, place) for place in range(6))
    heads, groups = node.attributes.get_int("q_num_heads", 0), node.attributes.get_int("kv_num_heads", 0)
    # with a number of heads its values have three axes, [batch, seq, heads * width]; without, four
    flat = heads > 0
    heads, groups = heads or (static(queries, 1) or 0), groups or (static(keys, 1) or 0)
    width = _head_width(node, queries, heads if flat else 1)
    if not groups:
        raise ExportError(f"Attention node {node.name!r} has an unknown number of heads: it cannot be expanded")
    kind = kind_of(queries, keys, values)
    if flat:
        counts = heads, groups, groups
        queries, keys, values = (op.heads(x, n, width) for x, n in zip((queries, keys, values), counts, strict=True))
    if past_keys is not None and past_values is not None:
        keys, values = op.Concat(past_keys, keys, axis=2), op.Concat(past_values, values, axis=2)
    boolean = mask is not None and mask.dtype == ir.DataType.BOOL
    seen = mask if boolean else (op.visible(None) if node.attributes.get_int("is_causal", 0) else None)
    repeated = (op.repeated(x, heads // groups, heads, width) for x in (keys, values))
    z = _attend(op, node, (queries, *repeated), width, kind, seen, bias=None if boolean else mask)
    return {0: op.merged(z, heads, width) if flat else z, 1: keys, 2: values}
