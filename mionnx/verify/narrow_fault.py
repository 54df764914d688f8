"""From a step between hook points to the nodes of it that make the difference.

Every value of the step that both graphs have by the same name (in files of two tools: hook points) is looked at, in
order: the nodes between it and the values before it run in the second runtime on what the first one has there. If no
value differs that way, the fault is one of nodes together: a fusion, or casts that a runtime drops where they stand
alone. Then the part is the shortest one that differs: up to the first value that does, from the last values that still
let it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from numpy.typing import NDArray

from mionnx.graph.dataflow import extract
from mionnx.verify.difference import Difference, coarser
from mionnx.verify.graph_under_test import Arrays, GraphUnderTest
from mionnx.verify.runtime import GraphRuntime
from mionnx.verify.step_error import format_node

RunnableGraph = tuple[GraphRuntime, GraphUnderTest]


@dataclass
class Narrowed:
    """The smallest part of a step with equal inputs and a different output.

    Attributes:
        starts: values that it starts from, besides the tokens.
        nodes: `name (operator)`, in the order in which they run.
        feeds: what it was run on: the first runtime's values, and the tokens.
        expected, found: what the first runtime has there, and what the second one makes of it.
    """

    value: str
    starts: list[str]
    nodes: list[str]
    feeds: Arrays
    expected: Arrays
    found: Arrays
    difference: Difference


def narrow(
    first: RunnableGraph, second: RunnableGraph, inputs: Arrays, end: str, prompt: int, tolerance: float
) -> Narrowed:
    """Compare every value of a step, each computed from the first runtime's values.

    Args:
        inputs: the first one's values at the hook points before the step.

    Returns:
        the part; the whole step, if no value inside differs by more by itself.
    """
    unit = coarser(*(graph.model.metadata.dtype for _, graph in (first, second)))
    values = _shared(first[1], second[1], [*inputs], end)
    expected = _expected(first, inputs, values, prompt)
    before = dict(inputs)
    for value in values:
        part = _run(second, before, value, expected[value], prompt, unit)
        if part.difference.relative > tolerance:
            return part
        before[value] = expected[value]
    return _together(second, inputs, values, expected, prompt, tolerance, unit)


def _together(
    side: RunnableGraph,
    inputs: Arrays,
    values: Sequence[str],
    expected: Arrays,
    prompt: int,
    tolerance: float,
    unit: str,
) -> Narrowed:
    """Find the shortest run of nodes that differs as a whole."""
    runs = (_run(side, inputs, value, expected[value], prompt, unit) for value in values)
    first = next((run for run in runs if run.difference.relative > tolerance), None)
    if first is None:
        return _run(side, inputs, values[-1], expected[values[-1]], prompt, unit)
    shortest = first
    for count in range(1, values.index(first.value)):
        starts = inputs | {value: expected[value] for value in values[:count]}
        shorter = _run(side, starts, first.value, expected[first.value], prompt, unit)
        if shorter.difference.relative <= tolerance:
            break
        shortest = shorter
    return shortest


def _run(side: RunnableGraph, inputs: Arrays, value: str, expected: NDArray[Any], prompt: int, unit: str) -> Narrowed:
    """One value computed from those that are known."""
    runtime, graph = side
    starts = graph.starts_of(list(inputs), [value])
    feeds = graph.feeds(graph.calls[prompt]) | {name: inputs[name] for name in starts}
    with runtime.opened_part(graph, starts, [value]) as piece:
        outputs = piece(feeds)
    part = extract(graph.dataflow, starts, [value])
    nodes = [format_node(node.name, node.op_type) for node in part.graph.node]
    used = {entry.name: feeds[entry.name] for entry in part.graph.input if entry.name in feeds}
    return Narrowed(value, starts, nodes, used, {value: expected}, outputs, _difference(expected, outputs[value], unit))


def _difference(expected: NDArray[Any], other: NDArray[Any], unit: str) -> Difference:
    """Infinite if the shapes differ."""
    difference = Difference(unit=unit)
    if expected.shape == other.shape:
        difference.add(expected, other)
    else:
        difference.max_abs = float("inf")
    return difference


def _shared(first: GraphUnderTest, second: GraphUnderTest, starts: Sequence[str], end: str) -> list[str]:
    """The values of a step that both graphs make, in the second one's order."""
    here, there = set(starts), {name for node in first.dataflow.nodes for name in node.output if name}
    nodes = sorted(second.dataflow.ancestors([end], here))
    outputs = [name for i in nodes for name in second.dataflow.nodes[i].output if name]
    reads = second.dataflow.read_by(nodes) | {end}
    if first.model.metadata.exporter != second.model.metadata.exporter:  # other names by chance mean other values
        there &= {*first.model.order}
    return [name for name in outputs if name in there and name in reads and _told(first, second, name)]


def _told(first: GraphUnderTest, second: GraphUnderTest, name: str) -> bool:
    """Whether a value's type is known in both, and is a number or a truth in both."""
    kinds = [graph.types.get(name, 0) for graph in (first, second)]
    return all(kinds) and onnx.TensorProto.STRING not in kinds


def _expected(first: RunnableGraph, inputs: Arrays, values: Sequence[str], prompt: int) -> Arrays:
    """The first runtime's values of a step, all of them from one run."""
    runtime, graph = first
    starts = graph.starts_of(list(inputs), values)
    with runtime.opened_part(graph, starts, values) as piece:
        return piece(graph.feeds(graph.calls[prompt]) | {name: inputs[name] for name in starts})
