"""Runtimes compared hook point by hook point, streaming: one runtime at a time, a group of values at a time.

1. The first runtime's values are recorded on disk as they are computed, and so are those of a runtime that gives them
   in its own order.
2. Every other runtime's values are compared with the recorded ones as they are computed, and let go.
3. What a step adds by itself is measured by running the step in the second runtime on the first one's values. A
   runtime that runs models as a whole (torch) has its values fed to the other one instead.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, InterventionError, ModelError
from mionnx.graph.axes import has_sequence, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress
from mionnx.verify.difference import Difference, LogitDifference, coarser
from mionnx.verify.environment import environment
from mionnx.verify.graph_under_test import LOGITS_POINT, GraphUnderTest
from mionnx.verify.narrow_fault import narrow
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.result import Beside, Fault
from mionnx.verify.rows import Row, layer_losses
from mionnx.verify.runtime import GraphRuntime, Pass, Runtime
from mionnx.verify.step_error import local_difference, nodes_of

Ids = NDArray[np.int64]


@dataclass
class Side:
    """One side of a comparison: a graph in a runtime, or a recorded run.

    Attributes:
        runtime: what runs it; None for a recorded run.
        greedy: what it chose after each prompt, [batch, n] each; none if it was not asked.
    """

    graph: GraphUnderTest
    runtime: Runtime | None
    recording: RecordedValues | None = None
    greedy: list[Ids] = field(default_factory=list)
    recorded: str = ""

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
    def graph_runtime(self) -> GraphRuntime | None:
        """The runtime, if it can run parts of a graph."""
        return self.runtime if isinstance(self.runtime, GraphRuntime) else None


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings of a comparison.

    Attributes:
        tolerance: largest relative difference that is agreement.
        local: whether to measure what each step adds by itself.
        greedy: how many tokens to choose after each prompt.
        positions: of each prompt, those that are compared; None for all.
        notes: what a reader of the result has to know.
    """

    tolerance: float
    local: bool
    greedy: int
    positions: Sequence[int] | None
    progress: Progress
    notes: list[str] = field(default_factory=list)


def unit_of(first: Side, second: Side) -> str:
    """The coarser dtype of two sides."""
    return coarser(first.dtype, second.dtype)


def part_of(name: str, value: NDArray[Any], positions: Sequence[int] | None) -> NDArray[Any]:
    """Select the compared positions of a value; all of a value without a sequence axis."""
    axes = HookPoint.parse(name).axes or ()
    if positions is None or not has_sequence(axes):
        return value
    axis = sequence_axis(axes)
    try:
        return np.take(value, positions, axis)
    except IndexError:
        raise InputError(f"{name}: positions {list(positions)} of a prompt of {value.shape[axis]} tokens") from None


def stream(side: Side, look: Callable[[int, str, NDArray[Any]], None], progress: Progress) -> None:
    """Hand on every value of every prompt as (prompt, hook point, value), group by group.

    Raises:
        ModelError: the runtime cannot run the model, or has no value at a hook point.
    """
    runtime, graph = side.runtime, side.graph
    assert runtime is not None
    groups = list(runtime.groups(graph, graph.names))
    for done, group in enumerate(groups):
        progress(side.title, done, len(groups))
        with runtime.passes(graph, group) as run:
            for prompt, call in enumerate(graph.calls):
                left = {*group}

                def hand_on(name: str, value: NDArray[Any], prompt: int = prompt, left: set[str] = left) -> None:
                    left.discard(name)
                    look(prompt, name, value)

                run(call, hand_on)
                if left:
                    raise ModelError(f"{side.title} has no value at {min(left, key=graph.names.index)}")
    progress(side.title, len(groups), len(groups))


def record(side: Side, recording: RecordedValues, settings: ComparisonSettings) -> None:
    """Record a side's values as they are computed, and let it continue the prompts."""
    side.recording = recording

    def keep(prompt: int, name: str, value: NDArray[Any]) -> None:
        recording.add(prompt, name, part_of(name, value, settings.positions))

    stream(side, keep, settings.progress)
    side.greedy = choose(side, settings)


def choose(side: Side, settings: ComparisonSettings) -> list[Ids]:
    """Continue each prompt greedily; every token runs the whole text anew.

    None, and a note, where the spec is made for the prompt alone.
    """
    if not settings.greedy:
        return []
    assert side.runtime is not None
    try:
        with side.runtime.passes(side.graph, [LOGITS_POINT]) as run:
            return [_continued(run, side.graph, call, settings.greedy) for call in side.graph.calls]
    except InterventionError as error:
        settings.notes.append(f"{side.title} does not continue the prompts: {error}")
        return []


def _continued(run: Pass, graph: GraphUnderTest, call: TokenBatch, count: int) -> Ids:
    """[batch, n]."""
    ids = np.zeros((call.batch, 0), np.int64)
    limit = graph.model.metadata.sizes.max_positions
    for _ in range(count if limit is None else min(count, limit - call.seq + 1)):
        chosen = _top_tokens(run, graph.longer(call, ids) if ids.size else call)
        ids = np.concatenate([ids, chosen], axis=1)
    return ids


def _top_tokens(run: Pass, call: TokenBatch) -> Ids:
    """Top next token of each row, [batch, 1]."""
    tokens: list[Ids] = []

    def look(_: str, logits: NDArray[Any]) -> None:
        tokens.append(logits[:, -1:].argmax(-1))

    run(call, look)
    return tokens[0]


