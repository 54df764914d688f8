"""`SpecRows`: a bound spec on a list of texts, and the part of it that belongs to some of the rows."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.selection import Selection
from mionnx.bind.state_gates import states_of
from mionnx.errors import GradientError, InterventionError
from mionnx.graph.axes import KEYS, TOKEN_AXES, sequence_axis
from mionnx.inputs.token_batch import TokenBatch
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.kinds.kind import Array, ValueShape
from mionnx.spec.metric import Answers, MetricSpec


def differs_by_row(bound: BoundSpec) -> bool:
    """Whether a spec has limits of rows, or entries for each row or column of a batch."""
    metric = bound.spec.metric
    if metric is not None and (_listed(metric.answer) or _listed(metric.versus) or metric.tensors):
        return True
    return any(_differs(edit.axes, one) for edit, one in bound.edits)


def reaches_by_row(bound: BoundSpec) -> bool:
    """Whether what a spec changes may be read in some rows of unequal length and not in others."""
    placed = (one.positions is not None or one.rules.by_distance for _, one in bound.edits)
    return bool(states_of(bound.spec)) or any(placed)


def choosing_rows(bound: BoundSpec) -> str | None:
    """The first intervention that is of some rows of one batch, or has a value for each, in words; None if none is."""
    for edit, one in bound.edits:
        wide = any(value.ndim == len(edit.axes) and len(value) > 1 for value, of_rows in _values(one) if of_rows)
        if one.rows is not None or _nested(one) or wide:
            return f"{edit.kind} at {edit.hook}"
    return None


def _differs(axes: Sequence[str], one: Intervention) -> bool:
    if one.rows is not None or _nested(one) or isinstance(one.positions, str):
        return True
    sizes = (zip(axes[::-1], value.shape[::-1], strict=False) for value, of_rows in _values(one) if of_rows)
    return any(size > 1 and axis in (*TOKEN_AXES, "batch") for pairs in sizes for axis, size in pairs)


def _values(one: Intervention) -> Iterator[tuple[Array, bool]]:
    """Each value, and whether its axes are the activation's: directions are the same in every row."""
    for name, value in zip(one.rules.values, one.values, strict=True):
        yield value, one.rules.shape_of(name) is not ValueShape.DIRECTIONS


def _nested(one: Intervention) -> bool:
    return isinstance(one.positions, tuple) and isinstance(one.positions[0], tuple)


def _listed(tokens: Answers) -> bool:
    return tokens is not None and not isinstance(tokens, str | int | np.integer)


@dataclass(frozen=True)
class RowValues:
    """An intervention on a list of texts, and a batch of some of its rows."""

    selection: Selection  # in all texts as one batch
    rows: Sequence[int]
    width: int  # tokens of the longest of the rows

    def of(self, value: Array) -> Array:
        """The entries of a value that belong to the rows and tokens of the part."""
        axes = self.selection.edit.axes
        masks = self.selection.intervention.rules.shape is ValueShape.ATTENTION_MASK
        full = value.reshape((1,) * (len(axes) - value.ndim) + value.shape)
        entries = self._of_rows(full)
        for axis, name in enumerate(axes):
            if name in TOKEN_AXES and full.shape[axis] > 1:
                entries = (self._of_text if masks else self._of_columns)(entries, axis, name)
        return value if entries is full else np.ascontiguousarray(entries)

    @cached_property
    def chosen(self) -> list[int]:
        """The rows of the part that the intervention selects, in its order."""
        limit = self.selection.intervention.rows
        return [*self.rows] if limit is None else [row for row in limit if row in self.rows]

    @property
    def in_phase(self) -> bool:
        """Whether any of them has a chosen position, in some step of a generation."""
        if self.selection.call.final_lengths is not None:
            return True
        positions = self.selection.positions or {}
        return any(positions[row] for row in self.chosen)

    def _of_rows(self, value: Array) -> Array:
        """One entry for all rows, or one for each that is chosen."""
        limit = self.selection.intervention.rows
        if len(value) == 1:
            return value
        return value[[limit.index(row) for row in self.chosen] if limit and len(value) == len(limit) else self.chosen]

    def _ordered(self, size: int, axis: int) -> bool:
        """Whether a value has an entry for each chosen position along an axis, in the order given."""
        part = self.selection.part.chosen.get(axis)
        return part is not None and part.count == size

    @cached_property
    def _listed(self) -> dict[int, list[int]] | None:
        """Row -> chosen positions, where as many are chosen in each row; None otherwise."""
        limit = self.selection.intervention.positions
        positions = None if limit is None or isinstance(limit, str) else self.selection.positions
        return None if positions is None or len({*map(len, positions.values())}) != 1 else positions

    def _of_columns(self, value: Array, axis: int, name: str) -> Array:
        """Entries for columns of all texts as entries for columns, or positions, of the part."""
        limited = axis == sequence_axis(self.selection.edit.axes)
        if limited and self._ordered(value.shape[axis], axis):
            return value
        if limited and self._listed is not None:
            # 0 for a position of another step: any entry will do there, for it is selected nowhere
            columns = [[column or 0 for column in self.selection.columns(row)] for row in self.chosen]
        else:
            columns = [self._columns(row, name == KEYS) for row in self.chosen]
        return _entries(value, axis, columns)

    def _columns(self, row: int, keys: bool) -> list[int]:
        """The column in all texts for each column of the part; any of them for padding."""
        texts = self.selection.call
        past = texts.total - texts.seq if keys else 0
        real = past + np.flatnonzero(texts.real[row])
        # the past's columns as they are, any new column for the part's own padding, then the row's tokens
        padding = [past] * (self.width - len(real))
        return [*real.tolist(), *padding] if texts.both else [*range(past), *padding, *real.tolist()]

    def _of_text(self, value: Array, axis: int, name: str) -> Array:
        """Entries of a mask for each position of a text, up to the longest row of the part."""
        texts, size = self.selection.call, value.shape[axis]
        longest = int(texts.lengths[list(self.rows)].max())
        if texts.final_lengths is not None or (name != KEYS and self._ordered(size, axis)):
            return value  # a mask of any length serves a text that grows
        selected = texts.lengths[self.selection.rows]
        if name != KEYS and size not in (int(selected.max()), int(texts.lengths.max()), texts.total):
            raise InterventionError(
                f"{self.selection.edit.kind} at {self.selection.edit.hook}: a mask of {size} queries after a past is "
                "counted from the past's end, which the rows of a batch do not share: give one from position 0"
            )
        if name != KEYS and self._listed is not None:
            return _entries(value, axis, [self._listed[row] for row in self.chosen])
        # zeros cut nothing: for rows that are longer than the mask
        room = [(0, max(0, longest - size) if at == axis else 0) for at in range(value.ndim)]
        return np.pad(value, room).take(range(longest), axis=axis)


