"""Rewrite: the positions and heads of captures and gradients in part become part of the graph.

1. Heads become constants.
2. Positions are looked up among the tokens of a call, each in its row's own text. A call computes its own tokens only:
   at a position that stands in none of its columns the output is NaN (-1 where it holds whole numbers).
"""

import numpy as np
import onnx

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.plan import BoundCapture
from mionnx.bind.values import heads_of
from mionnx.compile.token_facts import TokenFacts, replace_input
from mionnx.graph.axes import sequence_axis
from mionnx.graph.builder import Builder, Graph, Tensor, edit, to_proto, write
from mionnx.graph.report import Report


def bake_parts(proto: onnx.ModelProto, bound: BoundSpec, report: Report) -> onnx.ModelProto:
    """Turn the inputs of captures and gradients in part into constants and nodes."""
    parts = [one for one in (*bound.captures, *bound.gradients) if one.node.at_positions or one.node.at_heads]
    if not parts:
        return proto
    graph = edit(proto)
    calls = TokenFacts(graph, report, "mionnx.parts")
    for part in parts:
        _bake(graph, part, calls, report)
    graph.toposort()
    return to_proto(graph, proto, {})


def _bake(graph: Graph, part: BoundCapture, calls: TokenFacts, report: Report) -> None:
    """Bake the positions and heads of one output."""
    node, tensors = part.node, graph.tensors()
    op = Builder(graph, node.hook, f"{node.output}.baked", report)
    if part.request.heads is not None:
        replace_input(graph, tensors[node.heads_input], op.constant(heads_of(part)))
    if part.request.positions is None:
        return
    chosen = calls.chosen(f"{node.output}.chosen", part.request.positions)
    here = op.Equal(op.Unsqueeze(calls.positions, [2]), op.Unsqueeze(chosen, [1]))  # [batch, seq, n]
    counted = op.Cast(here, to=np.int32)
    replace_input(graph, tensors[node.columns_input], op.ArgMax(counted, axis=1, keepdims=0))
    present = op.Cast(op.ReduceMax(counted, [1], keepdims=0), to=np.bool_)
    _mark_absent(graph, op, part, tensors[node.fetched], present)


def _mark_absent(graph: Graph, op: Builder, part: BoundCapture, value: Tensor, present: Tensor) -> None:
    """Write NaN, or -1, where a call has no token at a position."""
    axes, name = part.node.axes, value.name
    others = [axis for axis in range(len(axes)) if axis not in (0, sequence_axis(axes))]
    dtype = np.dtype(value.dtype)
    absent = op.constant(-1 if dtype.kind in "iu" else np.array(np.nan), dtype)
    value.name = f"{name}.found"
    marked = op.Where(op.Unsqueeze(present, others) if others else present, value, absent)
    named = type(value)(name, dtype=value.dtype, shape=value.shape)
    graph.outputs = [write(marked, named) if output is value else output for output in graph.outputs]
