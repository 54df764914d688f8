"""The structure of a spec on a model: its edits and captures, checked against the model's hook points."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mionnx.bind.hook_index import HookIndex, naming
from mionnx.errors import HookError, InterventionError
from mionnx.graph.axes import CHOSEN, EXPERTS, dynamic_sizes, has_sequence, heads_axis, neurons_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import DTYPES, HookedModel
from mionnx.graph.metadata import IDENTITIES
from mionnx.rewrite.plan import CaptureNode, Edit
from mionnx.spec.hook_choice import Capture, resolve
from mionnx.spec.intervention import Intervention

OF_NEURONS = ("MlpExpertGate", "MlpExpertUp", "MlpExpertAct")  # variants of hook points
Axes = tuple[str, ...]
HAVING: dict[str, Callable[[Axes], bool]] = {  # limit -> whether a value of some axes has what it chooses from
    "heads": lambda axes: heads_axis(axes) is not None,
    "neurons": lambda axes: neurons_axis(axes) is not None,
    "experts": lambda axes: not {EXPERTS, CHOSEN}.isdisjoint(axes),
}


@dataclass(frozen=True)
class BoundCapture:
    """One captured value of a model."""

    node: CaptureNode
    request: Capture
    dims: tuple[str | int, ...]  # its axes: names where they are dynamic, numbers where not
    dtype: np.dtype[Any]


NamedRequest = tuple[Capture, tuple[str, ...]]  # a request, and the names that it means if they are known already


def bind_captures(requests: Iterable[NamedRequest], hooks: HookIndex) -> tuple[BoundCapture, ...]:
    """The values that requests to capture mean on a model, in execution order."""
    captures: dict[str, BoundCapture] = {}
    for request, names in requests:
        for name in names or resolve(request, hooks.names):
            capture = _capture(request, hooks, HookPoint.parse(name))
            other = captures.setdefault(capture.node.output, capture).request
            if (other.positions, other.heads) != (request.positions, request.heads):
                raise HookError(
                    f"{capture.node.output} is captured twice, in different parts: capture all of them at once"
                )
            if other.dtype != request.dtype:
                raise HookError(f"{capture.node.output} is captured twice, as {other.dtype} and as {request.dtype}")
    return tuple(sorted(captures.values(), key=lambda capture: in_order(hooks, capture.node)))


def in_order(hooks: HookIndex, node: CaptureNode) -> tuple[tuple[int, int], bool]:
    """The sort key of captures in execution order, a value before its interventions first."""
    return hooks.place(node.hook), not node.before


def _capture(request: Capture, hooks: HookIndex, point: HookPoint) -> BoundCapture:
    axes = hooks.axes(point)
    if request.positions is not None and not has_sequence(axes):
        raise InterventionError(f"capture at {point}: axes {list(axes)} have no positions to choose from")
    if request.heads is not None and heads_axis(axes) is None:
        raise InterventionError(f"capture at {point}: axes {list(axes)} have no heads")
    limits = request.positions is not None, request.heads is not None
    own = np.dtype(hooks.dtype(point))
    if request.dtype is not None and own.kind in "iub":
        raise InterventionError(f"capture at {point}: it holds whole numbers, {own}, which are not cast")
    cast = None if request.dtype in (None, own.name) else request.dtype
    node = CaptureNode(point.name, request.before, *limits, hooks.inner.get(point.name), cast)
    return BoundCapture(node, request, tuple(hooks.dims(point)), np.dtype(DTYPES[cast]) if cast else own)


def edits_of(hooks: HookIndex) -> tuple[Edit, ...]:
    """The structure of a spec's interventions, each at one hook point, in registration order."""
    seen: dict[str, int] = {}
    edits = []
    for n, (point, intervention) in enumerate(hooks.interventions):
        index = seen[point.name] = seen.get(point.name, -1) + 1
        with naming(hooks.chosen.get(n)):
            edit = _edit(hooks, point, intervention, index)
        edits.append(replace(edit, fit=hooks.fits.get(n), reads=intervention.reads))
    return tuple(edits)


