"""The leading neurons of a sweep: a picture cannot show some thousands of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MANY = 64  # neurons of one picture


@dataclass(frozen=True)
class Leading:
    """The entries of each axis that a picture shows: all, and of many neurons the leading ones.

    Attributes:
        over: names of the axes.
        entries: of each axis, ascending.
        sizes: of each axis in the whole sweep.
    """

    over: tuple[str, ...]
    entries: tuple[list[int], ...]
    sizes: tuple[int, ...]

    def of(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """The numbers of these entries."""
        return numbers[np.ix_(*self.entries)]

    def labels(self, labels: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """The names of these entries."""
        return {name: [labels[name][i] for i in kept] for name, kept in zip(self.over, self.entries, strict=True)}

    def __str__(self) -> str:
        axes = [*zip(self.over, map(len, self.entries), self.sizes, strict=True)]
        return "; ".join(f"the {n} {name}s with the largest numbers, of {size}" for name, n, size in axes if n < size)


def find_leading(numbers: NDArray[np.float64], over: Sequence[str]) -> Leading:
    """Choose the entries that a picture shows.

    Args:
        numbers: of the sweep, axes in the order of `over`.
        over: names of the axes.
    """
    entries = []
    for axis, (name, size) in enumerate(zip(over, numbers.shape, strict=True)):
        kept = np.arange(size)
        if name == "neuron" and size > MANY:
            others = tuple(other for other in range(numbers.ndim) if other != axis)
            largest = np.abs(np.nan_to_num(numbers)).max(axis=others)
            kept = np.sort(np.argsort(-largest, kind="stable")[:MANY])
        entries.append(kept.tolist())
    return Leading(tuple(over), tuple(entries), numbers.shape)
