"""Rewrite: a graph is cut at hook points into a chain of graphs, so that something else can act in between.

1. Hook points are taken in execution order. Those that do not depend on each other end the same segment: each segment
   computes the next hooked values from what earlier ones made, and the last one what is left of the outputs.
2. Whoever reads a hooked value stands in a later segment, and there the value is an input: it may have been changed.
3. Nothing is computed twice: a value made before a cut and read after it crosses the cut, as an output and an input.
   Each node stands in the first segment that reads what it makes, so that little crosses (`Dataflow.crossings`).
4. Except what depends on weights alone (a transposed matrix): every segment that reads it has it, since ONNX Runtime
   folds it when it opens the graph. Inputs that have a default (an RWKV's gates) count as weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from mionnx.graph.dataflow import Dataflow
from mionnx.graph.extract import extract


@dataclass(frozen=True)
class Segment:
    """One graph of a chain.

    Attributes:
        model: its graph, without the weights.
        inputs: names of all that is fed to it: inputs of the whole graph, hooked values, what crossed a cut.
        defaults: names of inputs that may be left out.
        hooks: the hooked values that it makes, in execution order; none in the last segment.
        others: what else it makes for later segments or as an output of the whole graph.
    """

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    defaults: tuple[str, ...]
    hooks: tuple[str, ...]
    others: tuple[str, ...]


def cut(model: onnx.ModelProto, hooks: Sequence[str]) -> list[Segment]:
    """Cut a graph into a chain.

    Args:
        model: the graph, without its weights; left alone.
        hooks: names of values that nodes make, in execution order; each must be an output of the graph, or something
            that an output depends on.

    Returns:
        the segments, in order. The last one makes no hooked value, and is left out if no output is left for it.
    """
    flow = Dataflow(model)
    groups = _groups(flow, hooks)
    held = {tensor.name for tensor in model.graph.initializer}
    outputs = [value.name for value in model.graph.output]
    crossings = flow.crossings(groups, outputs, [entry.name for entry in model.graph.input if entry.name not in held])
    segments: list[Segment] = []
    before: Sequence[str] = ()
    for group, after in zip([*groups, ()], [*crossings, outputs], strict=True):
        others = tuple(name for name in after if name not in before and name not in group)
        if ends := (*group, *others):
            part = extract(flow, flow.needed(before, ends), ends)
            entries = [value.name for value in part.graph.input]
            inputs = tuple(name for name in entries if name not in held)
            defaults = tuple(name for name in entries if name in held)
            segments.append(Segment(part, inputs, defaults, tuple(group), others))
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