def _edit(points: HookIndex, point: HookPoint, intervention: Intervention, index: int) -> Edit:
    axes, model = points.axes(point), points.model  # refuses a hook point that is not there
    if point.derived:
        raise InterventionError(f"{point} is derived and can only be captured; intervene at {point.instead} instead")
    kind = intervention.rules.at(point, axes, not model.metadata.attends)
    _check_inner(point, points, intervention.kind)
    if intervention.positions is not None and not has_sequence(axes):
        raise InterventionError(f"{intervention.kind} at {point}: axes {list(axes)} have no positions to choose from")
    for what, has in HAVING.items():
        if getattr(intervention, what) is not None and not has(axes):
            raise _without(what, has, point, axes, intervention.kind, model)
    at_experts = _choice(point, axes, intervention, model)
    columns = intervention.experts is not None and at_experts is None
    limits = intervention.heads, intervention.rows, intervention.neurons
    masked = columns or any(limit is not None for limit in limits)
    return Edit(point.name, kind, index, axes, intervention.positions is not None, masked, at_experts=at_experts)


def _without(
    what: str, has: Callable[[Axes], bool], point: HookPoint, axes: Axes, kind: str, model: HookedModel
) -> InterventionError:
    """The refusal of heads, neurons or experts at a hook point that has none; it names those that do."""
    others = [name for name in model.metadata.hooks if has(HookPoint.parse(name).axes or ())]
    near = [name for name in others if name.startswith(f"blocks.{point.layer or 0}.")] or others[:3]
    where = f"hook points that do: {', '.join(near)}" if near else f"this {model.metadata.family} model has none"
    return InterventionError(f"{kind} at {point}: axes {list(axes)} have no {what}; {where}")


def _choice(point: HookPoint, axes: tuple[str, ...], one: Intervention, model: HookedModel) -> str | None:
    """The hook point with the choice of experts, for a limit to chosen experts; else None."""
    # a sum or a multiple of expert numbers is no expert
    if point.variant == "MlpExpertIndices" and one.kind != "replace":
        raise InterventionError(
            f"{one.kind} at {point}: it holds the numbers of experts, which can only be replaced; weigh them at "
            f"{HookPoint.MlpExpertWeights(point.layer or 0)}, or choose others at "
            f"{HookPoint.MlpRouterLogits(point.layer or 0)}"
        )
    if one.experts is None:
        return None
    count = model.metadata.sizes.n_experts
    if count is not None and max(one.experts) >= count:
        raise InterventionError(f"{one.kind} at {point}: expert {max(one.experts)} of {count} (0 to {count - 1})")
    first = model.metadata.exporter.get(IDENTITIES)  # experts from this number on hand on what they read
    if first is not None and point.variant in OF_NEURONS and max(one.experts) >= int(first):
        raise InterventionError(
            f"{one.kind} at {point}: expert {max(one.experts)} gives back what it reads and has no neurons, as all "
            f"from {first} on; intervene at {HookPoint.MlpExpertOut(point.layer or 0)}"
        )
    return str(HookPoint.MlpExpertIndices(point.layer or 0)) if CHOSEN in axes else None


def _check_inner(point: HookPoint, points: HookIndex, kind: str) -> None:
    inner = points.inner.get(point.name)
    if inner is None:
        return
    if not inner.live:
        raise InterventionError(f"{kind} at {point}: what its splice gives does not depend on it; it can be captured")
    # limits of rows and positions are inputs of the graph: an axis of another meaning has no such input
    if inner.axes[:1] != ("batch",) or not {dim for dim in inner.dims if isinstance(dim, str)} <= {
        *dynamic_sizes(1, 1, 1)
    }:
        raise InterventionError(f"{kind} at {point}: its axes {list(inner.axes)} must begin with batch and be known")
    if np.dtype(inner.dtype).kind in "iubSU":
        raise InterventionError(f"{kind} at {point}: its numbers are {inner.dtype}; it can be captured")
