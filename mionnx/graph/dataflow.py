"""Which node reads what: questions about a graph as it stands, before anything is edited."""

from collections.abc import Collection, Iterable, Iterator
from functools import cache

import onnx


class Dataflow:
    """The nodes of a graph and the values between them.

    Attributes:
        nodes: of the graph, in an order in which they can run.
        makers: value -> the index of the node that makes it.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.nodes = list(proto.graph.node)
        self.makers = {name: i for i, node in enumerate(self.nodes) for name in node.output}
        self.read = [tuple(reads(node)) for node in self.nodes]
        self.following = cache(self._following)

    def ancestors(self, ends: Iterable[str], known: Collection[str] = ()) -> set[int]:
        """The nodes that values are computed by, without those behind values that are known."""
        found: set[int] = set()
        waiting = [name for name in ends if name not in known]
        while waiting:
            node = self.makers.get(waiting.pop())
            if node is not None and node not in found:
                found.add(node)
                waiting += [name for name in self.read[node] if name not in known]
        return found

    def _following(self, source: str) -> set[str]:
        """A value and everything that is computed from it."""
        found = {source}
        for node, read in zip(self.nodes, self.read, strict=True):
            if not found.isdisjoint(read):
                found.update(node.output)
        return found

    def crossing(self, cut: str, end: str, source: str) -> list[str]:
        """The values besides a cut that are made before it and read after it; RWKV-7's first values are such.

        Args:
            cut: the value at which the graph is cut; not among those returned.
            end: the value that is wanted in the end.
            source: what every activation follows from; what does not (masks, tables of positions) is computed anew
                from the tokens on both sides of the cut, and crosses nothing.

        Returns:
            names, in the order of the graph.
        """
        before = self.ancestors([cut])
        after = self.ancestors([end], {cut}) - before
        made = {name for i in before for name in self.nodes[i].output if name in self.following(source)} - {cut}
        read = {name for i in after for name in self.read[i]}
        return sorted(made & read, key=lambda name: self.makers[name])


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node reads, those that its subgraphs take from outside included."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs) if attribute.g.node or attribute.graphs else ():
            inside = {name for inner in graph.node for name in inner.output} | {value.name for value in graph.input}
            inside |= {tensor.name for tensor in graph.initializer}
            yield from (name for inner in graph.node for name in reads(inner) if name not in inside)
            yield from (value.name for value in graph.output if value.name not in inside)
