"""Rewrite: nodes that no output reads are dropped. ONNX Runtime would execute them.

Of a rescaled model, products that only take a power of two back and put it in again go too, where nothing touches the
hook point between them (`mionnx.graph.exponents`).
"""

from collections.abc import Collection, Iterator

import onnx_graphsurgeon as gs

from mionnx.graph.edited_graph import branches, named, sort_nodes
from mionnx.graph.exponents import AGAIN_END, STORED_END
from mionnx.graph.report import Report


def prune(graph: gs.Graph, report: Report) -> None:
    """Drop dead nodes, and bring the others into an order in which they can run."""
    before = {id(node): node.name or node.op for node in graph.nodes}
    for value in graph.inputs:
        value.inputs.clear()  # what is fed is not computed
    for inner in (*(inner for node in graph.nodes for inner in branches(node)), *graph.functions):
        inner.cleanup()
    _drop_dead(graph)
    sort_nodes(graph)
    left = {id(node) for node in graph.nodes}
    report.removed += [name for node, name in before.items() if node not in left]


def unscale_idle(graph: gs.Graph, exponents: Collection[str], touched: Collection[str]) -> None:
    """Let readers of hook points that nothing touches read the stored values; what stood between is dead then."""
    tensors = named(graph)
    outputs = {id(value) for value in graph.outputs}
    for name in exponents:
        true, again = tensors.get(name), tensors.get(f"{name}{AGAIN_END}")
        if true is None or again is None or name in touched or {id(true), id(again)} & outputs:
            continue
        between = [node.name for node in (*true.inputs, *true.outputs)]
        if between != [f"{name}:true", f"{name}:again"]:  # something reads or edits the value
            continue
        stored = tensors[f"{name}{STORED_END}"]
        for reader in list(again.outputs):
            for place, value in enumerate(reader.inputs):
                if value is again:
                    reader.inputs[place] = stored


def _drop_dead(graph: gs.Graph) -> None:
    """Drop the nodes that no output depends on.

    `Graph.cleanup` would too, but looks for each of them, by its value, in the list of all that read the same value:
    minutes for thousands that read one. Here each list is filtered once.
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
    for inner in branches(node):
        yield from inner.outputs
        for one in inner.nodes:
            yield from _read(one)
