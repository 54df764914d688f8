"""Rewrite: a graph is cut at hook points into a chain of graphs, so that something else can act in between.

1. Hook points are taken in execution order. Those that do not depend on each other end the same segment: each segment
   computes the next hooked values from what earlier ones made, and the last one what is left of the outputs.
2. Whoever reads a hooked value stands in a later segment, and there the value is an input: it may have been changed.
3. Nothing is computed twice: a value made before a cut and read after it crosses the cut, as an output and an input.
   Each node stands in the first segment that reads what it makes, so that little crosses.
4. Except what depends on weights alone (a transposed matrix): every segment that reads it has it, since ONNX Runtime
   folds it when it opens the graph. Inputs that have a default (an RWKV's gates) count as weights.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs


@dataclass(frozen=True)
class Segment:
    """One graph of a chain.

    Attributes:
        graph: its nodes, in an order in which they can run.
        inputs: names of all that is fed to it: inputs of the whole graph, hooked values, what crossed a cut.
        hooks: the hooked values that it makes, in execution order; none in the last segment.
        others: what else it makes for later segments or as an output of the whole graph.
    """

    graph: gs.Graph
    inputs: tuple[str, ...]
    hooks: tuple[str, ...]
    others: tuple[str, ...]


def cut(graph: gs.Graph, hooks: Sequence[str]) -> list[Segment]:
    """Cut a graph.

    Args:
        graph: nodes in an order in which they can run, as `prune` leaves them; left alone.
        hooks: names of values that nodes make, in execution order; each must be an output of the graph, or something
            that an output depends on.

    Returns:
        the segments, in order. The last one makes no hooked value, and is left out if no output is left for it.
    """
    return _Cutting(graph, hooks).segments()


class _Cutting:
    def __init__(self, graph: gs.Graph, hooks: Sequence[str]) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.reads = {id(node): list(_reads(node)) for node in self.nodes}
        self.maker = {id(output): node for node in self.nodes for output in node.outputs}
        self.group = self._groups(hooks)
        self.last = max(self.group.values()) + 1
        self.moving = self._moving()
        self.place = self._places()

    def _groups(self, hooks: Sequence[str]) -> dict[str, int]:
        """Hook -> which segment ends in it."""
        above = self._above({hook: 1 << i for i, hook in enumerate(hooks)})
        groups: dict[str, int] = {}
        number, current = 0, 0  # the segment, and its hooks so far as bits
        for i, hook in enumerate(hooks):
            if above[hook] & current:
                number, current = number + 1, 0
            groups[hook], current = number, current | 1 << i
        return groups

    def _above(self, bits: dict[str, int]) -> dict[str, int]:
        """Hook -> the hooks that it depends on, as bits."""
        reached: dict[int, int] = {}
        found: dict[str, int] = {}
        for node in self.nodes:
            above = 0
            for value in self.reads[id(node)]:
                above |= reached.get(id(value), 0)
            for output in node.outputs:
                reached[id(output)] = above | bits.get(output.name, 0)
                if output.name in bits:
                    found[output.name] = above
        return found

    def _moving(self) -> set[int]:
        """The nodes that depend on an input of the graph; the others depend on weights alone."""
        values, nodes = {id(value) for value in self.graph.inputs}, set()
        for node in self.nodes:
            if any(id(value) in values for value in self.reads[id(node)]):
                nodes.add(id(node))
                values |= {id(output) for output in node.outputs}
        return nodes

    def _places(self) -> dict[int, int]:
        """Node -> its segment: the first one that reads what it makes."""
        needed: dict[int, int] = {id(value): self.last for value in self.graph.outputs}
        places: dict[int, int] = {}
        for node in reversed(self.nodes):
            wanted = [self.group.get(output.name, needed.get(id(output), self.last)) for output in node.outputs]
            places[id(node)] = place = min(wanted)
            for value in self.reads[id(node)]:
                needed[id(value)] = min(place, needed.get(id(value), self.last))
        return places

    def segments(self) -> list[Segment]:
        """All segments that have something to do."""
        own: list[list[gs.Node]] = [[] for _ in range(self.last + 1)]
        for node in self.nodes:
            if id(node) in self.moving:
                own[self.place[id(node)]].append(node)
        later: set[int] = {id(value) for value in self.graph.outputs}
        made: list[Segment] = []
        for number in range(self.last, -1, -1):
            if own[number]:
                made.append(self._segment(number, own[number], later))
        return made[::-1]

    def _segment(self, number: int, own: list[gs.Node], later: set[int]) -> Segment:
        """One segment; what it reads from earlier ones is added to `later`."""
        nodes = [*self._still(own), *own]
        made = {id(output) for node in nodes for output in node.outputs}
        read = {
            id(value): value
            for node in nodes
            for value in self.reads[id(node)]
            if isinstance(value, gs.Variable) and id(value) not in made and not value.is_empty()
        }
        outputs = [output for node in own for output in node.outputs]
        hooks = [output for output in outputs if output.name in self.group]
        hooks.sort(key=lambda value: list(self.group).index(value.name))
        others = [output for output in outputs if id(output) in later and output.name not in self.group]
        later.update(read)
        part = gs.Graph(
            nodes,
            list(read.values()),
            [*hooks, *others],
            name=f"{self.graph.name}.{number}",
            opset=self.graph.opset,
            import_domains=self.graph.import_domains,
            ir_version=self.graph.ir_version,
        )
        return Segment(part, _names(read.values()), _names(hooks), _names(others))

    def _still(self, own: list[gs.Node]) -> list[gs.Node]:
        """The nodes on weights alone that a segment needs."""
        found: set[int] = set()
        waiting = [value for node in own for value in self.reads[id(node)]]
        while waiting:
            node = self.maker.get(id(waiting.pop()))
            if node is not None and id(node) not in self.moving and id(node) not in found:
                found.add(id(node))
                waiting += self.reads[id(node)]
        return [node for node in self.nodes if id(node) in found]


def _names(values: Iterable[gs.Tensor]) -> tuple[str, ...]:
    return tuple(value.name for value in values)


def _reads(node: gs.Node) -> Iterator[gs.Tensor]:
    """Everything that a node reads, the bodies of its loops included."""
    yield from node.inputs
    for body in node.attrs.values():
        if isinstance(body, gs.Graph):
            inside = {id(value) for value in body.inputs}
            inside |= {id(output) for inner in body.nodes for output in inner.outputs}
            read = [value for inner in body.nodes for value in _reads(inner)]
            yield from (value for value in [*read, *body.outputs] if id(value) not in inside)
