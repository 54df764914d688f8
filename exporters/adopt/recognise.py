"""The hook points of a decoder's graph, layer by layer, recognised by its dataflow."""

from dataclasses import dataclass, field

import onnx_ir as ir

from exporters.adopt.attention import AttentionValues, find_attention
from exporters.adopt.flow import KEEPING, Flow, Origin, climb, perm_of, rank
from exporters.adopt.linear import input_of, linear_maps
from exporters.adopt.mlp import find_mlp
from exporters.adopt.stream import Step, has_attention, residual_steps
from mionnx.errors import ExportError

TURNED_AT_ONCE = (0, 2, 3, 1)  # [batch, seq, heads, head_dim] -> [batch, heads, head_dim, seq]
STEPS = ((0, 2, 1, 3), (0, 1, 3, 2))  # the same in two


@dataclass
class Recognised:
    """A decoder whose values are known.

    Attributes:
        points: hook name and value, in execution order; a value may have several names.
        sums: of a stream that is normed after its additions, the sums; hook name of the stream after one, and the sum.
        within: hook name of an MLP's input, and the nodes of the MLP: its other readers do not read the hook point.
        seq_first: the queries and keys that are rotated as [batch, seq, heads, head_dim].
        flat: values of a router with batch and seq as one axis; a value of the stream with both, and the other size.
        notes: the hook points that the graph has not, and why.
        windows: of each layer's own mask, where that has been looked at.
    """

    flow: Flow
    points: list[tuple[str, ir.Value]] = field(default_factory=list)
    attention: list[AttentionValues] = field(default_factory=list)
    sums: dict[str, ir.Value] = field(default_factory=dict)
    within: dict[str, set[ir.Node]] = field(default_factory=dict)
    seq_first: set[ir.Value] = field(default_factory=set)
    flat: dict[ir.Value, tuple[ir.Value, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    windows: list[int | None] | None = None


def sum_of(name: str) -> str:
    """Name of the sum that is normed to a value of the stream."""
    return f"{name}.sum"


def recognise(graph: ir.Graph) -> Recognised:
    """Find the hook points of a decoder whose fused operators have been expanded.

    Its heads are given axes of their own first.

    Raises:
        ExportError: what is found is no decoder with a residual stream, attention and MLPs.
    """
    separate_heads(graph)
    decoder = Recognised(Flow(graph))
    steps = residual_steps(decoder.flow)
    decoder.points += _embedding(decoder.flow, steps[0].before)
    for step in steps:
        _layer(decoder, step)
    if not decoder.attention:
        raise ExportError("no branch of the residual stream holds attention: the graph is no decoder of text")
    last = linear_maps(decoder.flow, steps[-1].after, decoder.flow.logits)
    if last and climb(input_of(decoder.flow, last[-1]), KEEPING) is climb(steps[-1].after, KEEPING):
        decoder.notes.append("hook_final_norm: the stream is normed after each addition, and no more behind the last")
    elif last:
        decoder.points.append(("hook_final_norm", input_of(decoder.flow, last[-1])))
    else:
        decoder.notes.append("hook_final_norm: no linear map makes the logits")
    decoder.points.append(("hook_logits", decoder.flow.logits))
    return decoder


def _embedding(flow: Flow, first: ir.Value) -> list[tuple[str, ir.Value]]:
    """The embedding as the first layer reads it, and learned positions."""
    inner = climb(first, KEEPING)
    node = inner.producer()
    if inner is not flow.embedding and node is not None and node.op_type == "Add" and len(flow.text(node)) == 1:
        (tokens,) = flow.text(node)
        positions = [value for value in node.inputs if value is not None and flow.origin.get(value) == Origin.CALL]
        if positions:
            return [("hook_embed", tokens), ("hook_pos_embed", positions[0])]
    return [("hook_embed", first)]


def _layer(decoder: Recognised, step: Step) -> None:
    """Add the points of one residual addition: a layer's attention, its MLP, or both."""
    flow, top = decoder.flow, step.before
    attends = {branch: has_attention(flow, top, branch) for branch in step.branches}
    if not decoder.attention and not any(attends.values()):
        raise ExportError("the first branch of the residual stream holds no attention: the graph is no decoder of text")
    layer = len(decoder.attention) - (not any(attends.values()))
    points = [("hook_resid_pre", top)] if any(attends.values()) else []
    for branch in sorted(step.branches, key=lambda branch: not attends[branch]):
        if attends[branch]:
            decoder.attention.append(find_attention(flow, layer, top, branch))
            rotated = (decoder.attention[-1].queries, decoder.attention[-1].keys)
            decoder.seq_first |= {one.unrotated for one in rotated if one.seq_first and one.unrotated is not None}
            points += decoder.attention[-1].points()
        else:
            mlp = find_mlp(flow, layer, top, branch)
            decoder.notes += mlp.notes
            decoder.flat |= {value: (top, size) for value, size in mlp.flat.items()}
            decoder.within[f"blocks.{layer}.mlp.hook_pre"] = set(flow.between(top, branch))
            points += mlp.points
    ends = "hook_resid_post" if len(step.branches) > 1 or not any(attends.values()) else "hook_resid_mid"
    points.append((ends, step.after))
    decoder.points += [(f"blocks.{layer}.{name}", value) for name, value in points]
    if step.summed is not step.after:
        decoder.sums[f"blocks.{layer}.{ends}"] = step.summed


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
