"""A chain of open graphs: a rewritten graph cut at hook points, so that Python functions can act in between.

1. Hook points are taken in execution order. Those that do not depend on each other end the same segment: each segment
   computes the next hooked values from what earlier ones made, and the last one what is left of the outputs.
2. Whoever reads a hooked value stands in a later segment, and there the value is an input: it may have been changed.
3. Nothing is computed twice: a value made before a cut and read after it crosses the cut, as an output and an input.
   Each node stands in the first segment that reads what it makes, so that little crosses (`Dataflow.crossings`).
4. Except what depends on weights alone (a transposed matrix): every segment that reads it has it, since ONNX Runtime
   folds it when it opens the graph. Inputs that have a default (an RWKV's gates) count as weights.
5. All sessions of a chain read the same weights as the model's other graphs; none reads a weight that it has no use
   for, so that a chain takes the memory of one session and a little for each cut.
6. On a CPU values pass from session to session as arrays; elsewhere they stay where the provider computed them, and
   only hooked ones are fetched.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from mionnx.engine.engine import Engine, Program
from mionnx.engine.options import Options
from mionnx.graph.dataflow import Dataflow, extract
from mionnx.graph.onnx_file import ModelProto
from mionnx.graph.report import Report
from mionnx.inputs.value import Value
from mionnx.rewrite.plan import Plan

THREADS = 512  # of all sessions of a chain together: each has its own, and systems limit their number
SEGMENT = 2**20  # approximate bytes of one more session

Between = Callable[[str, NDArray[Any]], NDArray[Any]]  # (hook, value): what the value becomes


@dataclass(frozen=True)
class Segment:
    """One graph of a chain.

    Attributes:
        inputs: names of all that is fed to it: inputs of the whole graph, hooked values, what crossed a cut.
        hooks: the hooked values that it makes, in execution order; none in the last segment.
        others: what else it makes for later segments or as an output of the whole graph.
    """

    model: ModelProto
    inputs: tuple[str, ...]
    defaults: tuple[str, ...]
    hooks: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def outputs(self) -> tuple[str, ...]:
        """All that it makes."""
        return (*self.hooks, *self.others)


class OpenSegment(NamedTuple):
    """A segment, open in an engine; and what no later segment reads."""

    segment: Segment
    program: Program
    done: tuple[str, ...]


@dataclass(frozen=True)
class SegmentChain:
    """A graph cut at hook points, open.

    Attributes:
        cost: approximate bytes of memory.
    """

    plan: Plan
    segments: tuple[OpenSegment, ...]
    report: Report
    cost: int
    options: Options

    def run(self, outputs: Collection[str], feeds: Mapping[str, Value], between: Between) -> dict[str, NDArray[Any]]:
        """Run all segments in order.

        Args:
            between: called for each hooked value when it is there; what it returns is what later nodes read.
        """
        values: dict[str, Any] = dict(feeds)
        results: dict[str, Any] = {}
        for segment, program, done in self.segments:
            names = (*segment.inputs, *(name for name in segment.defaults if name in feeds))
            computed = program.compute(segment.outputs, {name: values[name] for name in names})
            for hook in segment.hooks:
                computed[hook] = between(hook, np.asarray(computed[hook]))
            results |= {name: computed[name] for name in computed.keys() & outputs}
            values |= computed
            for name in done:
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
        hooks: where to cut, in execution order.
        optimised: whether the engine has optimised the graph already.
        cost: approximate bytes of one session of the whole graph.
    """
    segments = cut(model, hooks)
    threads = options.threads or psutil.cpu_count(logical=False) or 1
    each = replace(options, threads=max(1, min(threads, THREADS // len(segments))), cuda_graphs=False)
    opened: list[OpenSegment] = []
    later: set[str] = set()
    for segment in reversed(segments):
        # threads that spin while they wait would take the processor from the next session
        program = engine.open(segment.model.SerializeToString(), folder, each, optimised=optimised, spinning=False)
        done = tuple(name for name in (*segment.inputs, *segment.outputs) if name not in later)
        opened.append(OpenSegment(segment, program, done))
        later.update(segment.inputs)
    return SegmentChain(plan, tuple(reversed(opened)), report, cost + SEGMENT * len(opened), options)


def cut(model: ModelProto, hooks: Sequence[str]) -> list[Segment]:
    """Cut a graph into a chain.

    Args:
        hooks: names of values that nodes make, in execution order; each must be an output of the graph, or something
            that an output depends on.

    Returns:
        the segments, in order. The last one makes no hooked value, and is left out if no output is left for it.
    """
    flow = Dataflow(model)
    groups = _groups(flow, hooks)
    weights = {tensor.name for tensor in model.graph.initializer}
    outputs = [value.name for value in model.graph.output]
    inputs = [entry.name for entry in model.graph.input if entry.name not in weights]
    segments: list[Segment] = []
    before: Sequence[str] = ()
    for group, after in zip([*groups, ()], [*flow.crossings(groups, outputs, inputs), outputs], strict=True):
        others = tuple(name for name in after if name not in before and name not in group)
        if ends := (*group, *others):
            part = extract(flow, flow.needed(before, ends), ends)
            entries = [value.name for value in part.graph.input]
            fed, defaults = (tuple(name for name in entries if (name in weights) is own) for own in (False, True))
            segments.append(Segment(part, fed, defaults, tuple(group), others))
        before = after
    return segments


def _groups(flow: Dataflow, hooks: Sequence[str]) -> list[list[str]]:
    """The hooks that end each segment."""
    above = _above(flow, {hook: 1 << i for i, hook in enumerate(hooks)})
    groups: list[list[str]] = [[]]
    current = 0  # the hooks of the last group, as bits
    for i, hook in enumerate(hooks):
        if above[hook] & current:
            groups.append([])
            current = 0
        groups[-1].append(hook)
        current |= 1 << i
    return groups


def _above(flow: Dataflow, bits: dict[str, int]) -> dict[str, int]:
    """Hook -> the hooks that it depends on, as bits."""
    reached: dict[str, int] = {}
    above: dict[str, int] = {}
    for node, names in zip(flow.nodes, flow.reads, strict=True):
        behind = 0
        for name in names:
            behind |= reached.get(name, 0)
        for name in node.output:
            reached[name] = behind | bits.get(name, 0)
            if name in bits:
                above[name] = behind
    return above
