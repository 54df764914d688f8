"""Attention of one layer, from the softmax outwards; queries, keys and values up to the heads, before rotation too."""

from dataclasses import dataclass, replace
from itertools import islice

import onnx_ir as ir

from exporters.adopt.flow import (
    CONTENT_KEEPING,
    KEEPING,
    ROUNDING_OPERATORS,
    ROW_LOOKUPS,
    SIZE_OPERATORS,
    Flow,
    Origin,
    climb,
    input_of,
    is_linear,
    makers_of,
    perm_of,
    present,
    rank,
    static,
    walk,
    weight_of,
)
from mionnx.errors import ExportError

MERGED = 3  # axes of scores whose batch and heads are one axis, and of heads' outputs in one
GATES = frozenset(("Sigmoid", "Softplus"))
AFTER_SOFTMAX = frozenset(("Cast", "Where", "Identity", "Dropout", "Mul", "Reshape", "Slice"))
FARTHEST = 8  # nodes from a softmax to its product with values
AFTER_SCORES = CONTENT_KEEPING | {"Add", "Mul", "Div", "Tanh", "Where", "Slice", "Concat", "Sub", "Max"}
HEADS_FIRST = (0, 2, 1, 3)  # [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
TURNED = ((0, 1, 3, 2), (0, 2, 1))  # keys for their product with queries
ROTATION = "RotaryEmbedding"
ROTATES = frozenset(("Add", "Sub", "Concat", "Mul", "ScatterND", "Reshape", "Transpose", ROTATION))
ANGLE_LOOKUPS = ROW_LOOKUPS | {"GatherElements", "GatherND"}
LONGEST = 40  # nodes of a rotation
DEEPEST = 60  # nodes from an angle's cosine


@dataclass(frozen=True)
class Heads:
    """One of queries, keys and values, [batch, heads, seq, head_dim]."""

    value: ir.Value  # after rotation, where there is one
    unrotated: ir.Value | None = None  # before rotation; None without one
    joined: ir.Node | None = None  # the node that appends it to the past; None without one
    seq_first: bool = False  # whether the heads are rotated, and `unrotated` is, [batch, seq, heads, head_dim]


@dataclass(frozen=True)
class AttentionValues:
    """The values of one layer's attention."""

    queries: Heads
    keys: Heads
    values: Heads
    scores: ir.Value  # the softmax's input, without a sink's column
    pattern: ir.Value  # the weights that values are summed with
    z: ir.Value  # [batch, seq, heads, head_dim], the heads' outputs
    out: ir.Value  # what is added to the stream
    projection: ir.Value  # the matrix of the output projection; `rows` whether it is stored [in, out]
    rows: bool
    sink: bool  # whether the softmax has a column that belongs to no key
    # queries_keys, pattern_values: the two products.
    queries_keys: ir.Node
    pattern_values: ir.Node
    # What the output projection reads where that is z times a gate, [batch, seq, heads * head_dim].
    gated: ir.Value | None = None
    heads: int = 0  # of it
    gate: ir.Value | None = None  # what the gate's function reads, [batch, seq, heads or heads * head_dim]

    def points(self) -> list[tuple[str, ir.Value]]:
        """Hook name within the layer and value, in execution order."""
        q, k = self.queries, self.keys
        points = [("attn.hook_q", q.unrotated or q.value), ("attn.hook_k", k.unrotated or k.value)]
        points += [("attn.hook_rot_q", q.value)] if q.unrotated is not None else []
        points += [("attn.hook_rot_k", k.value)] if k.unrotated is not None else []
        points += [("attn.hook_v", self.values.value), ("attn.hook_scores", self.scores)]
        points += [("attn.hook_gate", self.gate)] if self.gate is not None else []
        z = self.z if self.gated is None else self.gated
        return [*points, ("attn.hook_pattern", self.pattern), ("attn.hook_z", z), ("hook_attn_out", self.out)]


def find_attention(flow: Flow, layer: int, top: ir.Value, out: ir.Value) -> AttentionValues:
    """Recognise the softmax attention, one product before and one after it, between a stream and the value it adds."""
    patterns = attention_patterns(flow, top, out)
    if len(patterns) != 1:
        raise ExportError(f"layer {layer}: {len(patterns)} attention patterns in one branch")
    pattern, product = _pattern(flow, layer, patterns[0])
    scores = _scores(flow, patterns[0])
    queries_keys = _product_of_scores(flow, layer, top, scores)
    queries, keys, values = (_heads_of(flow, one) for one in (*queries_keys.inputs[:2], product.inputs[1]))
    z = _heads_output(flow, layer, product.outputs[0])
    projection = _projection(flow, top, z, out)
    if projection is None:
        raise ExportError(f"layer {layer}: no matrix multiplies the outputs of the heads")
    weight, rows = weight_of(projection)
    sink, read, heads = scores is not patterns[0].inputs[0], input_of(flow, projection), static(z, 2)
    own = AttentionValues(queries, keys, values, scores, pattern, z, out, weight, rows, sink, queries_keys, product)
    # behind a gate, which is made of the text on another way, z is no dominator
    if z in flow.chain(read, top) or heads is None:
        return own
    return replace(own, gated=read, heads=heads, gate=_gate(flow, top, z, read))


