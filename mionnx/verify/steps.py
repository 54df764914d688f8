"""Steps between hook points: what one adds by itself, and the nodes of it that make the difference.

The error at a hook point is what came in, as far as the step amplifies it, and what the step itself does differently.
The second part alone is had by running the step in one runtime on what the other had before it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.verify.difference import Difference, coarser
from mionnx.verify.graph_under_test import Arrays, GraphUnderTest
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.runtimes import GraphRuntime, Piece, Runtime


@dataclass
class Side:
    """One side of a comparison: a graph in a runtime, or a recorded run."""

    graph: GraphUnderTest
    runtime: Runtime | None  # what runs it; None for a recorded run
    recording: RecordedValues | None = None
    # The continuation of each prompt, [batch, n] each; none where no tokens were chosen.
    greedy: list[NDArray[np.int64]] = field(default_factory=list)
    recorded: str = ""  # title of a recorded run

    @property
    def dtype(self) -> str:
        """Dtype of the model, or of the recorded run."""
        recorded = self.recording.facts.get("dtype") if self.recording and self.runtime is None else None
        return str(recorded or self.graph.model.metadata.dtype)

    @property
    def title(self) -> str:
        """The runtime's, and the model's where there are several."""
        name = self.runtime.title if self.runtime else self.recorded
        return f"{name}, {self.graph.title}" if self.graph.title else name

    @property
    def by_parts(self) -> bool:
        """Whether its runtime runs parts of a graph."""
        return isinstance(self.runtime, GraphRuntime)

    def opened(self, starts: Sequence[str], ends: Sequence[str]) -> AbstractContextManager[Piece]:
        """Open a part of its graph, where it runs by parts."""
        assert isinstance(self.runtime, GraphRuntime)
        return self.runtime.opened(self.graph, starts, ends)


def unit_of(first: Side, second: Side) -> str:
    """The coarser dtype of two sides."""
    return coarser(first.dtype, second.dtype)


def local_difference(side: Side, recording: RecordedValues, before: Sequence[str], end: str, unit: str) -> Difference:
    """Measure the difference that one step adds, run by a side on the recorded values of the other."""
    difference, graph = Difference(unit=unit), side.graph
    starts = graph.dataflow.needed(before, [end])
    with side.opened(starts, [end]) as piece:
        for prompt, call in enumerate(graph.calls):
            # Recorded values take the place of what the step would read in this side's own run.
            feeds = graph.feeds(call) | {name: recording.get(prompt, name) for name in starts}
            difference.add(recording.get(prompt, end), piece(feeds)[end])
    return difference


@dataclass
class StepPart:
    """The smallest part of a step with equal inputs and a different output."""

    value: str
    starts: list[str]  # values that it starts from, besides the tokens
    nodes: list[str]  # `name (operator)`, in the order in which they run
    feeds: Arrays  # the first runtime's values, and the tokens
    # expected, other: the first runtime's value at the end, and what the second one makes of the feeds.
    expected: Arrays
    other: Arrays
    difference: Difference


def narrow(first: Side, second: Side, inputs: Arrays, end: str, prompt: int, tolerance: float) -> StepPart:
    """The part of a step that differs, each value computed from the first runtime's before it; else the whole step."""
    values = _shared(first.graph, second.graph, [*inputs], end)
    starts = first.graph.dataflow.needed([*inputs], values)
    with first.opened(starts, values) as piece:
        expected = piece(first.graph.feeds(first.graph.calls[prompt]) | {name: inputs[name] for name in starts})

    def part(value: str, *before: str) -> StepPart:
        values_before = inputs | {name: expected[name] for name in before}
        return _run(second, values_before, value, expected[value], prompt, unit_of(first, second))

    for place, value in enumerate(values):
        alone = part(value, *values[:place])
        if alone.difference.relative > tolerance:
            return alone
    # The fault is one of nodes together: a fusion, or casts that a runtime drops where they stand alone. The part is
    # the shortest run of nodes that differs: up to the first value that does, from the last ones that still let it.
    shortest = next((one for one in map(part, values) if one.difference.relative > tolerance), None)
    if shortest is None:
        return part(values[-1])
    # Ever more values before it are the first runtime's own: the run of nodes gets shorter from its beginning.
    for count in range(1, values.index(shortest.value)):
        shorter = part(shortest.value, *values[:count])
        if shorter.difference.relative <= tolerance:
            break
        shortest = shorter
    return shortest


def _run(side: Side, inputs: Arrays, value: str, expected: NDArray[Any], prompt: int, unit: str) -> StepPart:
    graph = side.graph
    starts = graph.dataflow.needed([*inputs], [value])
    feeds = graph.feeds(graph.calls[prompt]) | {name: inputs[name] for name in starts}
    with side.opened(starts, [value]) as piece:
        outputs = piece(feeds)
    difference = Difference(unit=unit)
    if expected.shape == outputs[value].shape:
        difference.add(expected, outputs[value])
    else:
        difference.max_abs = float("inf")  # another shape is no rounding
    # Some inputs of the call, as masks, belong to other parts of the graph.
    used = {entry.name: feeds[entry.name] for entry in graph.part(starts, [value]).graph.input if entry.name in feeds}
    return StepPart(value, starts, graph.nodes_of(starts, [value]), used, {value: expected}, outputs, difference)


def _shared(first: GraphUnderTest, second: GraphUnderTest, starts: Sequence[str], end: str) -> list[str]:
    """The numbers and truths of a step that both graphs have by the same name, in the second one's order."""
    names = {name for node in first.dataflow.nodes for name in node.output if name}
    if first.model.metadata.exporter != second.model.metadata.exporter:  # other names by chance mean other values
        names &= {*first.model.order}
    nodes = sorted(second.dataflow.ancestors([end], {*starts}))
    outputs = [name for at in nodes for name in second.dataflow.nodes[at].output if name in names]
    reads = second.dataflow.read_by(nodes) | {end}
    unfit = (0, onnx.TensorProto.STRING)  # a type that shape inference did not tell, or no number
    return [
        name
        for name in outputs
        if name in reads and not {first.types.get(name, 0), second.types.get(name, 0)} & {*unfit}
    ]
