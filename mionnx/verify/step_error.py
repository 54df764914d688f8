"""Difference that one step adds: the second runtime's step, run on the first one's values.

The error at a hook point is what came in, as far as the step amplifies it, and what the step itself does differently.
The second part alone is had by feeding the step what the other runtime had there.
"""

from collections.abc import Sequence

from mionnx.verify.difference import Difference
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.runtime import GraphRuntime


def local_difference(
    runtime: GraphRuntime, graph: GraphUnderTest, recording: RecordedValues, before: Sequence[str], end: str, unit: str
) -> Difference:
    """Measure the difference that one step adds.

    Args:
        recording: what the other one had; read only.
        before: the hook points before the step, all on the recording.
    """
    difference = Difference(unit=unit)
    starts = graph.starts_of(before, [end])
    with runtime.opened_part(graph, starts, [end]) as piece:
        for prompt, call in enumerate(graph.calls):
            feeds = graph.feeds(call) | {name: recording.get(prompt, name) for name in starts}
            difference.add(recording.get(prompt, end), piece(feeds)[end])
    return difference


def nodes_of(graph: GraphUnderTest, before: Sequence[str], end: str) -> list[str]:
    """The nodes of a step, as `name (operator)`, in the order in which they run."""
    nodes = [graph.dataflow.nodes[i] for i in sorted(graph.dataflow.ancestors([end], before))]
    return [format_node(node.name, node.op_type) for node in nodes]


def format_node(name: str, operator: str) -> str:
    """Format a node: "name (operator)"."""
    return f"{name} ({operator})"
