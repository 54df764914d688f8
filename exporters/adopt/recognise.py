"""The hook points of a decoder's graph, layer by layer, recognised by its dataflow.

The residual stream is made of the dominators of the logits that are sums of two values of text.
"""

from dataclasses import dataclass, field, replace

import onnx_ir as ir

from exporters.adopt.attention import AttentionValues, attention_patterns, find_attention
from exporters.adopt.flow import (
    FEW_ROWS,
    KEEPING,
    ROW_LOOKUPS,
    Flow,
    Origin,
    climb,
    input_of,
    is_linear,
    linear_maps,
    perm_of,
    present,
    rank,
    static,
    table_of,
)
from exporters.adopt.mixer import MixerValues, find_mixer, mixers
from exporters.adopt.mlp import find_mlp
from exporters.op_writer import move, node_like
from mionnx.errors import ExportError

STATE_OPERATORS = ("CausalConvWithState", "LinearAttention")
TURNED_AT_ONCE = (0, 2, 3, 1)  # [batch, seq, heads, head_dim] -> [batch, heads, head_dim, seq]
STEPS = ((0, 2, 1, 3), (0, 1, 3, 2))  # the same in two


@dataclass
class Recognised:
    """A decoder whose values are known."""

    flow: Flow
    # Hook name and value, in execution order; a value may have several names.
    points: list[tuple[str, ir.Value]] = field(default_factory=list)
    layers: list[AttentionValues | MixerValues] = field(default_factory=list)
    # In a stream that is normed after its additions: hook name of the stream after one -> the sum itself.
    sums: dict[str, ir.Value] = field(default_factory=dict)
    # Hook name of heads' outputs behind a gate -> these before it.
    ungated: dict[str, ir.Value] = field(default_factory=dict)
    # Hook name of an MLP's input -> the nodes of the MLP: its other readers do not read the hook point.
    within: dict[str, set[ir.Node]] = field(default_factory=dict)
    # The queries and keys that are rotated as [batch, seq, heads, head_dim].
    seq_first: list[ir.Value] = field(default_factory=list)
    # Value of a router with batch and seq as one axis -> a value of the stream with both, and the other size.
    flat: dict[ir.Value, tuple[ir.Value, int]] = field(default_factory=dict)
    # Value [batch, seq, heads * width] that is a hook point with both as axes -> how many heads.
    merged: dict[ir.Value, int] = field(default_factory=dict)
    main: str | None = "hook_logits"  # the hook point of the main output; None where that is the stream
    other_outputs: list[ir.Value] = field(default_factory=list)  # outputs beside the main one that stay
    notes: list[str] = field(default_factory=list)  # the hook points that the graph has not, and why
    windows: list[int | None] | None = None  # the window of each layer's own mask, where that has been looked at

    @property
    def sinks(self) -> bool:
        """Whether a softmax has a column that belongs to no key."""
        return any(one.sink for one in self.attention.values())

    @property
    def attention(self) -> dict[int, AttentionValues]:
        """The layers that attend, by number."""
        return {layer: one for layer, one in enumerate(self.layers) if isinstance(one, AttentionValues)}

    @property
    def recurrence(self) -> dict[int, MixerValues]:
        """The layers that have a recurrence or a short convolution, by number."""
        return {layer: one for layer, one in enumerate(self.layers) if isinstance(one, MixerValues)}


@dataclass(frozen=True)
class Step:
    """One residual addition."""

    # before, after: the stream before and after it.
    before: ir.Value
    after: ir.Value
    branches: list[ir.Value]  # the values added to it: one, or two in a parallel block
    summed: ir.Value  # the sum itself: what comes after it, or in a post-norm stream what is normed to that


def sum_of(name: str) -> str:
    """Name of the sum that is normed to a value of the stream."""
    return f"{name}_sum"


def ungated(name: str) -> str:
    """Name of the heads' outputs before the gate."""
    return f"{name}_ungated"


