"""A spec meets a model and a call: what shapes the graph becomes a `Plan`, everything else inputs of it.

All that can be wrong with a spec is found here, before anything runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mionnx.call import Call
from mionnx.errors import InterventionError
from mionnx.hooked_model import HookedModel
from mionnx.hookpoint import HookPoint
from mionnx.intervention import Intervention
from mionnx.rewrite.intervene import sequence_axis
from mionnx.rewrite.plan import Edit, Plan, Want
from mionnx.spec import HookSpec, resolve
from mionnx.visible import refuse_blind_rows

DTYPES: dict[str, DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
NOWHERE = -2  # in an input of positions: selects no token; -1 is what padding has


def plan_of(spec: HookSpec, model: HookedModel) -> Plan:
    """The structure of a spec on a model.

    Raises:
        HookError: a hook point that the model does not have.
        InterventionError: a kind or limit that makes no sense there.
    """
    names = [str(point) for point in model.hook_points()]
    wants = {Want(name, request.before) for request in spec.captures for name in resolve(request, names)}
    ordered = sorted(wants, key=lambda want: (names.index(want.hook), not want.before))
    edits: list[Edit] = []
    for point, intervention in spec.interventions:
        axes = _axes(model, point, intervention)
        edits.append(
            Edit(
                point.name,
                intervention.kind,
                sum(edit.hook == point.name for edit in edits),
                axes,
                intervention.positions is not None,
                intervention.heads is not None or intervention.rows is not None,
            )
        )
    return Plan(tuple(edits), tuple(ordered))


def _axes(model: HookedModel, point: HookPoint, intervention: Intervention) -> tuple[str, ...]:
    """The names of a hook point's axes, checked to allow the intervention."""
    model.axes(point)  # refuses a hook point that the model does not have
    if point.derived:
        raise InterventionError(
            f"{point} is derived and can only be captured; intervene at {HookPoint.AttnZ(point.layer)} instead"
        )
    axes = point.axes
    where = f"{intervention.kind} at {point}"
    if intervention.kind == "knockout" and point.variant != "AttnScores":
        near = f"blocks.{point.layer or 0}.attn.hook_scores"
        raise InterventionError(f"{where}: a knockout mask is added before the softmax, at {near}")
    if intervention.kind == "project_out" and axes[-1] == "seq_k":
        raise InterventionError(
            f"{where}: the last axis is keys, not features; nearest: {HookPoint.AttnZ(point.layer)}"
        )
    if intervention.heads is not None and _heads_axis(axes) is None:
        choices = [name for name in model.metadata.hooks if name.startswith(f"blocks.{point.layer or 0}.attn.")]
        raise InterventionError(
            f"{where}: axes {list(axes)} have no heads; hook points with heads: {', '.join(choices)}"
        )
    return axes


def _heads_axis(axes: tuple[str, ...]) -> int | None:
    return next((i for i, axis in enumerate(axes) if axis in ("n_heads", "n_kv_heads")), None)


