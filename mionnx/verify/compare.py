"""Runtimes compared hook point by hook point, streaming: one runtime at a time, a group of values at a time."""

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
from mionnx.machine.progress import Progress, silent
from mionnx.run.predictions import distributions
from mionnx.verify.difference import Difference, LogitDifference, layer_losses
from mionnx.verify.graph_under_test import LOGITS_POINT, GraphUnderTest
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.result import Beside, Fault
from mionnx.verify.runtimes import Pass
from mionnx.verify.steps import Side, local_difference, narrow, unit_of

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class ComparisonSettings:
    """Settings of a comparison."""

    tolerance: float  # largest relative difference that is agreement
    local: bool = False  # whether to measure what each step adds by itself
    greedy: int = 0  # number of tokens to choose after each prompt
    positions: Sequence[int] | None = None  # those of each prompt that are compared; None for all
    progress: Progress = silent
    notes: list[str] = field(default_factory=list)  # what a reader of the result has to know


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
    """Hand on every value of every prompt as (prompt, hook point, value), group by group."""
    runtime, graph = side.runtime, side.graph
    assert runtime is not None  # a recorded run is read, not run
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
    side.greedy = _choose(side, settings)


def _choose(side: Side, settings: ComparisonSettings) -> list[Ids]:
    if not settings.greedy:
        return []
    assert side.runtime is not None
    try:
        with side.runtime.passes(side.graph, [LOGITS_POINT]) as run:
            return [_continued(run, side.graph, call, settings.greedy) for call in side.graph.calls]
    except InterventionError as error:  # the spec is made for the prompt alone
        settings.notes.append(f"{side.title} does not continue the prompts: {error}")
        return []


def _continued(run: Pass, graph: GraphUnderTest, call: TokenBatch, count: int) -> Ids:
    """The most probable tokens after a prompt, [batch, n]."""
    ids = np.zeros((call.batch, 0), np.int64)
    limit = graph.model.metadata.sizes.max_positions

    # the whole text runs anew for every token: no runtime has to have a cache
    def extend(_: str, logits: NDArray[Any]) -> None:
        nonlocal ids
        ids = np.concatenate([ids, logits[:, -1:].argmax(-1)], axis=1)

    for _ in range(count if limit is None else min(count, limit - call.seq + 1)):
        run(graph.longer(call, ids) if ids.size else call, extend)
    return ids


def compare(first: Side, second: Side, scratch: Path, settings: ComparisonSettings) -> Beside:
    """Compare one side with the first."""
    begin = time.monotonic()
    names, runtime = second.graph.names, second.runtime
    assert runtime is not None
    # a runtime that runs models as a whole (torch) gives its values in its own order: they are recorded, to feed them
    # to the steps of the first; of all others nothing is kept
    if not second.by_parts and first.by_parts and settings.local:
        second.recording = RecordedValues(scratch / "second")
    differences, logits = _differences(first, second, settings)
    if settings.greedy:
        second.greedy = _choose(second, settings)
    local = _local(first, second, settings)
    other = second.graph.model is not first.graph.model
    return Beside(
        second.title,
        [differences[name].at(name, local.get(name)) for name in names],
        logits.to_dict(),
        _same_choices(first.greedy, second.greedy),
        _fault(first, second, local, scratch, settings),
        runtime.environment(),
        time.monotonic() - begin,
        # Layers are compared between models: runtimes of one model differ by steps.
        layer_losses({name: differences[name].lost for name in names}) if other else [],
    )


def _differences(
    first: Side, second: Side, settings: ComparisonSettings
) -> tuple[dict[str, Difference], LogitDifference]:
    """Run the second side, and compare each value with the recorded one."""
    recording = first.recording
    assert recording is not None
    differences = {name: Difference(unit=unit_of(first, second)) for name in second.graph.names}
    next_tokens, metadata = LogitDifference(), second.graph.model.metadata

    def look(prompt: int, name: str, value: NDArray[Any]) -> None:
        part = part_of(name, value, settings.positions)
        expected = recording.get(prompt, name)
        if expected.shape != part.shape:
            raise ModelError(f"{name}: {first.title} has {list(expected.shape)}, {second.title} has {list(part.shape)}")
        differences[name].add(expected, part)
        if name == metadata.main_point and metadata.has_distribution:
            next_tokens.add(*(distributions(one, metadata) for one in (expected, part)))
        if second.recording is not None:
            second.recording.add(prompt, name, part)

    stream(second, look, settings.progress)
    return differences, next_tokens


