"""Rewrite: start at a hook point. Its value becomes the input, and only what follows from it is left."""

from collections.abc import Sequence

import onnx_graphsurgeon as gs


def start_at(graph: gs.Graph, hook: str, output: str) -> None:
    """Cut a graph down to what lies between the value of a hook point and one output."""
    tensors = graph.tensors()
    value = tensors[hook]
    value.inputs.clear()
    graph.inputs = [value, *graph.inputs]
    graph.outputs = [tensors[output]]
    graph.cleanup(remove_unused_graph_inputs=True).toposort()


def between(graph: gs.Graph, parts: Sequence[tuple[str, str]]) -> None:
    """Cut a graph down to what lies between pairs of values, side by side; no pair's output reads another pair's input.

    Args:
        graph: the graph.
        parts: (the value that becomes an input, the value that becomes an output) of each.
    """
    tensors = graph.tensors()
    for first, _ in parts:
        tensors[first].inputs.clear()
    graph.inputs = [*(tensors[first] for first in dict.fromkeys(first for first, _ in parts)), *graph.inputs]
    graph.outputs = [tensors[last] for _, last in parts]
    graph.cleanup(remove_unused_graph_inputs=True).toposort()