def _gate(flow: Flow, top: ir.Value, z: ir.Value, read: ir.Value) -> ir.Value | None:
    """What the function of a gate reads that the outputs of the heads are multiplied with, heads merged."""
    follows = {z}
    for node in flow.between(top, read):
        own = [value for value in present(node.inputs) if value not in follows]
        if len(own) == len(present(node.inputs)):
            continue
        follows.update(node.outputs)
        function = climb(own[0]).producer() if node.op_type == "Mul" and own else None
        if function is not None and function.op_type in GATES and rank(function.inputs[0]) == MERGED:
            return function.inputs[0]
    return None


def _projection(flow: Flow, top: ir.Value, z: ir.Value, out: ir.Value) -> ir.Node | None:
    """The first linear map that reads what follows from the outputs of the heads."""
    follows = {z}
    for node in flow.between(top, out):
        if not follows.isdisjoint(present(node.inputs)):
            if is_linear(flow, node):
                return node
            follows.update(node.outputs)
    return None


def _pattern(flow: Flow, layer: int, softmax: ir.Node) -> tuple[ir.Value, ir.Node]:
    """The weights of a softmax, [batch, heads, seq_q, seq_k], and their product with the values."""
    # The product may read them with other axes: batch and heads as one, or queries and the heads that share keys.
    value = weights = softmax.outputs[0]
    reshaped = False
    while True:
        # four axes before a reshape are the pattern; what follows has batch and heads merged for the product
        reshaped |= rank(weights) == MERGED + 1 and value.producer().op_type == "Reshape"
        weights = weights if reshaped else value
        # an exported softmax may be tested for NaN: that reader is no product
        users = [user for user in flow.readers(value) if flow.is_text(user.outputs[0]) and user.op_type != "IsNaN"]
        product = next((user for user in users if user.op_type == "MatMul"), None)
        if product is not None:
            return weights, product
        if not users or users[0].op_type not in AFTER_SOFTMAX:
            names = ", ".join(user.op_type for user in users) or "nothing"
            raise ExportError(f"layer {layer}: {names} reads the attention pattern, and no product with values")
        value = users[0].outputs[0]


def _scores(flow: Flow, softmax: ir.Node) -> ir.Value:
    """A softmax's input, above a shift by its maximum and a sink's column."""
    value = softmax.inputs[0]
    while (node := value.producer()) is not None:
        text, others = flow.text(node), flow.others(node)
        shift = node.inputs[1].producer() if node.op_type == "Sub" and node.inputs[1] is not None else None
        # x - max(x), written out against overflow: it changes no pattern
        if shift is not None and shift.op_type == "ReduceMax" and shift.inputs[0] is node.inputs[0]:
            value = node.inputs[0]
        # a column of constants, made as long as the call
        elif node.op_type == "Concat" and len(text) == 1 and others and flow.constant(climb(one) for one in others):
            return text[0]
        else:
            break
    return softmax.inputs[0]


def _product_of_scores(flow: Flow, layer: int, top: ir.Value, scores: ir.Value) -> ir.Node:
    """The product of queries and keys, above masks, scales and soft caps."""

    def multiplies(node: ir.Node) -> bool:
        return node.op_type == "MatMul" and len(flow.text(node)) == 2

    value = scores
    while True:
        node = value.producer()
        if node is None:
            raise ExportError(f"layer {layer}: the scores follow from the input {value.name}")
        if multiplies(node):
            return node
        # a mask may depend on the text too: the way goes up to the product of two values of text
        inner = [one for one in flow.text(node) if any(map(multiplies, flow.between(top, one)))]
        if not inner or node.op_type not in AFTER_SCORES:
            raise ExportError(f"layer {layer}: the scores come from {node.op_type}, no product of queries and keys")
        value = inner[0]


