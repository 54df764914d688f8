"""Rewrite: captures become outputs.

1. A value of the graph that is wanted becomes an output under its own name.
2. A value wanted before its interventions is the output `{hook}.before`.
3. A derived value (`hook_result`, an RWKV's `hook_states`) is computed by nodes that only its capture brings in.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.graph.axes import heads_axis, sequence_axis
from mionnx.graph.builder import Builder
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import Metadata
from mionnx.graph.report import Report
from mionnx.rewrite.plan import CaptureNode
from mionnx.rewrite.rwkv_derived import derive


def capture(graph: gs.Graph, wants: Sequence[CaptureNode], metadata: Metadata, report: Report) -> None:
    """Make an output of every wanted value."""
    tensors = graph.tensors()
    for want in wants:
        value = _value(graph, want, tensors, metadata, report)
        graph.outputs.append(_part(graph, want, value, report))
        report.outputs.append(want.fetched)


def _part(graph: gs.Graph, want: CaptureNode, value: gs.Tensor, report: Report) -> gs.Tensor:
    """The positions and heads that are asked for."""
    if not (want.at_positions or want.at_heads):
        return value
    axes = want.axes
    build = Builder(graph, want.hook, f"{want.output}.capture", report)
    part = value
    if want.at_heads:
        heads = build.input(want.heads_input, np.int64, 1)
        part = build.node("Gather", [part, heads], "of_heads", axis=heads_axis(axes))
    if want.at_positions:
        axis = sequence_axis(axes)
        columns = build.input(want.columns_input, np.int64, 2)
        others = [i for i in range(len(axes)) if i not in (0, axis)]
        wide = build.node("Unsqueeze", [columns, build.ints("others", *others)], "wide", np.int64)
        shape = build.node("Shape", [part], "shape", np.int64)
        ones = build.constant("kept", [int(i not in (0, axis)) for i in range(len(axes))], np.bool_)
        target = build.node("Where", [ones, shape, build.ints("one", *[1] * len(axes))], "target", np.int64)
        index = build.node("Expand", [wide, target], "index", np.int64)
        part = build.node("GatherElements", [part, index], "at_positions", axis=axis)
    part.name = want.fetched
    part.shape = [f"{want.output}.capture:{axis}" for axis in range(len(axes))]
    return part


def _value(
    graph: gs.Graph, want: CaptureNode, tensors: Mapping[str, gs.Tensor], metadata: Metadata, report: Report
) -> gs.Tensor:
    point = HookPoint.parse(want.hook)
    if point.variant == "AttnResult":
        return _result(graph, point, tensors, metadata, report)
    if point.derived:
        return derive(Builder(graph, point.name, point.name, report), point, tensors)
    if want.output in tensors:
        return tensors[want.output]
    value = tensors[want.hook]  # wanted before, but nothing intervenes here: before and after are the same
    before = gs.Variable(want.output, dtype=value.dtype, shape=value.shape)
    return Builder(graph, want.hook, want.output, report).node("Identity", [value], "copy", out=before)


def _result(
    graph: gs.Graph, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata, report: Report
) -> gs.Variable:
    """Each head's share of the attention output: result[b, s, h] = z[b, s, h] W_O[h].

    W_O is the output projection's weight as [n_heads, head_dim, hidden]. Their sum over the heads, plus the
    projection's bias, is the attention's output.
    """
    sizes, attention = metadata.sizes, metadata.attention[point.layer or 0]
    build = Builder(graph, point.name, point.name, report)
    z, weight = tensors[str(HookPoint.AttnZ(point.layer or 0))], tensors[attention.output_projection]
    if not attention.output_is_rows:
        weight = build.node("Transpose", [weight], "rows", dtype=z.dtype, perm=[1, 0])
    shape = build.ints("shape", sizes.num_heads, sizes.head_dim, sizes.hidden_size)
    heads = build.node("Reshape", [weight, shape], "heads", dtype=z.dtype)
    by_head = build.node("Transpose", [z], "by_head", perm=[0, 2, 1, 3])
    shares = build.node("MatMul", [by_head, heads], "shares")
    out = gs.Variable(point.name, dtype=np.dtype(z.dtype), shape=["batch", "seq", sizes.num_heads, sizes.hidden_size])
    return build.node("Transpose", [shares], "result", out=out, perm=[0, 2, 1, 3])
