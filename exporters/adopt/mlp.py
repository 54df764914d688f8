"""The MLP of one layer: neurons between two linear maps, gated or not, or a mixture of experts with its router."""

from collections.abc import Collection
from dataclasses import dataclass, field

import onnx_ir as ir

from exporters.adopt.flow import (
    KEEPING,
    SHAPE_OPERATORS,
    Flow,
    climb,
    input_of,
    is_linear,
    linear_maps,
    output_of,
    present,
    rank,
    static,
)

ROUTING_OPERATORS = frozenset(("QMoE", "MoE", "TopK"))
# What keeps the order of one token's logits; a sigmoid makes large ones the same.
RISING = frozenset(("Softmax", "Cast", "Identity", "Reshape"))


@dataclass(frozen=True)
class Mlp:
    """The values of one layer's MLP, or of its router: hook name within the layer and value, in execution order."""

    points: list[tuple[str, ir.Value]]
    notes: list[str] = field(default_factory=list)  # which hook points it has not, and why
    # Values of a router with batch and seq as one axis -> the size of the other axis.
    flat: dict[ir.Value, int] = field(default_factory=dict)


def find_mlp(flow: Flow, layer: int, top: ir.Value, out: ir.Value) -> Mlp:
    """Recognise the MLP between a layer's stream and the value that it adds."""
    nodes, maps = flow.between(top, out), linear_maps(flow, top, out)
    choices = [node for node in nodes if node.op_type in ROUTING_OPERATORS]
    if not choices and len(maps) > 1:
        return _between_two_maps(flow, layer, top, out, maps)
    why = "a mixture of experts" if choices else f"{len(maps)} linear maps"
    router = _router(flow, layer, nodes, choices) if choices else Mlp([])
    none = f"layer {layer}: mlp.hook_gate, hook_up, hook_act: {why} has no one value of neurons"
    return Mlp(_around(flow, top, out, maps, router.points), [none, *router.notes], router.flat)


def _around(
    flow: Flow, top: ir.Value, out: ir.Value, maps: list[ir.Node], routing: list[tuple[str, ir.Value]]
) -> list[tuple[str, ir.Value]]:
    """The points of an MLP without neurons: output, router, and input if there is one."""
    pre = input_of(flow, maps[0]) if maps else None
    dominates = pre is not None and pre in flow.chain(out, top)
    return [*([("mlp.hook_pre", pre)] if dominates else []), *routing, ("mlp.hook_post", out), ("hook_mlp_out", out)]


def _between_two_maps(flow: Flow, layer: int, top: ir.Value, out: ir.Value, maps: list[ir.Node]) -> Mlp:
    down = maps[-1]  # the last linear map leads back to the stream
    pre, act, post = input_of(flow, maps[0]), input_of(flow, down), output_of(flow, down)
    # not all that is added goes through this map's output: then what is added counts
    if post not in flow.chain(out, top):
        post = out
    ups = [output_of(flow, node) for node in maps if input_of(flow, node) is pre]
    ups = [part for value in ups for part in (_halves(flow, value) or [value])]
    names, notes = _neurons(layer, ups, act)
    points = [("mlp.hook_pre", pre), *names, ("mlp.hook_act", act), ("mlp.hook_post", post), ("hook_mlp_out", out)]
    return Mlp(points, notes)


def _neurons(layer: int, ups: list[ir.Value], act: ir.Value) -> tuple[list[tuple[str, ir.Value]], list[str]]:
    """Gate and up projection: of two, up is the factor of the neurons that passes no activation."""
    if len(ups) == 1:
        return [("mlp.hook_up", ups[0])], []
    product = act.producer()
    if len(ups) == 2 and product is not None and product.op_type == "Mul":
        factors = [climb(value, SHAPE_OPERATORS) for value in present(product.inputs)]
        # gate and up are multiplied: up as it is, gate behind its activation
        linear = [value for value in ups if climb(value, SHAPE_OPERATORS) in factors]
        if len(linear) == 1:
            gate = next(value for value in ups if value is not linear[0])
            return [("mlp.hook_gate", gate), ("mlp.hook_up", linear[0])], []
    return [], [f"layer {layer}: mlp.hook_gate, hook_up: {len(ups)} first linear maps, none a plain factor of neurons"]


def _halves(flow: Flow, value: ir.Value) -> list[ir.Value]:
    """Gate and up of a fused projection."""
    users = flow.readers(value)
    if len(users) == 1 and users[0].op_type == "Split":
        return list(users[0].outputs)
    if len(users) == 2 and all(user.op_type == "Slice" for user in users):
        return [user.outputs[0] for user in users]
    return []