def _heads_output(flow: Flow, layer: int, value: ir.Value) -> ir.Value:
    """The outputs of the heads with the positions before them."""
    while True:
        users = flow.readers(value)
        if len(users) != 1:
            raise ExportError(f"layer {layer}: {len(users)} nodes read pattern times values")
        node = users[0]
        if node.op_type == "Transpose" and perm_of(node) == HEADS_FIRST:
            return node.outputs[0]
        if node.op_type not in CONTENT_KEEPING:
            raise ExportError(f"layer {layer}: {node.op_type} reads pattern times values")
        value = node.outputs[0]


def _heads_of(flow: Flow, value: ir.Value | None) -> Heads:
    """Climb from an operand of an attention product."""
    joined = None
    while True:
        node = None if value is None else value.producer()
        if value is None or node is None:
            name = None if value is None else value.name
            raise ExportError(f"an operand of attention comes from the input {name}, not from the text")
        text = flow.text(node)
        past = any(flow.origin.get(one) == Origin.PAST for one in present(node.inputs))
        if node.op_type == "Concat" and joined is None and past:
            joined, value = node, text[0]
        elif node.op_type == "Transpose" and perm_of(node) == HEADS_FIRST:
            merge = climb(text[0], CONTENT_KEEPING | ROUNDING_OPERATORS).producer()
            # a rotation may come before the heads are brought ahead
            if merge is None or perm_of(merge) != HEADS_FIRST:
                unrotated = _rotated_from(flow, climb(text[0], KEEPING))
                return Heads(value, unrotated, joined, unrotated is not None)
            value = merge.inputs[0]  # the heads were merged before
        elif _leaves_heads(flow, node):
            value = text[0]
        else:
            return Heads(value, _rotated_from(flow, value), joined)


def _leaves_heads(flow: Flow, node: ir.Node) -> bool:
    """Whether a node turns, repeats, rounds or scales heads, and does nothing else."""
    if node.op_type == "Transpose":
        return perm_of(node) in TURNED
    if node.op_type in ("Mul", "Div"):
        return len(flow.text(node)) == 1 and not _multiplies_angles(flow, node)
    return node.op_type in CONTENT_KEEPING | ROUNDING_OPERATORS


def _rotated_from(flow: Flow, value: ir.Value) -> ir.Value | None:
    """The value before a rotation; None if a value is not made by one."""
    # A rotation is all that lies between a value and its dominator, if it multiplies with cosines and with no matrix.
    below = value
    while (node := below.producer()) is not None and len(flow.text(node)) == 1 and node.op_type != ROTATION:
        if node.op_type not in CONTENT_KEEPING:
            return None
        below = flow.text(node)[0]
    if node is None or node.op_type not in ROTATES:
        return None
    top = flow.above(below)
    nodes = flow.between(top, below)
    products = [node for node in nodes if node.op_type == "Mul" and len(flow.text(node)) == 1]
    turns = any(node.op_type == ROTATION for node in nodes) or any(_multiplies_angles(flow, one) for one in products)
    return top if turns and len(nodes) < LONGEST and not any(is_linear(flow, node) for node in nodes) else None


def _multiplies_angles(flow: Flow, node: ir.Node) -> bool:
    """Whether a product's other factor changes with the position: a cosine or sine, no scale."""
    other = next(iter(flow.others(node)), None)
    if other is None or rank(other) == 0 or flow.origin.get(other) != Origin.CALL:
        return False
    above = walk([other.producer()], lambda one: () if one.op_type in SIZE_OPERATORS else makers_of(one))
    return any(one.op_type in ("Cos", "Sin") or _looks_up_angles(flow, one) for one in islice(above, DEEPEST))


def _looks_up_angles(flow: Flow, node: ir.Node) -> bool:
    """Whether a node picks rows of a constant table of fractions by positions."""
    if node.op_type not in ANGLE_LOOKUPS or node.inputs[0] is None or node.inputs[1] is None:
        return False
    table, rows = climb(node.inputs[0]), node.inputs[1]
    fractions = table.dtype is not None and table.dtype.is_floating_point()
    return flow.constant([table]) and flow.origin.get(rows) == Origin.CALL and fractions


def attention_patterns(flow: Flow, top: ir.Value, bottom: ir.Value) -> list[ir.Node]:
    """The softmaxes between two values that are multiplied with values."""
    return [node for node in flow.between(top, bottom) if node.op_type == "Softmax" and _weighs_values(flow, node)]


def _weighs_values(flow: Flow, softmax: ir.Node) -> bool:
    """Whether a product with values reads a softmax: it is an attention pattern, no router."""
    value = softmax.outputs[0]
    for _ in range(FARTHEST):
        users = [user for user in flow.readers(value) if user.op_type != "IsNaN"]
        if not users:
            return False
        if users[0].op_type == "MatMul":
            return len(flow.text(users[0])) > 1  # values follow from the text, as the pattern does
        value = users[0].outputs[0]
    return False
