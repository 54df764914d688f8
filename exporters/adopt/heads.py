"""Heads on an axis of their own: products and softmaxes in the one form that the recogniser knows."""

import onnx_ir as ir

from exporters.adopt.flow import KEEPING, climb, perm_of, rank

TURNED_AT_ONCE = (0, 2, 3, 1)  # [batch, seq, heads, head_dim] -> [batch, heads, head_dim, seq]
STEPS = ((0, 2, 1, 3), (0, 1, 3, 2))  # the same in two


def separate_heads(graph: ir.Graph) -> None:
    """Give batch, heads, queries and keys of attention axes of their own, in place.

    1. A softmax over scores whose batch and heads were merged into one axis comes before the merging.
    2. Keys that are turned while their heads are split off are split first, and turned then.
    """
    for node in list(graph):
        if node.op_type == "Softmax":
            _before_merging(graph, node)
        elif node.op_type == "Transpose" and perm_of(node) == TURNED_AT_ONCE:
            _in_two_steps(graph, node)


def _before_merging(graph: ir.Graph, softmax: ir.Node) -> None:
    merged = climb(softmax.inputs[0], KEEPING)
    merge, last = merged.producer(), softmax.attributes.get_int("axis", -1)
    if merge is None or merge.op_type != "Reshape" or rank(merged) != 3 or last not in (-1, 2):
        return
    scores = merge.inputs[0]
    if rank(scores) != 4 or scores.shape[-1] != merged.shape[-1]:
        return
    weights = ir.node("Softmax", [scores], attributes={"axis": -1})
    weights.outputs[0].type, weights.outputs[0].shape = scores.type, scores.shape
    after = ir.node("Reshape", [weights.outputs[0], merge.inputs[1]], attributes=merge.attributes)
    after.outputs[0].type, after.outputs[0].shape = merged.type, merged.shape
    readers, graph_output = list(softmax.outputs[0].uses()), softmax.outputs[0].is_graph_output()
    if graph_output or softmax.inputs[0] is not merged:  # a rounding between the two is kept as it is
        return
    graph.insert_after(softmax, [weights, after])
    for node, place in readers:
        node.replace_input_with(place, after.outputs[0])
    graph.remove(softmax, safe=True)
    if not merged.uses() and not merged.is_graph_output():
        graph.remove(merge, safe=True)


def _in_two_steps(graph: ir.Graph, node: ir.Node) -> None:
    first = ir.node("Transpose", [node.inputs[0]], attributes={"perm": STEPS[0]})
    value = first.outputs[0]
    value.type, shape = node.inputs[0].type, node.inputs[0].shape
    if shape is not None:
        value.shape = ir.Shape([shape[axis] for axis in STEPS[0]])
    graph.insert_before(node, first)
    node.replace_input_with(0, value)
    node.attributes["perm"] = ir.AttrInt64s("perm", STEPS[1])
