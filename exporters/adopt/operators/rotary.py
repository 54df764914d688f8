"""Rotary position embeddings: ONNX Runtime's operator, and that of opset 23."""

import onnx_ir as ir

from exporters.adopt.flow import perm_of, rank, static
from exporters.adopt.operators.decoder_writer import DecoderWriter, input_at
from mionnx.errors import ExportError


def rotate(
    op: DecoderWriter, x: ir.Value, cos: ir.Value, sin: ir.Value, width: int, part: int, interleaved: bool
) -> ir.Value:
    """Rotate the first `part` of each head [batch, heads, seq, width]; cos, sin are [batch, 1, seq, part / 2]."""
    rest = None
    if part < width:
        x, rest = op.split(x, [part, width - part])
    if interleaved:
        pairs = op.Reshape(x, [0, 0, 0, part // 2, 2])
        a, b = (op.Squeeze(value, [-1]) for value in op.split(pairs, [1, 1]))
    else:
        a, b = op.split(x, [part // 2, part // 2])
    # (a + ib) (cos + i sin)
    first, second = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))
    if interleaved:
        both = op.Concat(op.Unsqueeze(first, [-1]), op.Unsqueeze(second, [-1]), axis=-1)
        turned = op.Reshape(both, [0, 0, 0, part])
    else:
        turned = op.Concat(first, second, axis=-1)
    return turned if rest is None else op.Concat(turned, rest, axis=-1)


def angles(op: DecoderWriter, table: ir.Value, positions: ir.Value) -> ir.Value:
    """Rows of a table of cosines or sines, [batch, 1, seq, part / 2]."""
    return op.Unsqueeze(op.Gather(table, positions), [1])


def rotary(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """com.microsoft RotaryEmbedding, and of several positions a token: x, positions, cos and sin tables."""
    x, positions, cos, sin = node.inputs[:4]
    # 0: all of the table's width
    part = node.attributes.get_int("rotary_embedding_dim", 0) or 2 * (static(cos, 1) or 0)
    heads, interleaved = node.attributes.get_int("num_heads", 0), bool(node.attributes.get_int("interleaved", 0))
    _require(part > 0, node, "a table of unknown width")
    # one first position for all rows; or a token's places in time, height and width, which are one in a text
    if rank(positions) in (1, 3):
        positions = op.positions()
    cos, sin = angles(op, cos, positions), angles(op, sin, positions)
    axes = _axes(x)
    if axes == 4:
        return {0: rotate(op, x, cos, sin, static(x, 3) or part, part, interleaved)}
    size = static(x, 2)
    _require(axes == 3 and (heads == 0 or size is not None), node, "queries or keys of unknown width")
    width = size // heads if heads and size is not None else part
    turned = rotate(op, op.heads(x, heads or -1, width), cos, sin, width, part, interleaved)
    return {0: op.Reshape(op.Transpose(turned, perm=[0, 2, 1, 3]), [0, 0, -1])}


def standard_rotary(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """RotaryEmbedding of opset 23; its tables broadcast, which ONNX Runtime's do not."""
    x, cos, sin, positions = (input_at(node, place) for place in range(4))
    width = static(x, 3) if x is not None and rank(x) == 4 else None
    heads = node.attributes.get_int("num_heads", 0)
    flat = width is None
    if flat:
        size = static(x, -1) if x is not None else None
        _require(heads > 0 and size is not None, node, "queries or keys of unknown width")
        width = size // heads
        x = op.heads(x, heads, width)
    part = node.attributes.get_int("rotary_embedding_dim", 0) or width
    # without positions the tables have a row for each token
    tables = [op.Gather(table, positions) if positions is not None else table for table in (cos, sin)]
    cos, sin = (op.Unsqueeze(table, [1]) for table in tables)
    turned = rotate(op, x, cos, sin, width, part, bool(node.attributes.get_int("interleaved", 0)))
    return {0: op.merged(turned, heads, width) if flat else turned}


def _axes(value: ir.Value) -> int | None:
    """Number of axes, also if only a value's transposition says it."""
    node = value.producer()
    if rank(value) is None and node is not None and node.op_type == "Transpose":
        return len(perm_of(node)) or None
    return rank(value)


def _require(condition: bool, node: ir.Node, what: str) -> None:
    if not condition:
        raise ExportError(f"{node.op_type} node {node.name!r} has {what}: it cannot be expanded")
