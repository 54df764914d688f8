"""The router of a mixture of experts: its logits, the experts that each token goes through, and their weights."""

from collections.abc import Collection
from dataclasses import dataclass, field

import onnx_ir as ir

from exporters.adopt.flow import KEEPING, Flow, Origin, climb, rank, static
from exporters.adopt.linear import is_linear, output_of

MIXTURES = frozenset(("QMoE", "MoE"))
ROUTING_OPERATORS = MIXTURES | {"TopK"}
# What keeps the order of one token's logits; a sigmoid makes large ones the same.
RISING = frozenset(("Softmax", "Cast", "Identity", "Reshape"))


@dataclass(frozen=True)
class Router:
    """The values of one layer's router.

    Attributes:
        points: hook name within the layer and value, in execution order.
        flat: those of them with batch and seq as one axis; value -> size of its last axis.
        notes: which hook points it has not, and why.
    """

    points: list[tuple[str, ir.Value]] = field(default_factory=list)
    flat: dict[ir.Value, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_router(flow: Flow, layer: int, nodes: list[ir.Node]) -> Router:
    """Recognise the router among the nodes of an MLP.

    Its logits are the linear map that a choice of the largest follows from, or that an operator of experts reads. The
    choice itself is a value only where a node makes it; inside an operator of experts there is none.
    """
    neurons = f"layer {layer}: mlp.hook_expert_gate, hook_expert_up, hook_expert_act, hook_expert_out"
    notes = [f"{neurons}: experts are not taken apart"]
    choices = [node for node in nodes if node.op_type in ROUTING_OPERATORS]
    maps = {output_of(flow, node) for node in nodes if is_linear(flow, node)}
    logits = _logits_of(flow, choices[0], maps) if len(choices) == 1 else None
    if logits is None or not _shaped(logits):
        what = f"layer {layer}: mlp.hook_router_logits"
        return Router(notes=[*notes, f"{what}: no one linear map of known size that experts are chosen by"])
    chosen = _chosen(flow, choices[0]) if choices[0].op_type == "TopK" else []
    if not chosen:
        where = "no one value of each" if choices[0].op_type == "TopK" else f"inside of {choices[0].op_type} only"
        notes.append(f"layer {layer}: mlp.hook_expert_indices, hook_expert_weights: {where}")
    points = [("mlp.hook_router_logits", logits), *chosen]
    return Router(points, {value: size for _, value in points if (size := _flat(value)) is not None}, notes)


def _shaped(value: ir.Value) -> bool:
    """Whether the axes of a value are [batch, seq, n], or [batch * seq, n] with a known n."""
    return rank(value) == 3 or _flat(value) is not None


def _flat(value: ir.Value) -> int | None:
    """The size of the last axis of a value with batch and seq as one; None of any other."""
    return static(value, -1) if rank(value) == 2 else None


def _logits_of(flow: Flow, choice: ir.Node, maps: Collection[ir.Value]) -> ir.Value | None:
    """The output of the linear map before a choice; None if anything else lies between.

    Args:
        choice: the node that chooses experts, or holds them.
        maps: outputs of linear maps.
    """
    value = choice.inputs[0 if choice.op_type == "TopK" else 1]
    while value is not None and value not in maps and (node := value.producer()) is not None:
        text = flow.text(node)
        if len(text) != 1 or not (node.op_type in RISING or _is_bias(flow, node)):
            return None
        value = text[0]
    return value if value in maps else None


def _is_bias(flow: Flow, node: ir.Node) -> bool:
    """Whether a node adds a constant to the product of a linear map."""
    product, constants = flow.text(node)[0].producer(), _others(flow, node)
    constant = all(flow.origin.get(value) == Origin.CONSTANT for value in constants)
    return node.op_type == "Add" and constant and product is not None and is_linear(flow, product)


def _others(flow: Flow, node: ir.Node) -> list[ir.Value]:
    """The inputs of a node that do not follow from the text."""
    return [value for value in node.inputs if value is not None and not flow.is_text(value)]


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
        elif len(users) == 2 and quotient is not None and _is_sum(quotient.inputs[1], value):
            value = quotient.outputs[0]
        else:
            return value


def _scales(flow: Flow, node: ir.Node) -> bool:
    """Whether a node multiplies with one constant number."""
    others = _others(flow, node)
    constant = all(flow.origin.get(value) == Origin.CONSTANT and rank(value) == 0 for value in others)
    return node.op_type == "Mul" and len(others) == 1 and constant


def _is_sum(value: ir.Value | None, of: ir.Value) -> bool:
    """Whether a value is the sum of another, kept from 0 by a small constant or not."""
    node = None if value is None else climb(value, KEEPING | {"Add", "Max", "Clip"}).producer()
    return node is not None and node.op_type == "ReduceSum" and node.inputs[0] is of
