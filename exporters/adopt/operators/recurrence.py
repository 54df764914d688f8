"""Short convolutions and recurrences of ONNX Runtime: LinearAttention, CausalConvWithState, LinearAttentionGate.

An expansion writes what `exporters.transformers.recurrent` traces: nodes `Columns` and `Recurrence`, of which
`exporters.recurrence` makes operators once each has a layer. Padding neither writes nor forgets, and a convolution
passes over it, as in hooked models; the fused operators heed no mask. A marked node carries what is known of its
layer, `MarkedMixer`, in its `meta`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from exporters.adopt.flow import static
from exporters.adopt.operators.decoder_writer import STATE_KIND, DecoderWriter, input_at, kind_of, width_of
from exporters.recurrence.columns import COLUMNS
from exporters.recurrence.expand import FORGETS_ALL, RECURRENCE
from mionnx.errors import ExportError
from mionnx.graph.io_names import STATE
from mionnx.graph.layers import Recurrence

MARKED = "adopted"  # key of a node's `meta`
LAYER_RULES = {"gated": "gated", "gated_delta": "delta"}  # rules of the operator -> of a layer
# Attributes of a convolution that is causal in one axis, its columns side by side, on any engine; with these defaults.
PLAIN_CONVOLUTION = {"ndim": 1, "dilation": 1, "state_window": 0, "state_update_capacity": 0, "state_length": 0} | {
    "state_channels_last": -1,
    "input_channels": 0,
    "input_channel_offset": 0,
}


@dataclass(frozen=True)
class MarkedMixer:
    """What a marked node shows of its layer.

    Attributes:
        points: hook name within the layer and value, in execution order.
        carried: part of what the layer carries -> its input and its output of the graph.
        recurrence: the sizes that it knows.
    """

    points: list[tuple[str, ir.Value]]
    carried: Mapping[str, tuple[ir.Value, ir.Value]]
    recurrence: Recurrence


def convolution(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """CausalConvWithState: a sum of shifted columns, each channel by itself, and those that it carries on."""
    x, weight, bias, past = (input_at(node, place) for place in range(4))
    for name, plain in PLAIN_CONVOLUTION.items():
        _require(node.attributes.get_int(name, plain) == plain, node, f"the attribute {name}")
    channels, kernel = static(weight, 0), static(weight, 2)
    _require(bool(channels and kernel and kernel > 1), node, "a kernel of unknown size")
    last = bool(node.attributes.get_int("channels_last", 0))
    carried = (past is not None and static(past, 1 if last else 2)) or kernel - 1
    _require(carried >= kernel - 1, node, f"a past of {carried} columns for a kernel of {kernel}")
    _carried(node, past, (carried, channels) if last else (channels, carried))
    joined = op.Concat(past, x, axis=1 if last else 2)
    columns = op.Reshape(joined if last else op.Transpose(joined, perm=[0, 2, 1]), [-1, channels])
    reads = op.marked(COLUMNS, [x, op.real()], [(None,)] * (carried + 2), layer=0, kernel=carried + 1)
    *places, keep = reads.outputs
    rows = op.split(op.Transpose(op.Squeeze(weight, [1]), perm=[1, 0]), [1] * kernel, axis=0)
    read = zip(places[-kernel:], rows, strict=True)
    result, *terms = (op.Mul(op.Gather(columns, at, axis=0), row) for at, row in read)
    for term in terms:
        result = op.Add(result, term)
    result = result if bias is None else op.Add(result, bias)
    if node.attributes.get_string("activation", "none") != "none":
        result = op.Mul(result, op.Sigmoid(result))
    batch = op.Slice(op.Shape(x), [0], [1], [0])
    result = op.Reshape(result, op.Concat(batch, [-1], [channels], axis=0))
    present = op.Reshape(op.Gather(columns, keep, axis=0), [-1, carried, channels])
    if not last:
        present = op.Transpose(present, perm=[0, 2, 1])
    own = Recurrence(channels=channels, kernel=carried + 1, gates=["convolution"])
    reads.meta[MARKED] = MarkedMixer([("ssm.hook_conv", result)], {STATE.parts[0]: (past, present)}, own)
    return {0: result if last else op.Transpose(result, perm=[0, 2, 1]), 1: present}


def gates(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """LinearAttentionGate: the log decay, scale softplus(a + shift), and the strength of writes, sigmoid(b)."""
    a, shift, scale, b = (input_at(node, place) for place in range(4))
    kind = kind_of(a)
    wide = a if kind == STATE_KIND else op.Cast(a, to=int(STATE_KIND))
    decay = op.Mul(op.Softplus(op.Add(wide, shift)), scale)
    decay = decay if kind == STATE_KIND else op.Cast(decay, to=int(kind))
    return {0: decay} if b is None else {0: decay, 1: op.Sigmoid(b)}


def linear_attention(op: DecoderWriter, node: ir.Node) -> dict[int, ir.Value]:
    """LinearAttention: S = exp(g) S + k (x) u, y = q S, by the gated or the gated delta rule."""
    q, k, v, past, g, b = (input_at(node, place) for place in range(6))
    rule = LAYER_RULES.get(node.attributes.get_string("update_rule", "gated_delta"))
    readers, heads = (node.attributes.get_int(name, 0) for name in ("q_num_heads", "kv_num_heads"))
    sizes = width_of(q), width_of(v)
    _require(rule is not None and g is not None and (b is not None or rule == "gated"), node, "another update_rule")
    _require(node.attributes.get_int("state_window", 0) == 0, node, "the attribute state_window")
    _require(None not in sizes and readers > 0 and heads % readers == 0, node, "heads of unknown size, or more of q")
    key, value, kind = sizes[0] // readers, sizes[1] // heads, kind_of(v, q)
    _carried(node, past, (heads, key, value))
    past.type = ir.TensorType(STATE_KIND)
    scale = node.attributes.get_float("scale", 0.0) or key**-0.5  # 0 is none: then it is that of the keys
    q, k = (_for_each(op, x, key, heads) for x in (q, k))
    q = q if scale == 1 else op.Mul(q, op.number(scale, kind))
    v, g = op.Reshape(v, [0, 0, heads, value]), op.Reshape(g, [0, 0, heads, -1])
    points = [("ssm.hook_q", q), ("ssm.hook_k", k), ("ssm.hook_v", v)]
    if b is not None and rule == "delta":
        b = op.Unsqueeze(b, [-1])
        b = op.Expand(b, [1, 1, heads, 1]) if static(node.inputs[5], 2) == 1 else b
        points.append(("ssm.hook_write", b))
    points.append(("ssm.hook_log_decay", g))
    real = op.Cast(op.Unsqueeze(op.real(), [2, 3]), to=int(STATE_KIND))
    decays = 1 if static(node.inputs[4], 2) == heads else key
    bounded = op.Clip(_wide(op, g, kind), op.number(FORGETS_ALL, STATE_KIND), op.number(0, STATE_KIND))
    reads = [_wide(op, q, kind), _wide(op, k, kind), op.Mul(_wide(op, v, kind), real), op.Mul(bounded, real), past]
    reads += [op.Mul(_wide(op, b, kind), real)] if b is not None and rule == "delta" else []
    for one, width in zip(reads, (key, key, value, decays, None, 1), strict=False):
        one.shape = one.shape if width is None else ir.Shape([None, None, heads, width])
    recurs = op.marked(RECURRENCE, reads, [(None, None, heads, value), (None, heads, key, value)], layer=0)
    y, state = recurs.outputs
    y = y if kind == STATE_KIND else op.Cast(y, to=int(kind))
    points += [("ssm.hook_y", y), ("ssm.hook_state", state)]
    terms = ["write", *(["erase"] if rule == "delta" else []), "decay"]
    own = Recurrence(str(rule), heads, key, value, gates=terms)
    recurs.meta[MARKED] = MarkedMixer(points, {STATE.parts[1]: (past, state)}, own)
    node.outputs[1].type = ir.TensorType(STATE_KIND)
    return {0: op.Reshape(y, [0, 0, heads * value]), 1: state}


def _for_each(op: DecoderWriter, x: ir.Value, width: int, heads: int) -> ir.Value:
    """[batch, seq, groups * width] as [batch, seq, heads, width]: each head reads its group's."""
    groups = (width_of(x) or 0) // width
    x = op.Reshape(x, [0, 0, groups or heads, width])
    if groups in (0, heads):
        return x
    return op.Reshape(op.Expand(op.Unsqueeze(x, [3]), [1, 1, 1, heads // groups, 1]), [0, 0, heads, width])


def _wide(op: DecoderWriter, x: ir.Value, kind: ir.DataType) -> ir.Value:
    return x if kind == STATE_KIND else op.Cast(x, to=int(STATE_KIND))


def _carried(node: ir.Node, past: ir.Value | None, sizes: tuple[int, ...]) -> None:
    """Refuse what a node carries where it is no input of the graph; its sizes are written down."""
    _require(past is not None and past.is_graph_input(), node, "no past that is an input of the graph")
    past.shape = ir.Shape(["batch", *sizes])


def _require(condition: bool, node: ir.Node, what: str) -> None:
    if not condition:
        raise ExportError(f"{node.op_type} node {node.name!r} has {what}: it cannot be expanded")
