"""A chain of open graphs: a model cut at hook points, so that Python functions can act in between.

1. All sessions of a chain read the same weights as the model's other graphs; none reads a weight that it has no use
   for, so that a chain takes the memory of one session and a little for each cut.
2. On a CPU values pass from session to session as arrays; elsewhere they stay where the provider computed them, and
   only hooked ones are fetched.
3. Threads that spin while they wait would take the processor from the next session: those of a chain sleep.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from mionnx.engine.engine import Engine, Program
from mionnx.engine.options import Options
from mionnx.graph.onnx_file import ModelProto
from mionnx.graph.report import Report
from mionnx.inputs.value import Value
from mionnx.rewrite.plan import Plan
from mionnx.rewrite.segment import Segment, cut

THREADS = 512  # of all sessions of a chain together: each has its own, and systems limit their number
SEGMENT = 2**20  # approximate bytes of one more session

Arrays = dict[str, NDArray[Any]]
# (hook, value): what the value becomes.
Between = Callable[[str, NDArray[Any]], NDArray[Any]]


@dataclass(frozen=True)
class OpenSegment:
    """One open segment.

    Attributes:
        program: the segment, open in an engine.
        inputs: what is fed to it.
        defaults: inputs that may be left out (an RWKV's gates).
        hooks: the hooked values that it makes, in execution order.
        outputs: all that it makes: these, and what later segments or the caller need.
        done: what no later segment reads.
    """

    program: Program
    inputs: tuple[str, ...]
    defaults: tuple[str, ...]
    hooks: tuple[str, ...]
    outputs: tuple[str, ...]
    done: tuple[str, ...]


@dataclass(frozen=True)
class SegmentChain:
    """A model cut at hook points, open.

    Attributes:
        plan: what was asked of the graph before it was cut.
        segments: the open ones, in order.
        report: which nodes were added where.
        cost: approximate bytes of memory.
        options: what its sessions were opened with.
    """

    plan: Plan
    segments: tuple[OpenSegment, ...]
    report: Report
    cost: int
    options: Options

    def run(self, wanted: Collection[str], feeds: Mapping[str, Value], between: Between) -> Arrays:
        """Run all segments in order.

        Args:
            wanted: names of outputs.
            feeds: the inputs of the whole graph.
            between: called for each hooked value when it is there; what it returns is what later nodes read.

        Raises:
            ModelError: the engine failed while running.
        """
        values: dict[str, Any] = dict(feeds)
        results: dict[str, Any] = {}
        for segment in self.segments:
            names = (*segment.inputs, *(name for name in segment.defaults if name in feeds))
            outputs = segment.program.compute(segment.outputs, {name: values[name] for name in names})
            for hook in segment.hooks:
                outputs[hook] = between(hook, np.asarray(outputs[hook]))
            results |= {name: outputs[name] for name in outputs.keys() & wanted}
            values |= outputs
            for name in segment.done:
                values.pop(name, None)
        return {name: np.asarray(value) for name, value in results.items()}


def open_segments(
    model: ModelProto,
    report: Report,
    plan: Plan,
    hooks: tuple[str, ...],
    folder: Path,
    options: Options,
    engine: Engine,
    *,
    optimised: bool,
    cost: int,
) -> SegmentChain:
    """Cut a graph and open the segments.

    Args:
        model, report: a rewritten graph, and what was done.
        plan: the plan that was carried out.
        hooks: where to cut, in execution order.
        folder: of its weights.
        options: how sessions are opened.
        engine: what runs them.
        optimised: whether the engine has optimised the graph already.
        cost: approximate bytes of one session of the whole graph.

    Raises:
        ModelError: the engine refuses a segment.
    """
    segments = cut(model, hooks)
    each = replace(options, threads=_threads(options.threads, len(segments)), cuda_graphs=False)
    opened: list[OpenSegment] = []
    later: set[str] = set()
    for segment in reversed(segments):
        part = segment.model.SerializeToString()
        program = engine.open(part, folder, each, optimised=optimised, spinning=False)
        opened.append(_open_segment(segment, program, later))
        later.update(segment.inputs)
    return SegmentChain(plan, tuple(reversed(opened)), report, cost + SEGMENT * len(opened), options)


def _open_segment(segment: Segment, program: Program, later: set[str]) -> OpenSegment:
    outputs = (*segment.hooks, *segment.others)
    done = tuple(name for name in (*segment.inputs, *outputs) if name not in later)
    return OpenSegment(program, segment.inputs, segment.defaults, segment.hooks, outputs, done)


def _threads(asked: int, count: int) -> int:
    """Threads of each of so many sessions."""
    return max(1, min(asked or psutil.cpu_count(logical=False) or 1, THREADS // count))
