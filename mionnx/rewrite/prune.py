"""Rewrite: nodes that no output reads are dropped. ONNX Runtime would execute them."""

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from mionnx.graph.builder import sort_nodes
from mionnx.graph.report import Report


def prune(graph: gs.Graph, report: Report) -> None:
    """Drop dead nodes, and bring the others into an order in which they can run."""
    before = {id(node): node.name or node.op for node in graph.nodes}
    _drop_dead(graph)
    sort_nodes(graph.cleanup(remove_unused_graph_inputs=False))
    left = {id(node) for node in graph.nodes}
    report.removed += [name for node, name in before.items() if node not in left]


def _drop_dead(graph: gs.Graph) -> None:
    """Drop the nodes that no output depends on.

    `cleanup` would too, but looks for each of them, by its value, in the list of all that read the same value: minutes
    for thousands that read one. Here each list is filtered once.
    """
    alive, waiting = set[int](), list(graph.outputs)
    while waiting:
        for node in waiting.pop().inputs:
            if id(node) not in alive:
                alive.add(id(node))
                waiting.extend(_read(node))
    dead = {id(node): node for node in graph.nodes if id(node) not in alive}
    for value in {id(value): value for node in dead.values() for value in node.inputs}.values():
        consumers = [node for node in value.outputs if id(node) not in dead]
        list.__setitem__(value.outputs, slice(None), consumers)  # the node's own list is emptied below
    for node in dead.values():
        list.clear(node.inputs)
        node.outputs.clear()
    graph.nodes = [node for node in graph.nodes if id(node) in alive]


def _read(node: gs.Node) -> Iterator[gs.Tensor]:
    yield from node.inputs
    for inner in node.subgraphs():
        yield from inner.outputs
        for one in inner.nodes:
            yield from _read(one)
