"""Rewrite: start at a hook point. Its value becomes the input, and only what follows from it is left."""

import onnx_graphsurgeon as gs


def start_at(graph: gs.Graph, hook: str, output: str) -> None:
    """Cut a graph down to what lies between the value of a hook point and one output."""
    tensors = graph.tensors()
    value = tensors[hook]
    value.inputs.clear()
    graph.inputs = [value, *graph.inputs]
    graph.outputs = [tensors[output]]
    graph.cleanup(remove_unused_graph_inputs=True).toposort()