@dataclass(frozen=True)
class Place:
    """One intervention's place in one call: the value's shape, and what of it is selected."""

    edit: Edit
    intervention: Intervention
    shape: tuple[int, ...]
    call: Call

    @property
    def where(self) -> str:
        """For messages: what, and where."""
        return f"{self.edit.kind} at {self.edit.hook}"

    @property
    def spelled(self) -> str:
        """For messages: the shape with the names of its axes."""
        return "[" + ", ".join(f"{axis}={dim}" for axis, dim in zip(self.edit.axes, self.shape, strict=True)) + "]"

    def rows(self) -> list[int]:
        """The batch rows it applies to."""
        rows = self.intervention.rows
        if rows is not None and max(rows) >= self.call.batch:
            raise InterventionError(f"{self.where}: row {max(rows)} of a batch of {self.call.batch}")
        return list(range(self.call.batch)) if rows is None else list(rows)

    def heads(self) -> list[int] | None:
        """The heads it applies to; None for all, or where there are none."""
        heads, axis = self.intervention.heads, _heads_axis(self.edit.axes)
        if heads is None or axis is None:
            return None
        if max(heads) >= self.shape[axis]:
            raise InterventionError(
                f"{self.where}: head {max(heads)} of {self.shape[axis]} ({self.edit.axes[axis]}, 0 to {self.shape[axis] - 1})"
            )
        return list(heads)

    def positions(self) -> dict[int, list[int]] | None:
        """Row -> absolute positions, for the rows it applies to; None if it applies at every position."""
        given = self.intervention.positions
        if given is None:
            return None
        per_row = isinstance(given[0], tuple)
        if per_row and len(given) != self.call.batch:
            raise InterventionError(
                f"{self.where}: positions for {len(given)} rows, but the batch has {self.call.batch}"
            )
        return {row: [self._absolute(p, row) for p in (given[row] if per_row else given)] for row in self.rows()}

    def _absolute(self, position: int, row: int) -> int:
        length = int(self.call.lengths[row])
        if not -length <= position < length:
            raise InterventionError(
                f"{self.where}: position {position} does not exist in row {row}, which has {length} tokens (0 to {length - 1})"
            )
        absolute = position % length
        if absolute not in self.call.token_positions[row]:
            raise InterventionError(
                f"{self.where}: position {absolute} of row {row} lies in the cached past, where nothing is computed any more; "
                f"this call computes {int(self.call.token_positions[row].max()) + 1 - int(self.call.real[row].sum())} to {length - 1}"
            )
        return absolute

    def mask(self) -> NDArray[np.bool_]:
        """Heads and rows as a mask of the value's rank, 1 along the other axes."""
        ranks = len(self.shape)
        mask = np.zeros((self.call.batch, *[1] * (ranks - 1)), bool)
        mask[self.rows()] = True
        heads = self.heads()
        if heads is not None:
            axis = _heads_axis(self.edit.axes)
            chosen = np.zeros([self.shape[axis] if i == axis else 1 for i in range(ranks)], bool)
            chosen[tuple(heads if i == axis else slice(None) for i in range(ranks))] = True
            mask = mask & chosen
        return mask

    def columns(self, row: int) -> list[int]:
        """The indices along the sequence axis that are selected in a row."""
        positions = self.positions()
        if positions is None:
            return list(range(self.call.seq))
        found = self.call.token_positions[row]
        return [int(np.argmax(found == position)) for position in positions[row]]

    def selected(self) -> NDArray[np.bool_]:
        """Everything that is selected, broadcastable to the value's shape."""
        mask = self.mask()
        if self.intervention.positions is None:
            return mask
        axis = sequence_axis(self.edit.axes)
        at = np.zeros([d if i in (0, axis) else 1 for i, d in enumerate(self.shape)], bool)
        for row in self.rows():
            at[(row, *[self.columns(row) if i == axis else slice(None) for i in range(1, len(self.shape))])] = True
        return mask & at

    def value(self, dtype: DTypeLike) -> NDArray[Any]:
        """The value as the graph takes it: of the activation's dtype and rank."""
        given = self.intervention.value
        if self.edit.kind == "project_out":
            if given.shape[-1] != self.shape[-1]:
                raise InterventionError(
                    f"{self.where}: direction of width {given.shape[-1]}, the value is {self.spelled}"
                )
            return _cast(given, dtype, self.where)
        if _broadcasts(given.shape, self.shape) and (self.edit.kind != "replace" or given.shape == self.shape):
            full = given
        elif self.intervention.limited:
            full = self._scattered(given)
        else:
            verb = "must be" if self.edit.kind == "replace" else "must broadcast to"
            raise InterventionError(f"{self.where}: value of shape {list(given.shape)} {verb} {self.spelled}")
        return _cast(full, dtype, self.where).reshape([1] * (len(self.shape) - full.ndim) + list(full.shape))

    def _scattered(self, given: NDArray[Any]) -> NDArray[Any]:
        """A value given for the selected part only, put where that part lies."""
        axis, head_axis = sequence_axis(self.edit.axes), _heads_axis(self.edit.axes)
        counts = {len(self.columns(row)) for row in self.rows()}
        heads = self.heads()
        part = list(self.shape)
        part[0], part[axis] = len(self.rows()), counts.pop()
        if head_axis is not None and heads is not None:
            part[head_axis] = len(heads)
        if counts or not _broadcasts(given.shape, tuple(part)):
            raise InterventionError(
                f"{self.where}: value of shape {list(given.shape)} fits neither the whole value {self.spelled} "
                f"nor the selected part {part}"
            )
        full, spread = np.zeros(self.shape, given.dtype), np.broadcast_to(given, part)
        for i, row in enumerate(self.rows()):
            index = [np.arange(dim) for dim in self.shape[1:]]
            index[axis - 1] = np.array(self.columns(row))
            if head_axis is not None and heads is not None:
                index[head_axis - 1] = np.array(heads)
            full[(row, *np.ix_(*index))] = spread[i]
        return full


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    if len(shape) > len(target):
        return False
    return all(one in (1, other) for one, other in zip(shape[::-1], target[::-1], strict=False))


