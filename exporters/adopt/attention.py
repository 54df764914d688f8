"""Attention of one layer, from the softmax outwards."""

from dataclasses import dataclass

import onnx_ir as ir

from exporters.adopt.flow import CONTENT_KEEPING, Flow, Origin, climb, perm_of, rank
from exporters.adopt.linear import is_linear, weight_of
from exporters.adopt.rotation import HEADS_FIRST, Heads, heads_of
from exporters.adopt.stream import weighs_values
from mionnx.errors import ExportError

MERGED = 3  # axes of scores whose batch and heads are one axis
AFTER_SOFTMAX = frozenset(("Cast", "Where", "Identity", "Dropout", "Mul", "Reshape", "Slice"))
AFTER_SCORES = CONTENT_KEEPING | {"Add", "Mul", "Div", "Tanh", "Where", "Slice", "Concat", "Sub", "Max"}


@dataclass(frozen=True)
class AttentionValues:
    """The values of one layer's attention.

    Attributes:
        queries, keys, values: with their heads.
        scores: the softmax's input, without a sink's column.
        pattern: the weights that values are summed with.
        z: [batch, seq, heads, head_dim], the heads' outputs.
        out: what is added to the stream.
        projection: the matrix of the output projection; `rows` whether it is stored [in, out].
        sink: whether the softmax has a column that belongs to no key.
        queries_keys, pattern_values: the two products.
    """

    queries: Heads
    keys: Heads
    values: Heads
    scores: ir.Value
    pattern: ir.Value
    z: ir.Value
    out: ir.Value
    projection: ir.Value
    rows: bool
    sink: bool
    queries_keys: ir.Node
    pattern_values: ir.Node

    def points(self) -> list[tuple[str, ir.Value]]:
        """Hook name within the layer and value, in execution order."""
        q, k = self.queries, self.keys
        points = [("attn.hook_q", q.unrotated or q.value), ("attn.hook_k", k.unrotated or k.value)]
        points += [("attn.hook_rot_q", q.value)] if q.unrotated is not None else []
        points += [("attn.hook_rot_k", k.value)] if k.unrotated is not None else []
        points += [("attn.hook_v", self.values.value), ("attn.hook_scores", self.scores)]
        return [*points, ("attn.hook_pattern", self.pattern), ("attn.hook_z", self.z), ("hook_attn_out", self.out)]


def find_attention(flow: Flow, layer: int, top: ir.Value, out: ir.Value) -> AttentionValues:
    """Recognise the attention between a layer's stream and the value that it adds.

    Raises:
        ExportError: something that is no softmax attention with one product before and one after it.
    """
    nodes = flow.between(top, out)
    patterns = [node for node in nodes if node.op_type == "Softmax" and weighs_values(flow, node)]
    if len(patterns) != 1:
        raise ExportError(f"layer {layer}: {len(patterns)} attention patterns in one branch")
    pattern, product = _pattern(flow, layer, patterns[0])
    scores = _scores(flow, patterns[0])
    queries_keys = _product_of_scores(flow, layer, top, scores)
    queries, keys = (heads_of(flow, value) for value in queries_keys.inputs[:2] if value is not None)
    values = heads_of(flow, product.inputs[1])
    z = _heads_output(flow, layer, product.outputs[0])
    projection = next((node for node in flow.between(z, out) if is_linear(flow, node)), None)
    if projection is None:
        raise ExportError(f"layer {layer}: no matrix multiplies the outputs of the heads")
    weight, rows = weight_of(projection)
    sink = scores is not patterns[0].inputs[0]
    return AttentionValues(queries, keys, values, scores, pattern, z, out, weight, rows, sink, queries_keys, product)


def _pattern(flow: Flow, layer: int, softmax: ir.Node) -> tuple[ir.Value, ir.Node]:
    """The weights of a softmax, [batch, heads, seq_q, seq_k], and their product with the values.

    The product may read them with other axes: batch and heads as one, or queries and the heads that share keys.
    """
    value = weights = softmax.outputs[0]
    reshaped = False
    while True:
        reshaped |= rank(weights) == MERGED + 1 and value.producer().op_type == "Reshape"
        weights = weights if reshaped else value
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
        text = flow.text(node)
        shifts = node.op_type == "Sub" and _is_maximum(node.inputs[1], node.inputs[0])
        sink = node.op_type == "Concat" and len(text) == 1 and _follows_constants(flow, node)
        if not (shifts or sink):
            break
        value = node.inputs[0] if shifts else text[0]
        if sink:
            return value
    return softmax.inputs[0]


def _is_maximum(value: ir.Value | None, of: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return node is not None and node.op_type == "ReduceMax" and node.inputs[0] is of


def _follows_constants(flow: Flow, node: ir.Node) -> bool:
    """Whether the other inputs of a `Concat` are constants, made as long as the call."""
    others = [value for value in node.inputs if value is not None and not flow.is_text(value)]
    return bool(others) and all(flow.origin.get(climb(value)) == Origin.CONSTANT for value in others)


def _product_of_scores(flow: Flow, layer: int, top: ir.Value, scores: ir.Value) -> ir.Node:
    """The product of queries and keys, above masks, scales and soft caps."""
    value = scores
    while True:
        node = value.producer()
        if node is None:
            raise ExportError(f"layer {layer}: the scores follow from the input {value.name}")
        if node.op_type == "MatMul" and len(flow.text(node)) == 2:
            return node
        inner = [one for one in flow.text(node) if _has_product(flow, top, one)]
        if not inner or node.op_type not in AFTER_SCORES:
            raise ExportError(f"layer {layer}: the scores come from {node.op_type}, no product of queries and keys")
        value = inner[0]


def _has_product(flow: Flow, top: ir.Value, value: ir.Value) -> bool:
    return any(node.op_type == "MatMul" and len(flow.text(node)) == 2 for node in flow.between(top, value))


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