def recognise(graph: ir.Graph) -> Recognised:
    """Find the hook points of a decoder whose fused operators have been expanded."""
    _separate_heads(graph)
    decoder = Recognised(Flow(graph))
    steps = _residual_steps(decoder.flow)
    decoder.points += _embedding(decoder.flow, steps[0].before)
    for step in steps:
        _layer(decoder, step)
    if not decoder.layers:
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
    added = list[tuple[str, ir.Value]]()
    for value in flow.chain(first, flow.embedding):
        node = value.producer()
        if node is None or node.op_type != "Add" or len(flow.text(node)) != 1:
            continue
        called = [one for one in present(node.inputs) if flow.origin.get(one) == Origin.CALL]
        if called:
            added = added or [("hook_embed", flow.text(node)[0])]
            added.append(("hook_token_type_embed" if _has_few_rows(called[0]) else "hook_pos_embed", called[0]))
    names = [name for name, _ in added]
    return added if added and len({*names}) == len(names) else [("hook_embed", first)]


def _has_few_rows(value: ir.Value) -> bool:
    """Whether a value are rows of a table of token types."""
    node = climb(value).producer()
    table = node.inputs[0] if node is not None and node.op_type in ROW_LOOKUPS else None
    return table is not None and (static(*table_of(table)) or FEW_ROWS + 1) <= FEW_ROWS


def _layer(decoder: Recognised, step: Step) -> None:
    """Add the points of one residual addition: a layer's attention or recurrence, its MLP, or both."""
    flow, top = decoder.flow, step.before
    attends = {branch: bool(attention_patterns(flow, top, branch)) for branch in step.branches}
    mixes = {branch: attends[branch] or bool(mixers(flow, top, branch)) for branch in step.branches}
    if not decoder.layers and not any(mixes.values()):
        states = [str(one.name) for one in flow.graph.inputs if flow.origin[one] == Origin.PAST and rank(one) == 3]
        why = (
            f"; states known here go through {' and '.join(STATE_OPERATORS)}, not {', '.join(states)}" if states else ""
        )
        raise ExportError(
            f"the first branch of the residual stream holds no attention: the graph is no decoder of text{why}"
        )
    # an MLP belongs to the layer whose attention or recurrence came last
    layer = len(decoder.layers) - (not any(mixes.values()))
    points = [("hook_resid_pre", top)] if any(mixes.values()) else []
    # attention first, as a layer's points are in order
    for branch in sorted(step.branches, key=lambda branch: not mixes[branch]):
        if attends[branch]:
            attention = find_attention(flow, layer, top, branch)
            rotated = (attention.queries, attention.keys)
            decoder.seq_first += [one.unrotated for one in rotated if one.seq_first and one.unrotated is not None]
            if attention.gated is not None:
                decoder.merged[attention.gated] = attention.heads
                decoder.ungated[f"blocks.{layer}.attn.hook_z"] = attention.z
            if attention.gate is not None:
                decoder.merged[attention.gate] = attention.heads
            decoder.layers.append(attention)
            points += attention.points()
        elif mixes[branch]:
            mixer = find_mixer(flow, layer, top, branch)
            decoder.merged[mixer.z] = mixer.heads
            decoder.layers.append(mixer)
            points += mixer.points()
        else:
            mlp = find_mlp(flow, layer, top, branch)
            decoder.notes += mlp.notes
            decoder.flat |= {value: (top, size) for value, size in mlp.flat.items()}
            decoder.within[f"blocks.{layer}.mlp.hook_pre"] = set(flow.between(top, branch))
            points += mlp.points
    ends = "hook_resid_post" if len(step.branches) > 1 or not any(mixes.values()) else "hook_resid_mid"
    points.append((ends, step.after))
    decoder.points += [(f"blocks.{layer}.{name}", value) for name, value in points]
    if step.summed is not step.after:
        decoder.sums[f"blocks.{layer}.{ends}"] = step.summed


def _residual_steps(flow: Flow) -> list[Step]:
    """The residual additions of a decoder, in order; a stream that is normed after them comes out of the norms."""
    sums = [value for value in flow.chain(flow.logits) if _adds_text(flow, value)]
    if not sums:
        raise ExportError(
            "no sum of two values of text lies on every path to the logits: the graph has no residual stream"
        )
    steps, stream, norms = list[Step](), flow.above(sums[0]), set[str]()
    for value in sums:
        if steps and any(is_linear(flow, one.producer()) for one in flow.chain(value, stream)):
            # behind a matrix: a sum of the head, as in an activation by tanh
            if attention_patterns(flow, stream, flow.logits):
                raise ExportError(f"a matrix lies on every path to the sum {value.name}: the stream is cut there")
            break
        added = _summands(flow, value, stream)
        # the next addition does not read the last sum itself: a norm stands between, as in a post-norm stream
        if added is None and steps:
            stream, added = _normed(flow, stream, value)
            steps[-1] = replace(steps[-1], after=stream)
            norms.add(stream.producer().op_type)
        if added is None:
            raise ExportError(f"{value.name} is a sum, and the stream before it is none of the summands")
        steps.append(Step(stream, value, [part for one in added for part in _parts(flow, stream, one)], value))
        stream = value
    if norms:  # the last sum is normed as the others are
        after = next((one for one in flow.chain(flow.logits, stream) if one.producer().op_type in norms), stream)
        steps[-1] = replace(steps[-1], after=after)
    return steps


