"""A spec meets a model and a call: what shapes the graph becomes a `Plan`, everything else inputs of it.

All that can be wrong with a spec is found here, before anything runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mionnx.bind.attention_mask import refuse_rows_without_keys
from mionnx.bind.hook_index import HookIndex, index_hooks
from mionnx.bind.selection import Selection, refuse_unread
from mionnx.errors import HookError, InterventionError
from mionnx.graph.axes import dynamic_sizes, has_sequence, heads_axis, shape_of
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.intervene import TOKEN_POSITIONS
from mionnx.rewrite.plan import CaptureNode, Edit, Outputs, Plan
from mionnx.spec.capture import Capture, resolve
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.kinds.kind import ValueShape

NOWHERE = -2  # in an input of positions: selects no token; -1 is what padding has


Captures = dict[CaptureNode, Capture]


def plan_of(
    spec: HookSpec, model: HookedModel, outputs: Outputs | None = None, captures: Captures | None = None
) -> Plan:
    """The structure of a spec on a model, with those of the model's own outputs that are asked for.

    `captures` is what `captures_of` gave, if that is known already.

    Raises:
        HookError: a hook point that the model does not have.
        InterventionError: a kind or limit that makes no sense there.
    """
    points = index_hooks(spec, model)
    chosen = captures_of(spec, model) if captures is None else captures
    ordered = sorted(chosen, key=lambda want: (points.place(want.hook), not want.before))
    seen: dict[str, int] = {}
    edits = []
    for n, (point, intervention) in enumerate(spec.interventions):
        index = seen[point.name] = seen.get(point.name, -1) + 1
        edit = _edit(points, point, intervention, index)
        edits.append(replace(edit, fit=points.fits.get(n), reads=intervention.reads))
    return Plan(tuple(edits), tuple(ordered), outputs or Outputs())


def captures_of(spec: HookSpec, model: HookedModel) -> Captures:
    """What a spec's captures are on a model.

    Raises:
        HookError: a hook point that the model does not have, or one of which different parts are asked for.
        InterventionError: positions or heads where there are none.
    """
    found: dict[str, tuple[CaptureNode, Capture]] = {}
    points = index_hooks(spec, model)
    for request in spec.captures:
        if points.inner:  # a splice may bring other hook points tomorrow
            wants = _wants(request, points, resolve(request, points.names))
        else:
            key: tuple[Capture, tuple[str, ...]] = request, ()
            if callable(request.what):  # it may say something else tomorrow: what it chooses is known, not it
                key = replace(request, what=""), tuple(resolve(request, points.names))
            if key not in model.captures:
                model.captures[key] = _wants(request, points, key[1] or resolve(request, points.names))
            wants = model.captures[key]
        for want in wants:
            other = found.setdefault(want.output, (want, request))[1]
            if (other.positions, other.heads) != (request.positions, request.heads):
                raise HookError(f"{want.output} is captured twice, in different parts: capture all of them at once")
    return dict(found.values())


def _wants(request: Capture, points: HookIndex, names: Iterable[str]) -> list[CaptureNode]:
    """The values that one request means, which has chosen these names."""
    wants = []
    for name in names:
        axes = points.axes(HookPoint.parse(name))
        if request.positions is not None and not has_sequence(axes):
            raise InterventionError(f"capture at {name}: axes {list(axes)} have no positions to choose from")
        if request.heads is not None and heads_axis(axes) is None:
            raise InterventionError(f"capture at {name}: axes {list(axes)} have no heads")
        limits = request.positions is not None, request.heads is not None
        wants.append(CaptureNode(name, request.before, *limits, points.inner.get(name)))
    return wants


def parts_of(captures: Captures, call: TokenBatch, model: HookedModel) -> dict[str, NDArray[Any]]:
    """The inputs that say which parts of captured values are meant.

    Raises:
        InterventionError: a position or head that does not exist.
    """
    feeds: dict[str, NDArray[Any]] = {}
    for want, request in captures.items():
        if request.positions is not None:
            feeds[want.columns_input] = columns(f"capture at {want.hook}", request.positions, call)
        if request.heads is not None:
            dims = model.axes(HookPoint.parse(want.hook)) if want.inner is None else want.inner.dims
            count = dims[heads_axis(want.axes) or 0]
            if max(request.heads) >= int(count):
                raise InterventionError(f"capture at {want.hook}: head {max(request.heads)} of {count}")
            feeds[want.heads_input] = np.array(request.heads)
    return feeds


def columns(what: str, positions: Sequence[int], call: TokenBatch) -> NDArray[np.int64]:
    """[batch, n]: where in this call the positions of each row's text stand.

    Raises:
        InterventionError: one that a row does not have, or that lies in the past.
    """
    if call.final_lengths is not None:
        raise InterventionError(f"{what}: a generation computes one position after another; choose them in `forward`")
    try:
        found = [[call.columns([position], row)[0] for position in positions] for row in range(call.batch)]
    except LookupError as error:
        raise InterventionError(f"{what}: {error}") from None
    return np.array(found, np.int64)


def _edit(points: HookIndex, point: HookPoint, intervention: Intervention, index: int) -> Edit:
    """The structure of one intervention, checked against the model."""
    axes, model = points.axes(point), points.model  # refuses a hook point that is not there
    _refuse_derived(point)
    kind = intervention.rules.at(point, axes, model.metadata.recurrent)
    _check_inner(point, points, intervention.kind)
    if intervention.positions is not None and not has_sequence(axes):
        raise InterventionError(f"{intervention.kind} at {point}: axes {list(axes)} have no positions to choose from")
    if intervention.heads is not None and heads_axis(axes) is None:
        with_heads = [name for name in model.metadata.hooks if heads_axis(HookPoint.parse(name).axes or ())]
        near = [name for name in with_heads if name.startswith(f"blocks.{point.layer or 0}.")]
        raise InterventionError(
            f"{intervention.kind} at {point}: axes {list(axes)} have no heads; hook points that do: {', '.join(near)}"
        )
    masked = intervention.heads is not None or intervention.rows is not None
    return Edit(point.name, kind, index, axes, intervention.positions is not None, masked)


def _refuse_derived(point: HookPoint) -> None:
    if point.derived:
        raise InterventionError(f"{point} is derived and can only be captured; intervene at {point.instead} instead")


def _check_inner(point: HookPoint, points: HookIndex, kind: str) -> None:
    """Refuse what could not take effect inside a splice."""
    inner = points.inner.get(point.name)
    if inner is None:
        return
    if not inner.live:
        raise InterventionError(f"{kind} at {point}: what its splice gives does not depend on it; it can be captured")
    if inner.axes[:1] != ("batch",) or not {*filter(_named, inner.dims)} <= {*dynamic_sizes(1, 1, 1)}:
        raise InterventionError(f"{kind} at {point}: its axes {list(inner.axes)} must begin with batch and be known")
    if np.dtype(inner.dtype).kind in "iubSU":
        raise InterventionError(f"{kind} at {point}: its numbers are {inner.dtype}; it can be captured")


def _named(dim: str | int) -> bool:
    return isinstance(dim, str)


def values_of(spec: HookSpec, plan: Plan, call: TokenBatch, model: HookedModel) -> dict[str, NDArray[Any]]:
    """The inputs that carry a spec's values, positions and masks in one call.

    Raises:
        InterventionError: a value that does not fit, a position, head or row that does not exist, or an attention row
            that would be left with no key.
    """
    dims = dynamic_sizes(call.batch, call.seq, call.total)
    points = index_hooks(spec, model)
    places = [
        Selection(edit, intervention, shape_of(points.dims(point), dims), call)
        for edit, (point, intervention) in zip(plan.edits, spec.interventions, strict=True)
    ]
    feeds: dict[str, NDArray[Any]] = {TOKEN_POSITIONS: call.token_positions}
    for place in places:
        feeds |= _inputs(place, points.dtype(HookPoint.parse(place.edit.hook)))
    feeds |= weights_of(spec, plan)
    _refuse_blind(places, call, model)
    refuse_unread(places)
    return feeds


def _inputs(place: Selection, dtype: DTypeLike) -> dict[str, NDArray[Any]]:
    edit = place.edit
    feeds = dict(zip(edit.value_inputs, place.values(dtype), strict=True))
    positions = place.positions()
    if positions is not None:
        feeds[edit.positions_input] = _table(positions, place.call.batch)
    if edit.masked:
        feeds[edit.mask_input] = place.mask()
    return feeds


def weights_of(spec: HookSpec, plan: Plan) -> dict[str, NDArray[Any]]:
    """The inputs that carry the weights of a spec's splices; they are the same in every call."""
    return {
        edit.weight_input(name): array
        for edit, (_, intervention) in zip(plan.edits, spec.interventions, strict=True)
        if intervention.fragment is not None
        for name, array in intervention.fragment.weights.items()
    }


def _table(positions: dict[int, list[int]], batch: int) -> NDArray[np.int64]:
    """Row -> positions as [batch, n]."""
    table = np.full((batch, max(1, *map(len, positions.values()))), NOWHERE, np.int64)
    for row, found in positions.items():
        table[row, : len(found)] = found
    return table


def _refuse_blind(places: list[Selection], call: TokenBatch, model: HookedModel) -> None:
    """Refuse knockouts that together leave an attention row without a key."""
    blocked: dict[int, NDArray[np.bool_]] = {}
    for place in places:
        layer, mask = HookPoint.parse(place.edit.hook).layer, place.intervention.value
        knocks_out = place.intervention.rules.shape is ValueShape.ATTENTION_MASK
        if knocks_out and layer is not None and mask is not None:
            here = np.isneginf(place.knockout_mask(mask)) & place.selected()
            blocked[layer] = blocked[layer] | here if layer in blocked else here
    for layer, mask in blocked.items():
        window = model.metadata.attention[layer].sliding_window
        refuse_rows_without_keys(str(HookPoint.AttnScores(layer)), mask, call, window)
