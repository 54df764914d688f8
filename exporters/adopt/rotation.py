"""Queries, keys and values: from an operand of an attention product up to the heads, before and after rotation."""

from dataclasses import dataclass

import onnx_ir as ir

from exporters.adopt.flow import (
    CONTENT_KEEPING,
    KEEPING,
    ROW_LOOKUPS,
    SIZE_OPERATORS,
    Flow,
    Origin,
    climb,
    perm_of,
    rank,
)
from exporters.adopt.linear import ROUNDING_OPERATORS, is_linear
from mionnx.errors import ExportError

HEADS_FIRST = (0, 2, 1, 3)  # [batch, seq, heads, head_dim] -> [batch, heads, seq, head_dim]
TURNED = ((0, 1, 3, 2), (0, 2, 1))  # keys for their product with queries
ROTATION = "RotaryEmbedding"
ROTATES = frozenset(("Add", "Sub", "Concat", "Mul", "ScatterND", "Reshape", "Transpose", ROTATION))
ANGLE_LOOKUPS = ROW_LOOKUPS | {"GatherElements", "GatherND"}
LONGEST = 40  # nodes of a rotation
DEEPEST = 60  # nodes from an angle's cosine


@dataclass(frozen=True)
class Heads:
    """One of queries, keys and values, [batch, heads, seq, head_dim].

    Attributes:
        value: after rotation, where there is one.
        unrotated: before rotation; None without one.
        joined: the node that appends it to the past; None without one.
        seq_first: whether the heads are rotated, and `unrotated` is, [batch, seq, heads, head_dim].
    """

    value: ir.Value
    unrotated: ir.Value | None = None
    joined: ir.Node | None = None
    seq_first: bool = False


def heads_of(flow: Flow, value: ir.Value) -> Heads:
    """Climb from an operand of an attention product.

    Raises:
        ExportError: the operand is an input of the graph.
    """
    joined = None
    while True:
        node = value.producer()
        if node is None:
            raise ExportError(f"an operand of attention comes from the input {value.name}, not from the text")
        text = flow.text(node)
        if node.op_type == "Concat" and joined is None and any(_is_past(flow, one) for one in node.inputs):
            joined, value = node, text[0]
        elif node.op_type == "Transpose" and perm_of(node) == HEADS_FIRST:
            merged = _merged_heads(text[0])
            if merged is None:
                unrotated = rotated_from(flow, climb(text[0], KEEPING))
                return Heads(value, unrotated, joined, unrotated is not None)
            value = merged
        elif _leaves_heads(flow, node):
            value = text[0]
        else:
            return Heads(value, rotated_from(flow, value), joined)


def _merged_heads(value: ir.Value) -> ir.Value | None:
    """The heads that a value was merged from, [batch, heads, seq, head_dim]; None if from none."""
    node = climb(value, CONTENT_KEEPING | ROUNDING_OPERATORS).producer()
    return node.inputs[0] if node is not None and perm_of(node) == HEADS_FIRST else None


def _leaves_heads(flow: Flow, node: ir.Node) -> bool:
    """Whether a node turns, repeats, rounds or scales heads, and does nothing else."""
    if node.op_type == "Transpose":
        return perm_of(node) in TURNED
    if node.op_type in ("Mul", "Div"):
        return len(flow.text(node)) == 1 and not multiplies_angles(flow, node)
    return node.op_type in CONTENT_KEEPING or node.op_type in ROUNDING_OPERATORS


def _is_past(flow: Flow, value: ir.Value | None) -> bool:
    return value is not None and flow.origin.get(value) == Origin.PAST


def rotated_from(flow: Flow, value: ir.Value) -> ir.Value | None:
    """The value before a rotation; None if a value is not made by one.

    A rotation is all that lies between a value and its dominator, if it multiplies with cosines and with no matrix.
    """
    below = value
    while (node := below.producer()) is not None and len(flow.text(node)) == 1 and node.op_type != ROTATION:
        if node.op_type not in CONTENT_KEEPING:
            return None
        below = flow.text(node)[0]
    if node is None or node.op_type not in ROTATES:
        return None
    top = flow.above(below)
    nodes = flow.between(top, below)
    turns = any(node.op_type == ROTATION or _multiplies(flow, node) for node in nodes)
    return top if turns and len(nodes) < LONGEST and not any(is_linear(flow, node) for node in nodes) else None


def _multiplies(flow: Flow, node: ir.Node) -> bool:
    return node.op_type == "Mul" and len(flow.text(node)) == 1 and multiplies_angles(flow, node)


def multiplies_angles(flow: Flow, node: ir.Node) -> bool:
    """Whether a product's other factor changes with the position: a cosine or sine, no scale."""
    other = next((value for value in node.inputs if value is not None and not flow.is_text(value)), None)
    scalar = other is None or rank(other) == 0
    return not scalar and flow.origin.get(other) == Origin.CALL and _follows_from_angles(flow, other)


def _follows_from_angles(flow: Flow, value: ir.Value) -> bool:
    seen: set[ir.Node] = set()
    waiting = [value]
    while waiting and len(seen) < DEEPEST:
        node = waiting.pop().producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type in ("Cos", "Sin") or _looks_up_angles(flow, node):
            return True
        waiting += [] if node.op_type in SIZE_OPERATORS else [entry for entry in node.inputs if entry is not None]
    return False


def _looks_up_angles(flow: Flow, node: ir.Node) -> bool:
    """Whether a node picks rows of a constant table of fractions by positions."""
    if node.op_type not in ANGLE_LOOKUPS or node.inputs[0] is None or node.inputs[1] is None:
        return False
    table, rows = climb(node.inputs[0]), node.inputs[1]
    fractions = table.dtype is not None and table.dtype.is_floating_point()
    return flow.origin.get(table) == Origin.CONSTANT and flow.origin.get(rows) == Origin.CALL and fractions
