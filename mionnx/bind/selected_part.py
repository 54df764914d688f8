"""`SelectedPart`: the part of an activation that limits select, and values given for it set at their places.

Along a limited axis a value has one entry for all that is chosen, or one for each in the order given, or one for each
index of the whole axis, of which the chosen ones are taken. Where the last two fit alike, the order given counts, so
that a spec means the same in a text of any length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
    """The part of an activation that rows, heads and positions select."""

    axes: Sequence[str]
    shape: tuple[int, ...]
    rows: list[int]
    chosen: Mapping[int, Chosen]  # by limited axis

    @property
    def spelled(self) -> str:
        """Its shape, for messages; "n" where rows select unequal numbers of positions."""
        sizes = [self.chosen[axis].count if axis in self.chosen else size for axis, size in enumerate(self.shape)]
        return "[" + ", ".join("n" if size is None else str(size) for size in sizes) + "]"

    def fits(self, shape: tuple[int, ...], later: bool = False) -> bool:
        """Whether a value of a shape has one entry for all, or one for each, along every axis."""
        first = len(self.shape) - len(shape)
        return first >= 0 and all(self._fits(axis, size, later) for axis, size in enumerate(shape, first))

    def _fits(self, axis: int, size: int, later: bool) -> bool:
        chosen = self.chosen.get(axis)
        if size == 1 or (chosen is not None and size == chosen.count):
            return True
        if later and self.axes[axis] == "seq_k":  # a later step of a generation has more keys
            return True
        return size == self.shape[axis] and (chosen is None or chosen.here)

    def twice(self, shape: tuple[int, ...]) -> str | None:
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
