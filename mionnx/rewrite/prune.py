"""Rewrite: nodes that no output reads are dropped. ONNX Runtime would execute them."""

import onnx_graphsurgeon as gs

from mionnx.graph.builder import sort_nodes
from mionnx.graph.report import Report


def prune(graph: gs.Graph, report: Report) -> None:
    """Drop dead nodes, and bring the others into an order in which they can run."""
    before = {id(node): node.name or node.op for node in graph.nodes}
    sort_nodes(graph.cleanup(remove_unused_graph_inputs=False))
    left = {id(node) for node in graph.nodes}
    report.removed += [name for node, name in before.items() if node not in left]
