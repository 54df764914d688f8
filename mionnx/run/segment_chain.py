"""A chain of open graphs: a rewritten graph cut at hook points, so that Python functions can act in between.

1. Hook points that do not depend on each other end the same segment; whoever reads a hooked value stands in a later
   one, and there the value is an input: it may have been changed.
2. Nothing is computed twice: a value made before a cut and read after it crosses the cut, as an output and an input.
   What depends on weights alone (a transposed matrix) every segment has that reads it, since ONNX Runtime folds it when
   it opens the graph. Inputs that have a default (an RWKV's gates) count as weights.
3. No session reads a weight that it has no use for, so that a chain takes the memory of one session and a little for
   each cut.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from mionnx.engine.engine import Engine, Program
from mionnx.engine.options import Options
from mionnx.graph import onnx_file
from mionnx.graph.dataflow import Dataflow, extract
from mionnx.graph.report import Report
from mionnx.inputs.layer_cache import Value
from mionnx.rewrite.plan import Plan
from mionnx.run.graph_memory import SEGMENT

THREADS = 512  # of all sessions of a chain together: each has its own, and systems limit their number

Between = Callable[[str, NDArray[Any]], NDArray[Any]]  # (hook, value): what the value becomes


@dataclass(frozen=True)
class Segment:
    """One graph of a chain."""

    model: onnx_file.ModelProto
    inputs: tuple[str, ...]  # names of all that is fed: inputs of the whole graph, hooked values, what crossed a cut
    defaults: tuple[str, ...]
    hooks: tuple[str, ...]  # the hooked values that it makes, in execution order; none in the last segment
    others: tuple[str, ...]  # what else it makes, for later segments or as an output of the whole graph

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*self.hooks, *self.others)


class OpenSegment(NamedTuple):
    """A segment, open in an engine; and what no later segment reads."""

    segment: Segment
    program: Program
    done: tuple[str, ...]


@dataclass(frozen=True)
class SegmentChain:
    """A graph cut at hook points, open."""

    plan: Plan
    segments: tuple[OpenSegment, ...]
    cost: int
    acting: frozenset[str] | None = None  # hooked values that a call changes; None for all
    # feeds, lent: see `OpenGraph`.
    feeds: Mapping[str, Value] = field(default_factory=dict)
    lent: Mapping[str, str] = field(default_factory=dict)

    def run(self, outputs: Collection[str], feeds: Mapping[str, Value], between: Between) -> dict[str, NDArray[Any]]:
        """Run all segments in order; what `between` makes of a hooked value is what later nodes read."""
        values: dict[str, Any] = {**self.feeds, **{name: feeds[source] for name, source in self.lent.items()}, **feeds}
        results: dict[str, Any] = {}
        for segment, program, done in self.segments:
            names = (*segment.inputs, *(name for name in segment.defaults if name in feeds))
            # On another device than the CPU values stay where they were computed; only hooked ones are fetched.
            computed = program.compute(segment.outputs, {name: values[name] for name in names})
            for hook in segment.hooks:
                if self.acting is None or hook in self.acting:
                    computed[hook] = between(hook, np.asarray(computed[hook]))
            results |= {name: computed[name] for name in computed.keys() & outputs}
            values |= computed
            for name in done:
                values.pop(name, None)
        return {name: np.asarray(value) for name, value in results.items()}


@dataclass(frozen=True)
class GraphOpening:
    """Model, folder and options with which an engine opens a plan."""

    model: bytes | Path  # without weights; the file of the untouched graph
    folder: Path
    options: Options
    report: Report
    cost: int  # approximate bytes of memory
    optimised: bool = False  # whether the engine has optimised it already, as a base


def open_segments(opening: GraphOpening, plan: Plan, hooks: tuple[str, ...], engine: Engine) -> SegmentChain:
    """Cut a graph at hook points, in execution order, and open the segments."""
    assert isinstance(opening.model, bytes)  # it captures where it is cut
    segments = cut(onnx_file.parse(opening.model), hooks)
    threads = opening.options.threads or psutil.cpu_count(logical=False) or 1
    each = replace(opening.options, threads=max(1, min(threads, THREADS // len(segments))), cuda_graphs=False)
    parts: list[OpenSegment] = []
    later: set[str] = set()
    for segment in reversed(segments):
        model = segment.model.SerializeToString()
        # threads that spin while they wait would take the processor from the next session
        program = engine.open(model, opening.folder, each, optimised=opening.optimised, spinning=False)
        done = tuple(name for name in (*segment.inputs, *segment.outputs) if name not in later)
        parts.append(OpenSegment(segment, program, done))
        later.update(segment.inputs)
    return SegmentChain(plan, tuple(reversed(parts)), opening.cost + SEGMENT * len(parts))


def cut(model: onnx_file.ModelProto, hooks: Sequence[str]) -> list[Segment]:
    """Cut a graph at values that its outputs are, or depend on, in execution order."""
    # The last segment makes no hooked value, and is left out if no output is left for it.
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
    bits = {hook: 1 << i for i, hook in enumerate(hooks)}  # sets of hooks are the bits of a number
    reached: dict[str, int] = {}  # value -> the hooks that it is, or depends on
    above: dict[str, int] = {}  # hook -> those that it depends on
    maker: dict[str, int] = {}
    for number, (node, names) in enumerate(zip(flow.nodes, flow.reads, strict=True)):
        maker |= dict.fromkeys(node.output, number)
        behind = 0
        for name in names:
            behind |= reached.get(name, 0)
        for name in node.output:
            reached[name] = behind | bits.get(name, 0)
            above[name] = behind
    groups: list[list[str]] = [[]]
    current = 0  # the hooks of the last group
    group_of: dict[int, int] = {}  # of nodes: values of one node are made in one segment, and cut there
    for hook in hooks:
        if (group := group_of.get(maker[hook])) is not None:
            groups[group].append(hook)
            continue
        if above[hook] & current:
            groups.append([])
            current = 0
        groups[-1].append(hook)
        group_of[maker[hook]] = len(groups) - 1
        current |= bits[hook]
    return groups
