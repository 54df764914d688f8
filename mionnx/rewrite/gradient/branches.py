"""The rule of `If`: another `If` on the same condition, whose branches compute theirs again and go back through it."""

from collections.abc import Mapping, Sequence

from onnx import GraphProto, NodeProto, helper

from mionnx.rewrite.gradient.activity import activity, prune
from mionnx.rewrite.gradient.backward import Backward, Given
from mionnx.rewrite.gradient.facts import from_outside, subgraphs
from mionnx.rewrite.gradient.subgraph import copy_of, declared


def if_rule(op: Backward, node: NodeProto, given: Given) -> Mapping[str, Sequence[str]]:
    """The cotangents of what the branches of an `If` take from outside."""
    taken = dict.fromkeys(name for graph in subgraphs(node) for name in from_outside(graph))
    wanted = [name for name in taken if op.is_active(name)]
    branches = {one.name: _backwards(op, one.g, wanted, given) for one in node.attribute}
    made = op.If(node.input[0], outputs=len(wanted), **branches)
    op.facts.types |= {new: op.facts.type(name) for name, new in zip(wanted, _listed(made), strict=True)}
    return {name: [one] for name, one in zip(wanted, _listed(made), strict=True)}


def _listed(made: str | list[str]) -> list[str]:
    return [made] if isinstance(made, str) else made


def _backwards(op: Backward, graph: GraphProto, wanted: Sequence[str], given: Given) -> GraphProto:
    """The backward branch: cotangents of the wanted values from those of the outputs."""
    inner = copy_of(graph, op.names, op.facts)
    ends = [inner.name(value.name) for value in graph.output]
    live = {end: one for end, one in zip(ends, given, strict=True) if one}
    back = op.inside(inner.facts, activity(inner.nodes, inner.facts, wanted, live) | {*wanted})
    found = back.run(inner.nodes, {end: one for end, one in live.items() if back.is_active(end)})
    outputs = []
    for name in wanted:
        value = back.Identity(found.get(name) or back.zeros(name))
        outputs.append(declared(op.facts, value, name))
    nodes = prune([*inner.nodes, *back.nodes], [value.name for value in outputs])
    return helper.make_graph(nodes, op.names.fresh("branch"), [], outputs)
