"""Rewrite: captures become outputs.

1. A value of the graph that is wanted becomes an output under its own name.
2. A value wanted before its interventions is the output `{hook}.before`.
3. A derived value (`hook_result`, an RWKV's `hook_states`) is computed by nodes that only its capture brings in.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.errors import ModelError
from mionnx.graph.axes import heads_axis, sequence_axis
from mionnx.graph.builder import Builder, write
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
    op = Builder(graph, want.hook, f"{want.output}.capture", report)
    part = value
    if want.at_heads:
        part = op.Gather(part, op.input(want.heads_input, np.int64, 1), axis=heads_axis(axes))
    if want.at_positions:
        axis = sequence_axis(axes)
        others = [i for i in range(len(axes)) if i not in (0, axis)]
        wide = op.Unsqueeze(op.input(want.columns_input, np.int64, 2), others)
        whole = op.constant([i in others for i in range(len(axes))])
        target = op.Where(whole, op.Shape(part), [1] * len(axes))
        part = op.GatherElements(part, op.Expand(wide, target), axis=axis)
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
    return write(Builder(graph, want.hook, want.output, report).Identity(value), before)


def _result(
    graph: gs.Graph, point: HookPoint, tensors: Mapping[str, gs.Tensor], metadata: Metadata, report: Report
) -> gs.Variable:
    """Each head's share of the attention output: result[b, s, h] = z[b, s, h] W_O[h].

    W_O is the output projection's weight as [n_heads, head_dim, hidden]. Their sum over the heads, plus the
    projection's bias, is the attention's output.
    """
    sizes, attention = metadata.sizes, metadata.attention[point.layer or 0]
    op = Builder(graph, point.name, point.name, report)
    if attention.output_projection not in tensors:
        raise ModelError(f"no node of the graph reads {attention.output_projection}, the projection behind {point}")
    z, weight = tensors[str(HookPoint.AttnZ(point.layer or 0))], tensors[attention.output_projection]
    if not attention.output_is_rows:
        weight = op.Transpose(weight, perm=[1, 0])
    heads = op.Reshape(weight, [sizes.num_heads, sizes.head_dim, sizes.hidden_size])
    shares = op.MatMul(op.Transpose(z, perm=[0, 2, 1, 3]), heads)
    out = gs.Variable(point.name, dtype=np.dtype(z.dtype), shape=["batch", "seq", sizes.num_heads, sizes.hidden_size])
    return write(op.Transpose(shares, perm=[0, 2, 1, 3]), out)
