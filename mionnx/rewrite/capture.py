"""Rewrite: captures become outputs.

1. A value of the graph that is wanted becomes an output under its own name; a part or a cast of it, under another.
2. A value wanted before its interventions is the output `{hook}.before`.
3. A derived value (`hook_result`, `hook_states`) is computed by nodes that only its capture brings in: the
   table `DERIVATIONS` has a rewrite for each.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.errors import ModelError
from mionnx.graph.axes import heads_axis, sequence_axis
from mionnx.graph.builder import Builder, Tensor, Variable, write
from mionnx.graph.edited_graph import named, numpy_dtype
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import Metadata
from mionnx.graph.report import Report
from mionnx.rewrite.dequantise import dequantised
from mionnx.rewrite.plan import CaptureNode
from mionnx.rewrite.rwkv_derived import effective_attention, raw_effective_attention, states
from mionnx.rewrite.ssm_derived import mixer_attention, mixer_states, raw_mixer_attention


def head_results(op: Builder, point: HookPoint, tensors: Mapping[str, Tensor], metadata: Metadata) -> Variable:
    """Add the nodes of one layer's `hook_result`: [batch, seq, n_heads, hidden]."""
    sizes, attention = metadata.sizes, metadata.layers[point.layer or 0].attention
    if attention is None:
        raise ModelError(f"layer {point.layer} has no attention, and so no {point}")
    if attention.output_projection not in tensors:
        raise ModelError(f"no node of the graph reads {attention.output_projection}, the projection behind {point}")
    weight = dequantised(op, tensors[attention.output_projection])
    if not attention.output_is_rows:
        weight = op.Transpose(weight, perm=[1, 0])
    heads = op.Reshape(weight, [sizes.num_heads, metadata.heads(point.layer or 0)[2], sizes.hidden_size])
    z = tensors[str(point.source)]
    # a model of mixed precision may multiply in another dtype than its values have; results are given in z's
    other = bool(metadata.hook_dtypes) and numpy_dtype(z.dtype) != numpy_dtype(heads.dtype)
    read = op.Cast(z, to=numpy_dtype(heads.dtype)) if other else z
    # heads before positions: one product a head, [batch, n_heads, seq, head_dim] by [n_heads, head_dim, hidden]
    results = op.Transpose(op.MatMul(op.Transpose(read, perm=[0, 2, 1, 3]), heads), perm=[0, 2, 1, 3])
    results = op.Cast(results, to=numpy_dtype(z.dtype)) if other else results
    results.shape = ["batch", "seq", sizes.num_heads, sizes.hidden_size]
    return results


# Variant of a derived hook point -> the rewrite that computes it.
DERIVATIONS: dict[str, Callable[[Builder, HookPoint, Mapping[str, gs.Tensor], Metadata], gs.Variable]] = {
    "AttnResult": head_results,
    "SsmStates": mixer_states,
    "SsmEffectiveAttn": mixer_attention,
    "SsmEffectiveAttnRaw": raw_mixer_attention,
    "RwkvStates": states,
    "RwkvEffectiveAttn": effective_attention,
    "RwkvEffectiveAttnRaw": raw_effective_attention,
}


def capture(graph: gs.Graph, wants: Sequence[CaptureNode], metadata: Metadata, report: Report) -> None:
    """Make an output of every wanted value."""
    tensors = named(graph)
    for want in wants:
        value = _value(graph, want, tensors, metadata, report)
        output = part_of(graph, want, value, report)
        # keys and values that other layers read cross a cut under the name by which the model gives them
        if all(output is not own for own in graph.outputs):
            graph.outputs.append(output)
        report.outputs.append(want.fetched)


def part_of(graph: gs.Graph, want: CaptureNode, value: gs.Tensor, report: Report) -> gs.Tensor:
    """Positions and heads of a value, and its dtype, as a capture wants them."""
    if want.fetched == want.output:
        return value
    axes = want.axes
    op = Builder(graph, want.hook, f"{want.output}.capture", report)
    part = value
    if want.at_heads:
        part = op.Gather(part, op.input(want.heads_input, np.int64, 1), axis=heads_axis(axes))
    if want.at_positions:
        axis = sequence_axis(axes)
        # each row of the batch has columns of its own, so not Gather, which takes one list for all
        others = [i for i in range(len(axes)) if i not in (0, axis)]
        wide = op.Unsqueeze(op.input(want.columns_input, np.int64, 2), others)
        # the index is as long as the value along all other axes, lengths that only the run knows, and 1 along these two
        full_length = op.constant([i in others for i in range(len(axes))])
        target = op.Where(full_length, op.Shape(part), [1] * len(axes))
        part = op.GatherElements(part, op.Expand(wide, target), axis=axis)
    if want.dtype is not None:  # last: what is left out is not cast
        part = op.Cast(part, to=want.dtype)
    part.name = want.fetched
    part.shape = [f"{want.output}.capture:{axis}" for axis in range(len(axes))]
    return part


def _value(
    graph: gs.Graph, want: CaptureNode, tensors: Mapping[str, gs.Tensor], metadata: Metadata, report: Report
) -> gs.Tensor:
    point = HookPoint.parse(want.hook)
    if point.derived:
        op = Builder(graph, point.name, want.output, report)
        derived = DERIVATIONS[point.variant](op, point, tensors, metadata)
        derived.name, derived.shape = want.output, derived.shape or list(point.axes or ())
        return derived
    if want.output in tensors:
        return tensors[want.output]
    value = tensors[want.hook]  # wanted before, but nothing intervenes here: before and after are the same
    before = gs.Variable(want.output, dtype=value.dtype, shape=value.shape)
    return write(Builder(graph, want.hook, want.output, report).Identity(value), before)