def _normed(flow: Flow, summed: ir.Value, following: ir.Value) -> tuple[ir.Value, list[ir.Value] | None]:
    """The value between two sums to which the second one adds, and the added values; else the first sum and None."""
    # the last one: before the bias of a norm in several nodes lies a value that would do as well
    for value in flow.chain(following, summed)[-2::-1]:
        added = _summands(flow, following, value)
        if added is not None:
            return value, added
    return summed, None


def _adds_text(flow: Flow, value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Add" and len(flow.text(node)) > 1


def _summands(flow: Flow, value: ir.Value, stream: ir.Value) -> list[ir.Value] | None:
    """The values added to the stream to make a value; None if the stream is no summand."""
    if climb(value, KEEPING) is climb(stream, KEEPING):
        return []
    node = value.producer()
    if node is None or node.op_type not in (*KEEPING, "Add"):
        return None
    inputs = flow.text(node)
    for entry in inputs:
        rest = _summands(flow, entry, stream)
        if rest is not None:
            return rest + [other for other in inputs if other is not entry]
    return None


def _parts(flow: Flow, stream: ir.Value, branch: ir.Value) -> list[ir.Value]:
    """An added value; of a parallel block that sums its branches first, both of them."""
    inner = climb(branch, KEEPING)
    if not _adds_text(flow, inner):
        return [branch]
    inputs = flow.text(inner.producer())
    attends = [bool(attention_patterns(flow, stream, value)) for value in inputs]
    return inputs if sorted(attends) == [False, True] else [branch]  # one of the two attends, the other is the MLP


def _separate_heads(graph: ir.Graph) -> None:
    """Give batch, heads, queries and keys of attention axes of their own, in place."""
    for node in list(graph):
        if node.op_type == "Softmax":  # over scores whose batch and heads were merged comes before the merging
            _before_merging(graph, node)
        # keys that are turned while their heads are split off are split first, and turned then
        elif node.op_type == "Transpose" and perm_of(node) == TURNED_AT_ONCE:
            _in_two_steps(graph, node)


def _before_merging(graph: ir.Graph, softmax: ir.Node) -> None:
    merged = climb(softmax.inputs[0], KEEPING)
    merge, last = merged.producer(), softmax.attributes.get_int("axis", -1)
    if merge is None or merge.op_type != "Reshape" or rank(merged) != 3 or last not in (-1, 2):
        return
    scores = merge.inputs[0]
    if rank(scores) != 4 or scores.shape[-1] != merged.shape[-1]:  # the softmax is to run over the same axis
        return
    if softmax.outputs[0].is_graph_output() or softmax.inputs[0] is not merged:  # a rounding between them is kept
        return
    weights = node_like("Softmax", [scores], scores, axis=-1)
    after = node_like("Reshape", [weights.outputs[0], merge.inputs[1]], merged)
    after.attributes.update(merge.attributes)
    reads = list(softmax.outputs[0].uses())
    graph.insert_after(softmax, [weights, after])
    move(reads, after.outputs[0])
    graph.remove(softmax, safe=True)
    if not merged.uses() and not merged.is_graph_output():
        graph.remove(merge, safe=True)


def _in_two_steps(graph: ir.Graph, node: ir.Node) -> None:
    first = node_like("Transpose", [node.inputs[0]], node.inputs[0], perm=STEPS[0])
    shape = node.inputs[0].shape
    first.outputs[0].shape = shape and ir.Shape([shape[axis] for axis in STEPS[0]])
    graph.insert_before(node, first)
    node.replace_input_with(0, first.outputs[0])
    node.attributes["perm"] = ir.AttrInt64s("perm", STEPS[1])
