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
    runtime: GraphRuntime, graph: GraphUnderTest, recording: RecordedValues, known: Sequence[str], end: str, unit: str
) -> Difference:
    """Measure the difference that one step adds.

    Args:
        recording: what the other one had; read only.
        known: the hook points before the step, all on the recording.
        end: the hook point after it, on the recording too.
        unit: the coarser dtype of the two.
    """
    found = Difference(unit=unit)
    starts = graph.starts_of(known, [end])
    with runtime.opened_part(graph, starts, [end]) as piece:
        for prompt, call in enumerate(graph.calls):
            feeds = graph.feeds(call) | {name: recording.get(prompt, name) for name in starts}
            found.add(recording.get(prompt, end), piece(feeds)[end])
    return found


def nodes_of(graph: GraphUnderTest, known: Sequence[str], end: str) -> list[str]:
    """The nodes of a step, as `name (operator)`, in the order in which they run."""
    dataflow = graph.dataflow
    return [
        format_node(dataflow.nodes[i].name, dataflow.nodes[i].op_type) for i in sorted(dataflow.ancestors([end], known))
    ]


def format_node(name: str, operator: str) -> str:
    """Format a node: "name (operator)"."""
    return f"{name} ({operator})"
