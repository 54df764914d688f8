"""From a config to a graph with hook points, whatever the number of layers: as many are traced as show every kind.

Where layers cannot be made from others, all of them are traced.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass
from transformers import PreTrainedModel

from exporters.transformers import bfloat16
from exporters.transformers.check_hooked import check_stream, expert_sizes, hook_axes
from exporters.transformers.families import Layout, layout_of
from exporters.transformers.grouped import expand_grouped
from exporters.transformers.kinds import all_different
from exporters.transformers.naming import merge_lengths, name_dimensions, name_hooks, read_lengths_once, strip
from exporters.transformers.simplify import simplify_traced
from exporters.transformers.sizes import sizes_of
from exporters.transformers.stamp import stamp
from exporters.transformers.trace import buffers_of, find_kinds, heads_of, skeleton_of, trace
from mionnx.graph.metadata import Heads, Sizes

LARGEST_CONSTANT = 2**24  # numbers of a constant that is compared with others
Stage = Callable[[str], None]  # called as a stage begins


@dataclass(frozen=True)
class HookedGraph:
    """A graph with hook points, without weights.

    Attributes:
        model: the graph.
        parameters: the weights that it reads: values without data, which are no initializers yet.
        hooks: hook point -> its axes, in execution order.
        sizes: of the model.
        heads: of each layer.
        skeleton: the torch model on the meta device.
        layout: where it keeps its modules.
    """

    model: ir.Model
    parameters: list[ir.Value]
    hooks: dict[str, list[str | int]]
    sizes: Sizes
    heads: list[Heads]
    skeleton: PreTrainedModel
    layout: Layout


def make_graph(config: Any, dtype: torch.dtype, stage: Stage = lambda name: None, whole: bool = False) -> HookedGraph:
    """Make the graph of a config.

    Args:
        config: a transformers config of a causal language model.
        dtype: of weights and activations.
        stage: called with the name of each stage.
        whole: trace every layer.

    Raises:
        ExportError: the family is laid out in an unknown way, or torch cannot export it.
    """
    layout = layout_of(config)
    sizes = sizes_of(config, learned_positions=layout.limited or layout.positions is not None)
    stage("comparing layers")
    skeleton = skeleton_of(config, dtype)
    heads = heads_of(skeleton)
    past, sizes = (heads, dtype), replace(sizes, num_kv_heads=heads[0][0], head_dim=heads[0][1])
    buffers = buffers_of(skeleton)
    every = all_different(sizes.num_layers // layout.halves, layout.halves)
    for kinds in (every if whole else find_kinds(skeleton, past, buffers), every):
        stage(f"tracing {len(kinds.hooked)} of {sizes.num_layers} layers")
        traced = trace(skeleton, past, kinds)
        stage("simplifying")
        bfloat16.widen(traced.model, bfloat16.LACKING if dtype == torch.bfloat16 else None)
        parameters = simplify_traced(traced.model, buffers)
        stage("naming")
        graph = traced.model.graph
        hooks = name_hooks(graph)
        name_dimensions(graph)
        read_lengths_once(graph)
        check_stream(graph)
        strip(traced.model)
        if stamp(graph, parameters, hooks, kinds, traced.layout.blocks):
            break
    if layout.own_attention:  # each layer has a table of its own, and cuts it by the lengths of its own past
        DeduplicateInitializersPass(size_limit=LARGEST_CONSTANT)(traced.model)
        merge_lengths(graph)
    expand_grouped(graph)
    sizes = replace(sizes, **expert_sizes(graph, hooks))
    axes = hook_axes(graph, hooks, sizes, heads)
    return HookedGraph(traced.model, parameters, axes, sizes, heads, skeleton, traced.layout)