def _entries(value: Array, axis: int, columns: Sequence[Sequence[int]]) -> Array:
    """Entries along an axis, other ones in each row."""
    shape = [len(columns) if at == 0 else -1 if at == axis else 1 for at in range(value.ndim)]
    index = np.array(columns).reshape(shape)
    return np.take_along_axis(np.broadcast_to(value, (len(columns), *value.shape[1:])), index, axis=axis)


@dataclass(frozen=True)
class SpecRows:
    """A bound spec on a list of texts, all of them as one batch: its rows, columns and values are counted in that."""

    bound: BoundSpec
    texts: TokenBatch

    @cached_property
    def selections(self) -> list[Selection]:
        """The part of all texts that each intervention selects."""
        return self.bound.selections(self.texts)

    def of(self, rows: Sequence[int], width: int) -> HookSpec:
        """The spec of a batch of some rows, padded to a width; what is limited to others is left out."""
        part, spec = copy(self.bound.spec), self.bound.spec
        points = [point for point, _ in self.bound.hooks.interventions]
        parts = [self._intervention(selection, rows, width) for selection in self.selections]
        part.interventions = [(point, one) for point, one in zip(points, parts, strict=True) if one is not None]
        part.metric = None if spec.metric is None else _metric(spec.metric, rows)
        return part

    def _intervention(self, selection: Selection, rows: Sequence[int], width: int) -> Intervention | None:
        """An intervention of the part; None if it is limited to other rows."""
        one, values = selection.intervention, RowValues(selection, rows, width)
        if not values.chosen or (isinstance(one.positions, str) and not values.in_phase):
            return None
        changed: dict[str, Any] = {}
        if one.rows is not None:
            changed["rows"] = tuple(rows.index(row) for row in values.chosen)
        if _nested(one):
            changed["positions"] = _positions(selection, rows)
        parts = tuple(values.of(value) if of_rows else value for value, of_rows in _values(one))
        if parts:
            changed |= {"several": parts} if one.value is None else {"value": parts[0]}
        return replace(one, **changed)


def _positions(selection: Selection, rows: Sequence[int]) -> tuple[Any, ...]:
    positions: Any = selection.intervention.positions
    absolute = selection.positions or {}
    if len({len(positions[row]) for row in absolute}) == 1:
        return tuple(positions[row] for row in rows)
    # Where rows have unequal numbers of positions, a value has an entry for every column, and their order says nothing:
    # in ascending order they mean the same even where the rows of a part have equal numbers.
    return tuple(tuple(sorted(absolute[row])) if row in absolute else positions[row] for row in rows)


def _metric(metric: MetricSpec, rows: Sequence[int]) -> MetricSpec:
    part = copy(metric)
    part.answer, part.versus = (_tokens(tokens, rows) for tokens in (metric.answer, metric.versus))
    if metric.reference is not None and metric.reference.ndim == 2:
        part.reference = metric.reference[list(rows)]
    if metric.cotangent is not None:
        if metric.cotangent.ndim == 2 and metric.of is None:
            part.cotangent = metric.cotangent[list(rows)]
        elif metric.cotangent.size > max(1, metric.cotangent.shape[-1]):
            raise GradientError(
                f"cotangent {list(metric.cotangent.shape)} has numbers for every position, which the rows of several "
                "batches do not share: run them as one batch, batch_size=None"
            )
    return part


def _tokens(tokens: Answers, rows: Sequence[int]) -> Any:
    entries: Any = tokens
    return [entries[row] for row in rows] if _listed(tokens) else tokens
