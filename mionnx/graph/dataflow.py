"""`Dataflow`: the nodes that make and read each value of a graph; it edits nothing."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import onnx
from onnx import AttributeProto, GraphProto, NodeProto


class Dataflow:
    """The nodes of a graph and the values between them.

    Attributes:
        proto: the model, without its weights.
        nodes: its nodes, in an order in which they can run.
        producers: value -> index of the node that makes it; inputs and weights have none.
        reads: for each node, the values that it reads, those that its subgraphs take from outside included.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto, self.nodes = proto, list(proto.graph.node)
        self.producers = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}
        self.reads = [tuple(reads(node)) for node in self.nodes]

    @cached_property
    def consumers(self) -> dict[str, list[int]]:
        """Value -> indices of the nodes that read it."""
        consumers = defaultdict(list)
        for i, names in enumerate(self.reads):
            for name in dict.fromkeys(names):
                consumers[name].append(i)
        return consumers

    def producer(self, value: str) -> onnx.NodeProto | None:
        """The node that makes a value; None for an input or a weight."""
        return self.nodes[self.producers[value]] if value in self.producers else None

    def ancestors(self, ends: Iterable[str], known: Collection[str] = ()) -> set[int]:
        """Indices of the nodes that compute some values from known ones."""
        nodes: set[int] = set()
        waiting = [name for name in ends if name not in known]
        while waiting:
            node = self.producers.get(waiting.pop())
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [name for name in self.reads[node] if name not in known]
        return nodes

    def descendants(self, sources: Iterable[str], barriers: Collection[str] = ()) -> set[str]:
        """Some values and all computed from them, up to and including the barriers."""
        values = {*sources}
        passing = {*values}
        for node, names in zip(self.nodes, self.reads, strict=True):
            if not passing.isdisjoint(names):
                values.update(name for name in node.output if name)
                passing.update(name for name in node.output if name and name not in barriers)
        return values

    def needed(self, known: Iterable[str], ends: Sequence[str]) -> list[str]:
        """The known values that some values are computed from, each taken as it is."""
        known = [*known]
        read = self.read_by(self.ancestors(ends, {*known}))
        return [name for name in known if name in read]

    def read_by(self, nodes: Iterable[int]) -> set[str]:
        """The values that some nodes read."""
        return {name for node in nodes for name in self.reads[node]}

    def crossings(
        self, cuts: Sequence[Collection[str]], ends: Sequence[str], sources: Iterable[str]
    ) -> list[tuple[str, ...]]:
        """The values that cross each cut of a graph: made before it, and read after it.

        A node belongs to the first segment that reads what it makes, so that little crosses. What does not follow from
        `sources` (masks, tables of positions, turned weights) belongs to every segment that reads it, and crosses
        nothing.

        Args:
            cuts: the values that end each segment but the last, in execution order; none depends on another of its cut.
            ends: the values that are wanted in the end. One that is made before a cut crosses it.
            sources: inputs or values that are computed once.

        Returns:
            for each cut the names, in the order of the graph, those of the cut itself included where they are read.
        """
        cut_of = {name: number for number, names in enumerate(cuts) for name in names}
        moving = self.descendants({*sources, *cut_of})
        first: dict[str, int] = {}  # value -> the first segment that reads it
        last = dict.fromkeys(ends, len(cuts))  # and the last one
        crossing: list[list[str]] = [[] for _ in cuts]
        for i in sorted(self.ancestors([*cut_of, *ends]), reverse=True):
            outputs = [name for name in self.nodes[i].output if name in moving]
            if not outputs:
                continue
            segment = min(cut_of.get(name, first.get(name, len(cuts))) for name in outputs)
            for name in outputs:
                for number in range(segment, last.get(name, segment)):
                    crossing[number].append(name)
            for name in self.reads[i]:
                first[name] = min(segment, first.get(name, segment))
                last[name] = max(segment, last.get(name, segment))
        return [tuple(reversed(names)) for names in crossing]


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """The branches of an `If`, the body of a `Scan`."""
    return [one.g for one in node.attribute if one.type == AttributeProto.GRAPH]


def reads(node: NodeProto) -> list[str]:
    """The values that a node reads, in its subgraphs too."""
    return [name for name in node.input if name] + [name for graph in subgraphs(node) for name in from_outside(graph)]


def made_in(graph: GraphProto) -> set[str]:
    """The values that a graph makes or is given: outputs of nodes, inputs, initializers."""
    outputs = {name for node in graph.node for name in node.output}
    return outputs | {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}


def from_outside(graph: GraphProto) -> list[str]:
    """The values that a subgraph takes from the graph around it."""
    own = made_in(graph)
    names = [name for node in graph.node for name in reads(node)] + [value.name for value in graph.output]
    return [name for name in dict.fromkeys(names) if name not in own]