def compare(first: Side, second: Side, scratch: Path, settings: ComparisonSettings) -> Beside:
    """Compare one side with the first."""
    begin = time.monotonic()
    names = second.graph.names
    unit = unit_of(first, second)
    differences, logits = {name: Difference(unit=unit) for name in names}, LogitDifference()
    in_passes = second.graph_runtime is None
    if in_passes and first.graph_runtime is not None and settings.local:
        second.recording = RecordedValues(scratch / "second")
    _compare_values(first, second, differences, logits, settings)
    if settings.greedy:
        second.greedy = choose(second, settings)
    local = _local(first, second, settings)
    fault = _fault(first, second, local, scratch, settings)
    runtime = second.runtime
    assert runtime is not None
    other = second.graph.model is not first.graph.model
    return Beside(
        second.title,
        [Row.of(name, differences[name], local.get(name)) for name in names],
        logits.to_dict(second.graph.model.metadata.sizes.vocab_size),
        _same_choices(first.greedy, second.greedy),
        fault,
        environment(runtime),
        time.monotonic() - begin,
        layer_losses({name: differences[name].lost for name in names}) if other else [],
    )


def _compare_values(
    first: Side, second: Side, differences: dict[str, Difference], logits: LogitDifference, settings: ComparisonSettings
) -> None:
    recording = first.recording
    assert recording is not None

    def look(prompt: int, name: str, value: NDArray[Any]) -> None:
        part = part_of(name, value, settings.positions)
        expected = recording.get(prompt, name)
        if expected.shape != part.shape:
            raise ModelError(f"{name}: {first.title} has {list(expected.shape)}, {second.title} has {list(part.shape)}")
        differences[name].add(expected, part)
        if name == LOGITS_POINT:
            logits.add(expected, part)
        if second.recording is not None:
            second.recording.add(prompt, name, part)

    stream(second, look, settings.progress)


def _same_choices(one: Sequence[Ids], other: Sequence[Ids]) -> float | None:
    """Share of equal tokens, up to the first different one of each row."""
    if not one or not other:
        return None
    same = total = 0
    for ids, beside in zip(one, other, strict=True):
        width = min(ids.shape[1], beside.shape[1])
        equal = ids[:, :width] == beside[:, :width]
        same += int(np.cumprod(equal, axis=1).sum())
        total += equal.size
    return same / max(1, total)


def _stepping(first: Side, second: Side) -> tuple[Side, RecordedValues] | None:
    """The side that runs the steps, and the recorded values it is fed; None if neither can."""
    if second.graph_runtime is not None and first.recording is not None:
        return second, first.recording
    return (first, second.recording) if first.graph_runtime is not None and second.recording is not None else None


def _local(first: Side, second: Side, settings: ComparisonSettings) -> dict[str, Difference]:
    """Measure the difference that each step adds by itself, by the hook point at its end."""
    stepping = _stepping(first, second)
    if not settings.local or settings.positions is not None or stepping is None:
        return {}
    side, recording = stepping
    runtime, names = side.graph_runtime, second.graph.names
    assert runtime is not None
    steps = {}
    for place, name in enumerate(names):
        settings.progress(f"{second.title}, step by step", place, len(names))
        steps[name] = local_difference(runtime, side.graph, recording, names[:place], name, unit_of(first, second))
    settings.progress(f"{second.title}, step by step", len(names), len(names))
    return steps


def _fault(
    first: Side, second: Side, local: dict[str, Difference], scratch: Path, settings: ComparisonSettings
) -> Fault | None:
    """Find the first step that adds more than the tolerance, as narrow as both sides allow."""
    for name, difference in local.items():
        if difference.relative > settings.tolerance:
            graph = second.graph
            before = graph.names[: graph.names.index(name)]
            fault = Fault(name, graph.starts_of(before, [name]), difference.relative, nodes_of(graph, before, name))
            if first.runtime is None:
                return fault
            if first.graph_runtime is not None and second.graph_runtime is not None:
                return _narrowed(first, second, fault, settings.tolerance)
            return _refined(first, second, fault, scratch, settings)
    return None


def _refined(first: Side, second: Side, fault: Fault, scratch: Path, settings: ComparisonSettings) -> Fault:
    """Find the first hook point inside a step that adds too much, without running parts of it."""
    side, feeder = (first, second) if first.graph_runtime is not None else (second, first)
    model, names = side.graph.model, side.graph.names
    starts = names[: names.index(fault.hook)]
    begin = max((model.order[name] for name in starts), default=-1)
    inner = [
        point.name
        for point in model.hook_points()
        if not point.derived and begin < model.order[point.name] <= model.order[fault.hook]
    ]
    graph = GraphUnderTest(model, side.graph.spec, [*starts, *inner], side.graph.calls)
    recording, unit = RecordedValues(scratch / "inner"), unit_of(first, second)
    record(Side(graph, feeder.runtime), recording, replace(settings, greedy=0))
    for place, name in enumerate(inner, len(starts)):
        assert side.graph_runtime is not None
        difference = local_difference(side.graph_runtime, graph, recording, graph.names[:place], name, unit)
        if difference.relative > settings.tolerance:
            before = graph.names[:place]
            return Fault(name, graph.starts_of(before, [name]), difference.relative, nodes_of(graph, before, name))
    return fault


def _narrowed(first: Side, second: Side, fault: Fault, tolerance: float) -> Fault:
    """Find the nodes of a step that differ by themselves."""
    graph, name = second.graph, fault.hook
    before = graph.names[: graph.names.index(name)]
    one, other, recording = first.graph_runtime, second.graph_runtime, first.recording
    assert one is not None
    assert other is not None
    assert recording is not None
    for prompt in range(len(graph.calls)):
        inputs = {start: recording.get(prompt, start) for start in before}
        part = narrow((one, first.graph), (other, graph), inputs, name, prompt, tolerance)
        if part.difference.relative > tolerance:
            return Fault(name, fault.after, fault.local, part.nodes, part.value)
    return fault
