"""Active values: those between the values asked for and the differentiated one. Pruning of nodes without readers."""

from collections.abc import Iterable, Sequence

from onnx import NodeProto

from mionnx.graph.dataflow import reads
from mionnx.rewrite.gradient.facts import NodeFacts


def activity(nodes: Sequence[NodeProto], facts: NodeFacts, sources: Iterable[str], ends: Iterable[str]) -> set[str]:
    """The floating-point values that follow from sources and lead to ends."""
    after, before = {*sources}, {*ends}
    for node in nodes:
        if not after.isdisjoint(reads(node)):
            after |= {name for name in node.output if name and facts.is_float(name)}
    for node in reversed(nodes):
        if not before.isdisjoint(node.output):
            before |= {name for name in reads(node) if name in after}
    return after & before


def prune(nodes: Sequence[NodeProto], ends: Iterable[str]) -> list[NodeProto]:
    """The nodes that some values need."""
    wanted, kept = {*ends}, []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            kept.append(node)
            wanted |= {*reads(node)}
    return kept[::-1]
