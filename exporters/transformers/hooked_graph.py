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

from exporters.hook_axes import axes_of
from exporters.recurrence.expand import expand
from exporters.transformers.carried import Carries
from exporters.transformers.config import sizes_of
from exporters.transformers.families import layout_in
from exporters.transformers.grouped import expand_grouped
from exporters.transformers.heads import DECODER, TaskHead
from exporters.transformers.kinds import all_different
from exporters.transformers.layout import Layout
from exporters.transformers.naming import merge_lengths, name_dimensions, name_hooks, read_lengths_once, strip
from exporters.transformers.simplify import LACKING_BFLOAT16, simplify_traced, widen
from exporters.transformers.stamp import stamp
from exporters.transformers.trace import buffers_of, carried_by, find_kinds, skeleton_of, trace
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint, layer_of
from mionnx.graph.sizes import Sizes

MAYBE_UNREAD = ("position_ids", "token_type_ids")  # inputs that a graph without a cache may lack
LARGEST_CONSTANT = 2**24  # numbers of a constant that is compared with others
EXPORT_PACKAGES = ("mionnx", "torch", "transformers", "onnxscript")  # of packages, for the metadata
Stage = Callable[[str], None]  # called as a stage begins


@dataclass(frozen=True)
class HookedGraph:
    """A graph with hook points, without weights.

    Attributes:
        parameters: the weights that it reads: values without data, which are no initializers yet.
        hooks: hook point -> its axes, in execution order.
        skeleton: the torch model on the meta device.
    """

    model: ir.Model
    parameters: list[ir.Value]
    hooks: dict[str, list[str | int]]
    sizes: Sizes
    carried: list[Carries]
    skeleton: PreTrainedModel
    layout: Layout
    head: TaskHead = DECODER


def make_graph(
    config: Any,
    dtype: torch.dtype,
    stage: Stage = lambda name: None,
    every_layer: bool = False,
    head: TaskHead = DECODER,
) -> HookedGraph:
    """Make the graph of a config of a model with some head; `every_layer` traces them all.

    Raises:
        ExportError: the family is laid out in an unknown way, or torch cannot export it.
    """
    stage("comparing layers")
    skeleton = skeleton_of(config, dtype, head=head)
    layout = layout_in(skeleton)
    sizes = sizes_of(config, learned_positions=layout.positions is not None, offset=layout.offset or 0)
    carried = carried_by(skeleton, head)
    past, sizes = (carried, dtype), _with_heads(sizes, carried)
    buffers = buffers_of(skeleton)
    every = all_different(sizes.num_layers // layout.layers, layout.layers)
    for kinds in (every if every_layer else find_kinds(skeleton, past, buffers, head), every):
        stage(f"tracing {len(kinds.hooked)} of {sizes.num_layers} layers")
        model = trace(skeleton, past, kinds, head)
        graph = model.graph
        stage("simplifying")
        widen(model, LACKING_BFLOAT16 if dtype == torch.bfloat16 else None)
        parameters = simplify_traced(model, buffers)
        stage("naming")
        hooks = name_hooks(graph)
        name_dimensions(graph)
        read_lengths_once(graph)
        check_stream(graph)
        strip(model)
        if stamp(graph, parameters, hooks, kinds, layout.blocks):
            break
    if layout.keys == "own":  # each layer has a table of its own, and cuts it by the lengths of its own past
        DeduplicateInitializersPass(size_limit=LARGEST_CONSTANT)(model)
        merge_lengths(graph)
    expand_grouped(graph)
    expand(model)
    drop_unread(graph)
    if head.kind == "none":
        show_stream(graph, sizes.num_layers)
    sizes = replace(sizes, **expert_sizes(graph, hooks))
    shapes = {value.name: value.shape or () for node in graph for value in node.outputs}
    width = next(iter(reversed([*shapes[HookPoint.Embed.name]])), None)
    if isinstance(width, int) and width != sizes.hidden_size:
        sizes = replace(sizes, embedding_size=width)
    axes = {}
    for name in hooks:
        dims = [dim if isinstance(dim, int) else None for dim in shapes[name]]
        own = carried[layer_of(name) or 0]
        axes[name] = axes_of(name, dims, sizes, own.heads, own.recurrence)
    return HookedGraph(model, parameters, axes, sizes, carried, skeleton, layout, head)


def _with_heads(sizes: Sizes, carried: list[Carries]) -> Sizes:
    """Sizes with the heads of the first layer that attends; of a model without any, with those of its states."""
    heads = next((own.heads for own in carried if own.heads), None)
    if heads is not None:
        return replace(sizes, num_kv_heads=heads[0], head_dim=heads[1])
    state = next(own.recurrence for own in carried if own.recurrence)
    return replace(sizes, num_heads=state.n_heads, num_kv_heads=state.n_heads, head_dim=state.value_dim)


def drop_unread(graph: ir.Graph) -> None:
    """Remove the inputs that a family does not read: positions, or token types."""
    for value in [value for value in graph.inputs if not value.uses() and value.name in MAYBE_UNREAD]:
        graph.inputs.remove(value)


def show_stream(graph: ir.Graph, layers: int) -> None:
    """Let the last stream, final norm included, be the main output, and the pooler's the second, if there is one."""
    values = {value.name: value for node in graph for value in node.outputs}
    last = values.get(HookPoint.FinalNorm.name) or values[HookPoint.ResidPost(layers - 1).name]
    traced = graph.outputs[0]  # that of the last traced layer
    name = traced.name
    output = ir.Value(name=name, shape=last.shape, type=last.type)
    graph.outputs[0] = output
    node = traced.producer()
    if node is not None and not traced.uses():
        graph.remove(node, safe=True)
    graph.append(ir.Node("", "Identity", [last], outputs=[output]))
    for pooled in graph.outputs[1:]:
        pooled.name = "pooler_output"


def expert_sizes(graph: ir.Graph, hooks: list[str]) -> dict[str, int]:
    """The sizes n_experts, n_chosen and d_expert, those of the first layer with experts."""
    values = {value.name: value for node in graph for value in node.outputs}
    axes: dict[str, int] = {}
    for name in hooks:
        for axis, dim in zip(HookPoint.parse(name).axes or (), values[name].shape or (), strict=False):
            if axis in ("n_experts", "n_chosen", "d_expert") and isinstance(dim, int):
                axes.setdefault(axis, dim)
    return axes


def check_stream(graph: ir.Graph) -> None:
    """Check that `hook_attn_out`, `hook_ssm_out` and `hook_mlp_out` are added to the residual stream as they are."""
    for node in graph:
        for value in node.outputs:
            added = value.name and value.name.endswith((".hook_attn_out", ".hook_ssm_out", ".hook_mlp_out"))
            if added and not any(_adds(user) for user, _ in value.uses()):
                users = sorted({user.op_type for user, _ in value.uses()})
                raise ExportError(
                    f"{value.name} is not added to the residual stream as it is, it goes into {', '.join(users)}: "
                    "the family needs an entry in exporters/transformers/families.py"
                )


def _adds(node: ir.Node) -> bool:
    """An addition, or the identity of another hook point on the same value that is then added, in wider numbers too."""
    if node.op_type in ("Identity", "Cast"):
        return any(_adds(user) for user, _ in node.outputs[0].uses())
    return node.op_type == "Add"
