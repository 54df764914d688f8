"""`Selection`: the rows, heads and positions that an intervention selects in one token batch.

A call makes one for each of its spec's interventions; inputs and checks read them, and none looks at a limit again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mionnx.bind.knockout_mask import KnockoutMask, WindowMask, end_of, first_position, of_texts
from mionnx.errors import InterventionError
from mionnx.graph.axes import EXPERTS, KEYS, format_shape, heads_axis, neurons_axis, sequence_axis
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.plan import Edit
from mionnx.spec.intervention import Intervention
from mionnx.spec.kinds.kind import ValueShape

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chosen:
    """Indices that a limit chooses along one axis."""

    indices: Mapping[int, Sequence[int | None]]  # by selected row, in the order given; None for those of another step
    count: int | None  # None if they have no order, or another number in each row
    repeated: bool

    @property
    def here(self) -> bool:
        """Whether all of it is in this step."""
        return all(index is not None for row in self.indices.values() for index in row)


@dataclass(frozen=True)
class SelectedPart:
    """The part of an activation that rows, heads and positions select, and values set at their places in it.

    Along a limited axis a value has one entry for all that is chosen, or one for each in the order given, or one for
    each index of the axis, from which the chosen ones are taken. Where the last two fit alike, the order given counts,
    so that a spec means the same in a text of any length.
    """

    axes: Sequence[str]
    shape: Shape
    rows: list[int]
    chosen: Mapping[int, Chosen]  # by limited axis

    @property
    def spelled(self) -> str:
        """Its shape, for messages; "n" where rows select unequal numbers of positions."""
        sizes = [self.chosen[axis].count if axis in self.chosen else size for axis, size in enumerate(self.shape)]
        return "[" + ", ".join("n" if size is None else str(size) for size in sizes) + "]"

    def fits(self, shape: Shape, later: bool = False) -> bool:
        """Whether a value of a shape has one entry for all, or one for each, along every axis."""
        first = len(self.shape) - len(shape)  # shapes are aligned at their ends, as numpy broadcasts them
        return first >= 0 and all(self._fits(axis, size, later) for axis, size in enumerate(shape, first))

    def _fits(self, axis: int, size: int, later: bool) -> bool:
        chosen = self.chosen.get(axis)
        if size == 1 or (chosen is not None and size == chosen.count):
            return True
        if later and self.axes[axis] == "seq_k":  # a later step of a generation has more keys
            return True
        return size == self.shape[axis] and (chosen is None or chosen.here)

    def twice(self, shape: Shape) -> str | None:
        """The axis along which a value has two entries for one index; None if there is none."""
        sizes = dict(enumerate(shape, len(self.shape) - len(shape)))
        ordered = (axis for axis, one in self.chosen.items() if 1 < sizes.get(axis, 1) == one.count and one.repeated)
        return next((self.axes[axis] for axis in ordered), None)

    def placed(self, value: NDArray[Any]) -> NDArray[Any]:
        """A fitting value with its entries at their indices; it broadcasts to the activation."""
        value = value.reshape((1,) * (len(self.shape) - value.ndim) + value.shape)
        ordered = {axis: one for axis, one in self.chosen.items() if 1 < value.shape[axis] == one.count}
        if not ordered:
            return value
        # where rows choose unlike indices the values need an entry for each row, although they were given one for all
        by_row = any(len({*map(tuple, one.indices.values())}) > 1 for axis, one in ordered.items() if axis)
        sizes = [self.shape[axis] if axis in ordered else size for axis, size in enumerate(value.shape)]
        full = np.zeros([self.shape[0] if by_row else sizes[0], *sizes[1:]], value.dtype)
        for i, row in enumerate(self.rows):
            source = value[i if 0 in ordered else row if len(value) > 1 else 0]
            pairs = [_pairs(ordered.get(axis), size, row) for axis, size in enumerate(value.shape) if axis]
            target = full[row if len(full) > 1 else 0]
            target[np.ix_(*(there for there, _ in pairs))] = source[np.ix_(*(here for _, here in pairs))]
        return full


def _pairs(chosen: Chosen | None, size: int, row: int) -> tuple[list[int], list[int]]:
    """Indices of the activation and of the value along an axis that belong together in a row."""
    if chosen is None:
        return [*range(size)], [*range(size)]
    pairs = [(index, n) for n, index in enumerate(chosen.indices[row]) if index is not None]
    return [index for index, _ in pairs], [n for _, n in pairs]


@dataclass(frozen=True)
class Selection:
    """One intervention on one token batch, and its values broadcast to what it selects."""

    edit: Edit
    intervention: Intervention
    shape: Shape
    call: TokenBatch
    experts: int | None = None
    shown: TokenBatch | None = None  # the call without tokens that are hidden from all layers, if any are

    def _refuse(self, why: str) -> InterventionError:
        return InterventionError(f"{self.edit.kind} at {self.edit.hook}: {why}")

    @property
    def spelled(self) -> str:
        """The activation's shape with the names of its axes, for messages."""
        return format_shape(self.edit.axes, self.shape)

    @cached_property
    def rows(self) -> list[int]:
        """Selected batch rows."""
        rows = self.intervention.rows
        if rows is not None and max(rows) >= self.call.batch:
            raise self._refuse(f"row {max(rows)} of a batch of {self.call.batch} (0 to {self.call.batch - 1})")
        return list(range(self.call.batch)) if rows is None else list(rows)

    @cached_property
    def heads(self) -> list[int] | None:
        """Selected heads; None for all of them, or at a hook point without heads."""
        return self._indices("head", self.intervention.heads, heads_axis(self.edit.axes))

    @cached_property
    def neurons(self) -> list[int] | None:
        return self._indices("neuron", self.intervention.neurons, neurons_axis(self.edit.axes))

    def _indices(self, what: str, indices: Sequence[int] | None, axis: int | None) -> list[int] | None:
        if indices is None or axis is None:
            return None
        count = self.shape[axis]
        if max(indices) >= count:
            raise self._refuse(f"{what} {max(indices)} of {count} ({self.edit.axes[axis]}, 0 to {count - 1})")
        return list(indices)

    @cached_property
    def positions(self) -> dict[int, list[int]] | None:
        """Selected row -> absolute positions; None if no position limits it."""
        limit = self.intervention.positions
        if limit is None:
            return None
        by_row = self._by_row(limit)
        try:
            positions = {row: self.call.absolutes(by_row[row], row) for row in self.rows}
        except LookupError as error:
            raise self._refuse(str(error)) from None
        if isinstance(limit, str) and self.call.final_lengths is None and not any(positions.values()):
            raise self._refuse(
                f"no token of this call is in the phase {limit!r}; `prompt_length=` says where it begins"
            )
        return positions

    def _by_row(self, limit: Any) -> Sequence[Any]:
        if isinstance(limit, str) or not isinstance(limit[0], tuple):
            return [limit] * self.call.batch
        if len(limit) != self.call.batch:
            raise self._refuse(f"positions for {len(limit)} rows, but the batch has {self.call.batch}")
        return limit

    def columns(self, row: int) -> list[int | None]:
        """Selected indices along the sequence axis in a row; None for those of another step."""
        if self.positions is None:
            return list(range(self.call.seq))
        return [self.call.column_of[row].get(at) for at in self.positions[row]]

    def _here(self, row: int) -> list[int]:
        return [column for column in self.columns(row) if column is not None]

    def _later(self) -> bool:
        lengths, positions = self.call.lengths.tolist(), self.positions or {}
        return any(at >= lengths[row] for row, chosen in positions.items() for at in chosen)

    def mask(self) -> NDArray[np.bool_]:
        """Selected heads, experts, neurons and rows: a mask of the activation's rank, else 1 wide."""
        mask = self._along(0, self.rows)
        # Alone, a row has no keys of padding: whatever stood at their scores and pattern entries (a zero in place of
        # the lowest score) would let queries read them. Nor does it have those of hidden tokens.
        shown = self.shown or self.call
        if shown.padded and reads_keys(self.edit, self.intervention):
            mask = mask & of_texts(shown, self.edit.axes)
        for axis, indices in self._counted().items():
            mask = mask & self._along(axis, indices)
        return mask

    def _counted(self) -> dict[int, list[int]]:
        """Limited axis -> chosen indices, alike in every row: heads, neurons, experts' columns of router logits."""
        axes, experts = self.edit.axes, self.intervention.experts
        chosen = [(heads_axis(axes), self.heads), (neurons_axis(axes), self.neurons)]
        if experts is not None and EXPERTS in axes:
            chosen.append((axes.index(EXPERTS), [*experts]))
        return {axis: indices for axis, indices in chosen if axis is not None and indices is not None}

    def _along(self, axis: int, chosen: list[int]) -> NDArray[np.bool_]:
        line = np.zeros(self.shape[axis], bool)
        line[chosen] = True
        return line.reshape([-1 if i == axis else 1 for i in range(len(self.shape))])

    def selected(self) -> NDArray[np.bool_]:
        """Everything selected, as a mask that broadcasts to the activation."""
        if self.intervention.positions is None:
            return self.mask()
        axis, at = sequence_axis(self.edit.axes), self.tokens()
        return self.mask() & at.reshape([d if i in (0, axis) else 1 for i, d in enumerate(self.shape)])

    def tokens(self) -> NDArray[np.bool_]:
        """[batch, seq]: selected tokens."""
        at = np.zeros((self.call.batch, self.call.seq), bool)
        for row in self.rows:
            at[row, self._here(row)] = True
        return at

    def values(self, dtype: DTypeLike) -> tuple[NDArray[Any], ...]:
        """The intervention's values as the graph takes them: of the activation's dtype and rank."""
        rules, values = self.intervention.rules, self.intervention.values
        return tuple(
            self._shaped(rules.shape_of(name), value, dtype) for name, value in zip(rules.values, values, strict=True)
        )

    def _shaped(self, form: ValueShape, value: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
        if form is ValueShape.COORDINATES:
            return self._with_width(value.shape[-1])._shaped(ValueShape.BROADCAST, value, dtype)
        # [n, width]: no axis of it is one of the activation's but the last
        if form is ValueShape.DIRECTIONS:
            if value.shape[-1] != self.shape[-1]:
                raise self._refuse(f"direction of width {value.shape[-1]}, the value is {self.spelled}")
            return self._cast(value, dtype)
        if self.intervention.positions is not None and not any(self._here(row) for row in self.rows):
            # its shape can be checked now, before the steps in which it applies
            if form is not ValueShape.ATTENTION_MASK and self._later():
                self._refuse_misfit(self.part, value.shape, later=True)
            return np.zeros((1,) * len(self.shape), dtype)  # another step's: selected nowhere in this one
        if form is ValueShape.ATTENTION_MASK:
            return self._cast(self.knockout_mask.in_batch, dtype)
        if self.intervention.limited:
            self._refuse_misfit(self.part, value.shape)
            return self._cast(self.part.placed(value), dtype)
        # in a generation a value in place of the whole is broadcast: each step has another number of tokens
        exact = form is ValueShape.EXACT and self.call.final_lengths is None
        if not (value.shape == self.shape if exact else broadcasts(value.shape, self.shape)):
            verb = "must be" if form is ValueShape.EXACT else "must broadcast to"
            raise self._refuse(f"value of shape {list(value.shape)} {verb} {self.spelled}")
        cast = self._cast(value, dtype)
        if form is ValueShape.EXACT:
            return np.ascontiguousarray(np.broadcast_to(cast, self.shape))  # it stands for the activation itself
        return cast.reshape((1,) * (len(self.shape) - cast.ndim) + cast.shape)

    def _with_width(self, k: int) -> "Selection":
        """The same rows, heads and positions of an activation with k coordinates in place of its width."""
        edit = replace(self.edit, axes=(*self.edit.axes[:-1], "k"))
        return replace(self, edit=edit, shape=(*self.shape[:-1], k))

    def applied(self, activation: NDArray[Any], choice: NDArray[Any] | None = None) -> NDArray[Any]:
        """The activation after the intervention, by the kind's reference; `choice` is [batch, seq, n_chosen]."""
        changed = self.edit.kind.reference(activation, *self.values(activation.dtype))
        selected = self.selected()
        if self.edit.at_experts is not None and choice is not None:
            here = np.isin(choice, np.array(self.intervention.experts))
            selected = selected & here.reshape(here.shape + (1,) * (activation.ndim - here.ndim))
        return np.where(selected, changed, activation)

    @cached_property
    def knockout_mask(self) -> KnockoutMask | WindowMask:
        limits = self.intervention
        if limits.value is None or limits.rules.shape is not ValueShape.ATTENTION_MASK:
            raise self._refuse("it has no mask")
        if limits.rules.by_distance:
            return WindowMask(int(limits.value), self.call, self.rows)
        chosen = None if isinstance(limits.positions, str) else self.positions  # a phase orders no queries
        title, by_row = f"{self.edit.kind} at {self.edit.hook}", limits.rows is not None
        return KnockoutMask(title, limits.value, self.shape, self.call, self.rows, by_row, self.heads, chosen)

    def text_positions(self) -> dict[int, Sequence[int]]:
        """Selected row -> its selected text positions, in this call or its whole generation."""
        limit, generates = self.intervention.positions, self.call.final_lengths is not None
        chosen = None if generates and isinstance(limit, str) else self.positions
        return {row: self._within(row, None if chosen is None else chosen[row]) for row in self.rows}

    def _within(self, row: int, chosen: list[int] | None) -> Sequence[int]:
        limit, prompts = self.intervention.positions, self.call.prompt_lengths
        first, end = first_position(self.call, row), end_of(self.call, row)
        if chosen is not None:
            return [at for at in chosen if first <= at < end]
        prompt = end if prompts is None else int(prompts[row])
        return range(prompt if limit == "generated" else first, prompt if limit == "prompt" else end)

    def _refuse_misfit(self, part: SelectedPart, shape: Shape, later: bool = False) -> None:
        if not part.fits(shape, later):
            raise self._refuse(
                f"value of shape {list(shape)} fits neither the whole value {self.spelled} "
                f"nor the selected part {part.spelled}"
            )
        if (axis := part.twice(shape)) is not None:
            raise self._refuse(
                f"an index along {axis} is chosen twice, and the value of shape {list(shape)} has two entries for it"
            )

    @cached_property
    def part(self) -> SelectedPart:
        """The part that rows, heads, experts, neurons and positions select."""
        rows = self.rows
        chosen: dict[int, Chosen] = {}
        if self.intervention.rows is not None:
            chosen[0] = Chosen(dict.fromkeys(rows, rows), len(rows), len({*rows}) < len(rows))
        for axis, indices in self._counted().items():
            chosen[axis] = Chosen(dict.fromkeys(rows, indices), len(indices), len({*indices}) < len(indices))
        if self.positions is not None:
            chosen[sequence_axis(self.edit.axes)] = self._chosen_tokens(self.positions)
        return SelectedPart(self.edit.axes, self.shape, rows, chosen)

    def _chosen_tokens(self, positions: Mapping[int, Sequence[int]]) -> Chosen:
        """The selected positions as columns."""
        limit = self.intervention.positions
        columns = {row: self.columns(row) for row in positions}
        limits = positions if isinstance(limit, str) else self._by_row(limit)
        counts = {len(limits[row]) for row in positions}
        # no entry for each in the phase "generated": how many tokens are in it depends on the text's length
        count = counts.pop() if len(counts) == 1 and limit != "generated" else None
        return Chosen(columns, count, any(len(positions[row]) < len(limits[row]) for row in positions))

    def _cast(self, value: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
        # overflow is refused below with its own message, and without numpy's warning
        with np.errstate(over="ignore"):
            cast = value.astype(dtype)
        if cast.dtype.kind == "i":  # the only whole numbers that can be set are experts'
            self._check_experts(value)
        if not np.array_equal(np.isinf(cast), np.isinf(value)):
            raise self._refuse(f"a value is beyond the range of the model's {np.dtype(dtype)}")
        return np.ascontiguousarray(cast).reshape(value.shape)

    def _check_experts(self, value: NDArray[Any]) -> None:
        if self.experts is None:
            return
        wrong = value[(value != np.floor(value)) | (value < 0) | (value >= self.experts)]
        if wrong.size:
            raise self._refuse(f"{wrong[0]:g} is no expert; the model has {self.experts} (0 to {self.experts - 1})")


def reads_keys(edit: Edit, intervention: Intervention) -> bool:
    """Whether an intervention may let queries read keys of padding; a knockout cannot."""
    return KEYS in edit.axes and intervention.rules.shape is not ValueShape.ATTENTION_MASK


def refuse_unread(places: Sequence[Selection]) -> None:
    """Refuse interventions inside a splice at tokens outside the splice's own limits."""
    for outer in places:
        if outer.edit.fit is None or not outer.intervention.limited:
            continue
        for one in places:
            if one.edit.hook.startswith(f"{outer.edit.hook}.") and not _meet(one, outer):
                raise one._refuse(f"the splice at {outer.edit.hook} is limited to other rows or positions")


def _meet(one: Selection, other: Selection) -> bool:
    """Whether two interventions select a common token, in any step of a generation."""
    rows, limits = {*one.rows} & {*other.rows}, (one.intervention.positions, other.intervention.positions)
    if None in limits or not rows:
        return bool(rows)
    if one.call.final_lengths is not None and any(isinstance(limit, str) for limit in limits):
        # a phase beside a list may meet it at some step; two unlike phases, prompt and generated, never do
        return limits[0] == limits[1] or not all(isinstance(limit, str) for limit in limits)
    first, second = one.positions or {}, other.positions or {}
    return any({*first[row]} & {*second[row]} for row in rows)


def broadcasts(shape: Shape, target: Shape) -> bool:
    """Whether an array of a shape broadcasts to another shape without making that any larger."""
    if len(shape) > len(target):
        return False
    return all(one in (1, other) for one, other in zip(shape[::-1], target[::-1], strict=False))