def _same_choices(one: Sequence[Ids], other: Sequence[Ids]) -> float | None:
    """Share of equal tokens, up to the first different one of each row."""
    if not one or not other:
        return None
    same = total = 0
    for ids, beside in zip(one, other, strict=True):
        width = min(ids.shape[1], beside.shape[1])
        equal = ids[:, :width] == beside[:, :width]
        # The product along a row is 0 from the first different token on: what follows has another context.
        same += int(np.cumprod(equal, axis=1).sum())
        total += equal.size
    return same / max(1, total)


def _local(first: Side, second: Side, settings: ComparisonSettings) -> dict[str, Difference]:
    """Measure the difference that each step adds by itself, by the hook point at its end."""
    # Steps run in the side that can run parts, on the values of the other.
    side, recording = (second, first.recording) if second.by_parts else (first, second.recording)
    # A step needs whole values, of all positions, to run on.
    if not settings.local or settings.positions is not None or recording is None:
        return {}
    names, steps = second.graph.names, {}
    for place, name in enumerate(names):
        settings.progress(f"{second.title}, step by step", place, len(names))
        steps[name] = local_difference(side, recording, names[:place], name, unit_of(first, second))
    settings.progress(f"{second.title}, step by step", len(names), len(names))
    return steps


def _fault(
    first: Side, second: Side, local: dict[str, Difference], scratch: Path, settings: ComparisonSettings
) -> Fault | None:
    """Find the first step that adds more than the tolerance, as narrow as both sides allow."""
    # In execution order: the first.
    name = next((name for name, one in local.items() if one.relative > settings.tolerance), None)
    if name is None:
        return None
    fault = _fault_at(second.graph, name, local[name])
    # A recorded run has no graph to run parts of.
    if first.runtime is None:
        return fault
    if first.by_parts and second.by_parts:
        return _narrowed(first, second, fault, settings.tolerance)
    return _refined(first, second, fault, scratch, settings)


def _fault_at(graph: GraphUnderTest, name: str, local: Difference) -> Fault:
    before = graph.names[: graph.names.index(name)]
    return Fault(name, graph.dataflow.needed(before, [name]), local.relative, graph.nodes_of(before, [name]))


def _refined(first: Side, second: Side, fault: Fault, scratch: Path, settings: ComparisonSettings) -> Fault:
    """Find the first hook point inside a step that adds too much, without running parts of it."""
    side, feeder = (first, second) if first.by_parts else (second, first)
    model, names = side.graph.model, side.graph.names
    starts = names[: names.index(fault.hook)]
    # torch gives values at hook points only, derived ones not among them
    begin = max((model.order[name] for name in starts), default=-1)
    inner = [
        point.name
        for point in model.hook_points()
        if not point.derived and begin < model.order[point.name] <= model.order[fault.hook]
    ]
    graph = GraphUnderTest(model, side.graph.spec, [*starts, *inner], side.graph.calls)
    recording = RecordedValues(scratch / "inner")
    record(Side(graph, feeder.runtime), recording, replace(settings, greedy=0))
    stepping = Side(graph, side.runtime)
    for place, name in enumerate(inner, len(starts)):
        difference = local_difference(stepping, recording, graph.names[:place], name, unit_of(first, second))
        if difference.relative > settings.tolerance:
            return _fault_at(graph, name, difference)
    return fault


def _narrowed(first: Side, second: Side, fault: Fault, tolerance: float) -> Fault:
    """Find the nodes of a step that differ by themselves."""
    names, recording = second.graph.names, first.recording
    assert recording is not None
    # The step was judged over all prompts: the fault may show in any one of them.
    for prompt in range(len(second.graph.calls)):
        inputs = {start: recording.get(prompt, start) for start in names[: names.index(fault.hook)]}
        part = narrow(first, second, inputs, fault.hook, prompt, tolerance)
        if part.difference.relative > tolerance:
            return replace(fault, nodes=part.nodes, value=part.value)
    return fault