def _router(flow: Flow, layer: int, nodes: list[ir.Node], choices: list[ir.Node]) -> Mlp:
    """Recognise the router among the nodes of an MLP."""
    # Its logits are the linear map that a choice of the largest follows from, or that an operator of experts reads. The
    # choice itself is a value only where a node makes it; inside an operator of experts there is none.
    neurons = f"layer {layer}: mlp.hook_expert_gate, hook_expert_up, hook_expert_act, hook_expert_out"
    notes = [f"{neurons}: experts are not taken apart"]
    maps = {output_of(flow, node) for node in nodes if is_linear(flow, node)}
    logits = _logits_of(flow, choices[0], maps) if len(choices) == 1 else None
    if logits is None or not _shaped(logits):
        what = f"layer {layer}: mlp.hook_router_logits"
        return Mlp([], [*notes, f"{what}: no one linear map of known size that experts are chosen by"])
    chosen = _chosen(flow, choices[0]) if choices[0].op_type == "TopK" else []
    if not chosen:
        where = "no one value of each" if choices[0].op_type == "TopK" else f"inside of {choices[0].op_type} only"
        notes.append(f"layer {layer}: mlp.hook_expert_indices, hook_expert_weights: {where}")
    points = [("mlp.hook_router_logits", logits), *chosen]
    return Mlp(points, notes, {value: size for _, value in points if (size := _flat(value)) is not None})


def _shaped(value: ir.Value) -> bool:
    """Whether the axes of a value are [batch, seq, n], or [batch * seq, n] with a known n."""
    return rank(value) == 3 or _flat(value) is not None


def _flat(value: ir.Value) -> int | None:
    """The size of the last axis of a value with batch and seq as one; None of any other."""
    return static(value, -1) if rank(value) == 2 else None


def _logits_of(flow: Flow, choice: ir.Node, maps: Collection[ir.Value]) -> ir.Value | None:
    """The output of the linear map before the node that chooses experts; None if anything else lies between."""
    # operators of experts read the logits beside the stream
    value = choice.inputs[0 if choice.op_type == "TopK" else 1]
    while value is not None and value not in maps and (node := value.producer()) is not None:
        text = flow.text(node)
        if len(text) != 1 or not (node.op_type in RISING or _is_bias(flow, node)):
            return None
        value = text[0]
    return value if value in maps else None


def _is_bias(flow: Flow, node: ir.Node) -> bool:
    """Whether a node adds a constant to the product of a linear map."""
    product, adds = flow.text(node)[0].producer(), node.op_type == "Add" and flow.constant(flow.others(node))
    return adds and product is not None and is_linear(flow, product)


def _chosen(flow: Flow, choice: ir.Node) -> list[tuple[str, ir.Value]]:
    """The indices and weights of chosen experts; empty if one of them is not read."""
    largest, indices = choice.outputs[:2]
    weights = _normalised(flow, largest)
    if not all(flow.readers(value) and _shaped(value) for value in (indices, weights)):
        return []
    return [("mlp.hook_expert_indices", indices), ("mlp.hook_expert_weights", weights)]


def _normalised(flow: Flow, value: ir.Value) -> ir.Value:
    """The final weights of experts: through a softmax, or divided by their sum."""
    while True:
        users = flow.readers(value)
        quotient = next((user for user in users if user.op_type == "Div" and user.inputs[0] is value), None)
        if len(users) == 1 and (users[0].op_type in ("Softmax", "Cast") or _scales(flow, users[0])):
            value = users[0].outputs[0]
        # one reader sums, the other divides by the sum
        elif len(users) == 2 and quotient is not None and _is_sum(quotient.inputs[1], value):
            value = quotient.outputs[0]
        else:
            return value


def _scales(flow: Flow, node: ir.Node) -> bool:
    """Whether a node multiplies with one constant number."""
    others = flow.others(node)
    return node.op_type == "Mul" and len(others) == 1 and flow.constant(others) and rank(others[0]) == 0


def _is_sum(value: ir.Value | None, of: ir.Value) -> bool:
    """Whether a value is the sum of another, kept from 0 by a small constant or not."""
    node = None if value is None else climb(value, KEEPING | {"Add", "Max", "Clip"}).producer()
    return node is not None and node.op_type == "ReduceSum" and node.inputs[0] is of