def _cast(value: NDArray[Any], dtype: DTypeLike, where: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        cast = value.astype(dtype)
    if not np.array_equal(np.isinf(cast), np.isinf(value)):
        raise InterventionError(f"{where}: a value is beyond the range of the model's {np.dtype(dtype)}")
    return np.ascontiguousarray(cast)


def shape_of(axes: list[str | int], call_dims: Mapping[str, int]) -> tuple[int, ...]:
    """A hook point's shape, from its axes and the dynamic sizes batch, seq, seq_q, seq_k."""
    return tuple(axis if isinstance(axis, int) else call_dims[axis] for axis in axes)


def dimensions(batch: int, seq: int, total: int) -> dict[str, int]:
    """The dynamic sizes of a call by the names of the axes that have them."""
    return {"batch": batch, "seq": seq, "seq_q": seq, "seq_k": total}


def values_of(spec: HookSpec, plan: Plan, call: Call, model: HookedModel) -> dict[str, NDArray[Any]]:
    """The inputs that carry a spec's values, positions and masks in one call.

    Raises:
        InterventionError: a value that does not fit, a position, head or row that does not exist, or an attention row
            that would be left with no key.
    """
    feeds: dict[str, NDArray[Any]] = {}
    dims = dimensions(call.batch, call.seq, call.total)
    places = [
        Place(edit, intervention, shape_of(model.axes(point), dims), call)
        for edit, (point, intervention) in zip(plan.edits, spec.interventions, strict=True)
    ]
    for place in places:
        feeds |= _inputs(place, DTYPES[model.metadata.dtype])
    _refuse_blind(places, call, model)
    return feeds


def _inputs(place: Place, dtype: DTypeLike) -> dict[str, NDArray[Any]]:
    edit, feeds = place.edit, {}
    if place.intervention.value is not None:
        feeds[edit.value_input] = place.value(dtype)
    positions = place.positions()
    if positions is not None:
        width = max(len(found) for found in positions.values())
        table = np.full((place.call.batch, width), NOWHERE, np.int64)
        for row, found in positions.items():
            table[row, : len(found)] = found
        feeds[edit.positions_input] = table
    if edit.masked:
        feeds[edit.mask_input] = place.mask()
    return feeds


def _refuse_blind(places: list[Place], call: Call, model: HookedModel) -> None:
    """Refuse knockouts that together leave an attention row without a key."""
    for hook in dict.fromkeys(place.edit.hook for place in places if place.edit.kind == "knockout"):
        blocked = np.zeros((1, 1, 1, 1), bool)
        for place in places:
            if place.edit.hook == hook and place.edit.kind == "knockout":
                mask = np.isneginf(place.intervention.value)
                blocked = blocked | (mask & place.selected())
        layer = HookPoint.parse(hook).layer
        refuse_blind_rows(hook, blocked, call, model.metadata.attention[layer].sliding_window)
