"""Determinism: is a run the same, bit for bit, when it is repeated, on one thread, or with its rows in a batch."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress
from mionnx.verify.compare import Side, stream
from mionnx.verify.difference import Difference
from mionnx.verify.graph_under_test import GraphUnderTest
from mionnx.verify.recorded_values import RecordedValues
from mionnx.verify.result import IN_BATCH, ONE_THREAD, TWICE, Repeat
from mionnx.verify.runtime import Runtime
from mionnx.verify.runtime_names import WITH_THREADS, runtime_of


def repeats(runtime: Runtime, graph: GraphUnderTest, checkpoint: Path | None, progress: Progress) -> Iterator[Repeat]:
    """Run a graph again in each way that a runtime has.

    A batch is the prompt and the same prompt backwards: rows of one length need no padding, and differ.
    """
    with TemporaryDirectory() as scratch:
        recording = RecordedValues(Path(scratch) / "first")
        stream(Side(graph, runtime), recording.add, progress)
        yield _repeat(runtime.title, TWICE, runtime, graph, graph, recording, progress)
        name, *settings = runtime.title.split(":")
        with_threads = name in WITH_THREADS or name.endswith("ExecutionProvider")
        if with_threads and not any(setting.startswith("threads=") for setting in settings):
            single = runtime_of(f"{runtime.title}:threads=1", checkpoint)
            yield _repeat(runtime.title, ONE_THREAD, single, graph, graph, recording, progress)
        doubled = GraphUnderTest(graph.model, graph.spec, graph.names, [_doubled(call) for call in graph.calls])
        yield _repeat(runtime.title, IN_BATCH, runtime, doubled, graph, recording, progress)


def _doubled(call: TokenBatch) -> TokenBatch:
    """Add the reversed text as a second row; lengths stay as they are."""
    ids = np.concatenate([call.input_ids, call.input_ids[:, ::-1]])
    ends = [None if length is None else np.tile(length, 2) for length in (call.prompt_lengths, call.final_lengths)]
    return TokenBatch(ids, np.ones_like(ids), np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(), *ends)


def _repeat(
    title: str,
    what: str,
    runtime: Runtime,
    graph: GraphUnderTest,
    first: GraphUnderTest,
    recording: RecordedValues,
    progress: Progress,
) -> Repeat:
    differences = {name: Difference(unit=graph.model.metadata.dtype) for name in first.names}

    def compare(prompt: int, name: str, value: NDArray[Any]) -> None:
        differences[name].add(recording.get(prompt, name), value[: first.calls[prompt].batch])

    stream(Side(graph, runtime), compare, progress)
    differing = [name for name in first.names if not differences[name].identical]
    largest = max(one.max_abs for one in differences.values())
    relative = max(one.relative for one in differences.values())
    return Repeat(title, what, not differing, largest, relative, differing[0] if differing else None)
