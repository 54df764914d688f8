"""`every_layer`: one graph for calls that differ in the layer only, as a loop over layers makes them.

1. The first call of a structure opens its own graph. The second, at another layer, opens one that has the same
   interventions and captures at every layer, and serves all that follow.
2. An input turns each intervention on. One that is off gives the bits of what it reads; it is fed the values of one
   that is on, for these have the right shapes. Captures are fetched by name.
3. What would cost much at every layer stays at its own: derived values, and values gathered token by token. So does
   everything in a call whose captures would take more than `ALL_LAYERS` at all layers.
4. Not widened are splices, parts of a model, graphs with an adopted file's fused operators (which stand where nothing
   is touched), and graphs without logits (which end at the last capture).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.rewrite.plan import NONE, CaptureNode, Edit, GradientNode, Plan

ALL_LAYERS = 2**28  # bytes of captures at all layers: an engine keeps what nobody fetches until the pass ends
ANY = "blocks.*."
Node = TypeVar("Node", Edit, CaptureNode, GradientNode)


@dataclass(frozen=True)
class EveryLayer:
    """How the graph of every layer serves a plan."""

    plan: Plan  # the structure of that graph, with every intervention switched
    switches: Mapping[str, NDArray[np.bool_]]  # input -> whether its intervention is on
    lent: Mapping[str, str]  # input of an intervention or capture that is off -> the input whose array it is fed
    copies: int  # captures and gradients for each that is asked for

    def cuts(self, cuts: Iterable[str]) -> tuple[str, ...]:
        """The hook points at which a graph is cut, at every layer."""
        kinds = {_of_any(CaptureNode(cut)) for cut in cuts}
        return tuple(node.hook for node in self.plan.captures if _of_any(node) in kinds)


def every_layer(plan: Plan, model: HookedModel) -> EveryLayer | None:
    """How a graph of every layer serves a plan; None where only the plan's own does."""
    spliced = any(edit.fit is not None for edit in plan.edits)
    if plan.fused != NONE or plan.starts or spliced or not plan.outputs.logits:
        return None
    by = () if plan.gradients is None else plan.gradients.by
    edits = tuple(replace(edit, switched=True) for edit in plan.edits)
    wide_edits, wide_captures = _at_all_layers(edits, model), _at_all_layers(plan.captures, model)
    wide_by = _at_all_layers(by, model)
    own: set[Any] = {*edits, *plan.captures, *by}
    others: set[Any] = {*wide_edits, *wide_captures, *wide_by} - own
    if not others or len({edit.prefix for edit in wide_edits}) < len(wide_edits):
        return None  # no layer; or two interventions of one name, with limits of different kinds
    kinds: dict[Any, Any] = {_of_any(node): node for node in own}
    lent: dict[str, str] = {}
    for node in others:
        source = kinds[_of_any(node)]
        if _size(node, model) != _size(source, model):
            return None
        lent |= zip(node.inputs, source.inputs, strict=True)
    wide = replace(plan, edits=wide_edits, captures=wide_captures)
    if plan.gradients is not None:
        wide = replace(wide, gradients=replace(plan.gradients, by=wide_by))
    switches = {edit.switch_input: np.array(edit in own) for edit in wide_edits}
    copies = -(-(len(wide_captures) + len(wide_by)) // max(1, len(plan.captures) + len(by)))
    return EveryLayer(wide, switches, lent, copies)


def _at_all_layers(nodes: Iterable[Node], model: HookedModel) -> tuple[Node, ...]:
    """The nodes at every layer that has their hook points, in execution order."""
    layers = range(model.metadata.sizes.num_layers)
    wide = {_moved(node, ANY, f"blocks.{layer}.") for node in map(_of_any, nodes) for layer in layers}
    here = [node for node in wide if node.hook in model.order]
    return tuple(sorted(here, key=lambda node: (model.order[node.hook], getattr(node, "index", 0), repr(node))))


def _of_any(node: Node) -> Node:
    """A node without its layer, where a graph can have it at all of them."""
    point = HookPoint.parse(node.hook)
    stays = point.layer is None or point.derived or point.on_request
    return node if stays else _moved(node, f"blocks.{point.layer}.", ANY)


def _moved(node: Node, old: str, new: str) -> Node:
    hooks: dict[str, Any] = {"hook": node.hook.replace(old, new, 1)}
    if isinstance(node, Edit) and node.at_experts is not None:
        hooks["at_experts"] = node.at_experts.replace(old, new, 1)
    return replace(node, **hooks)


def _size(node: Node, model: HookedModel) -> tuple[list[str | int], str]:
    point = HookPoint.parse(node.hook)
    return model.axes(point), str(model.dtype(point))
