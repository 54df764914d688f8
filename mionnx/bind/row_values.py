"""`RowValues`: the entries of an intervention's value that belong to some rows of a list."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.selection import Selection
from mionnx.errors import InterventionError
from mionnx.graph.axes import KEYS, TOKEN_AXES, sequence_axis
from mionnx.spec.kinds.kind import ValueShape

Value = NDArray[Any]


@dataclass(frozen=True)
class RowValues:
    """An intervention on a list of texts, and a batch of some of its rows, padded on the left.

    Attributes:
        selection: the intervention on the whole list as one batch.
        width: tokens of the longest of them.
    """

    selection: Selection
    rows: Sequence[int]
    width: int

    def of(self, value: Value) -> Value:
        """The entries of a value that fits the whole.

        Returns:
            a value that means the same on the part: along the batch and the positions it has the entries of the rows
            and tokens that are there.
        """
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

    def _of_rows(self, value: Value) -> Value:
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

    def _of_columns(self, value: Value, axis: int, name: str) -> Value:
        """Entries for columns of the whole as entries for columns, or positions, of the part."""
        limited = axis == sequence_axis(self.selection.edit.axes)
        if limited and self._ordered(value.shape[axis], axis):
            return value
        if limited and self._listed is not None:
            columns = [[column or 0 for column in self.selection.columns(row)] for row in self.chosen]
        else:
            columns = [self._columns(row, name == KEYS) for row in self.chosen]
        return _taken(value, axis, columns)

    def _columns(self, row: int, keys: bool) -> list[int]:
        """The column of the whole for each column of the part; any of them for padding."""
        texts = self.selection.call
        past = texts.total - texts.seq if keys else 0
        real = past + np.flatnonzero(texts.real[row])
        return [*range(past), *[past] * (self.width - len(real)), *real.tolist()]

    def _of_text(self, value: Value, axis: int, name: str) -> Value:
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
            return _taken(value, axis, [self._listed[row] for row in self.chosen])
        room = [(0, max(0, longest - size) if at == axis else 0) for at in range(value.ndim)]
        return np.pad(value, room).take(range(longest), axis=axis)


def _taken(value: Value, axis: int, columns: Sequence[Sequence[int]]) -> Value:
    """Entries along an axis, other ones in each row."""
    index = np.array(columns).reshape(
        [len(columns) if at == 0 else -1 if at == axis else 1 for at in range(value.ndim)]
    )
    return np.take_along_axis(np.broadcast_to(value, (len(columns), *value.shape[1:])), index, axis=axis)
