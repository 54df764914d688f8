"""`Moments`: count, mean and variance of vectors by class, from batches, and merged (Welford; Chan et al.).

Chan, Golub, LeVeque 1983: of two parts a and b, with d = mean b - mean a and n = n a + n b, the mean is
mean a + d n b / n, and the sum of squared deviations that of both plus d^2 n a n b / n. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.stored import Storable

Numbers = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(eq=False)
class Moments(Storable):
    """Count, mean and sums of squared deviations of vectors, by class."""

    classes: Integers  # [classes], ascending numbers
    count: Integers  # [classes]
    mean: Numbers  # [classes, ...]
    squares: Numbers  # [classes, ...]: sums of squared deviations from the mean
    # [d, d]: sums of products of deviations, of all numbers of a vector; None if they are not wanted.
    products: Numbers | None = None

    @classmethod
    def of(cls, values: NDArray[Any], classes: NDArray[Any] | None = None, products: bool = False) -> Moments:
        """The moments of a batch [tokens, ...] of one class, 0, or by integers [tokens]; products have one class."""
        labels = np.zeros(len(values), np.int64) if classes is None else np.asarray(classes).astype(np.int64)
        # sorted by class, so that one `reduceat` sums every class
        order = np.argsort(labels, kind="stable")
        present, starts, count = np.unique(labels[order], return_index=True, return_counts=True)
        numbers = np.asarray(values).astype(np.float64)[order]
        mean = np.add.reduceat(numbers, starts, axis=0) / _wide(count, numbers)
        deviations = numbers - np.repeat(mean, count, axis=0)
        squares = np.add.reduceat(deviations**2, starts, axis=0)
        flat = deviations.reshape(len(deviations), -1)
        return cls(present, count, mean, squares, flat.T @ flat if products else None)

    def merged(self, other: Moments) -> Moments:
        """The moments of both parts together."""
        if self.mean.shape[1:] != other.mean.shape[1:] or (self.products is None) != (other.products is None):
            raise InputError(
                f"statistics of vectors {list(self.mean.shape[1:])} and {list(other.mean.shape[1:])}, "
                "or with a covariance and without, are not merged"
            )
        classes = (
            self.classes if np.array_equal(self.classes, other.classes) else np.union1d(self.classes, other.classes)
        )
        one, two = self._over(classes), other._over(classes)
        count = one.count + two.count
        move = two.mean - one.mean
        share = two.count / count  # n_b / n; see the module's text
        mean = one.mean + move * _wide(share, move)
        squares = one.squares + two.squares + move**2 * _wide(one.count * share, move)
        products = None
        if one.products is not None and two.products is not None:
            flat = move.ravel()
            products = one.products + two.products + np.outer(flat, flat) * (one.count[0] * share[0])
        return Moments(classes, count, mean, squares, products)

    def _over(self, classes: Integers) -> Moments:
        """The same with entries for more classes, which have a count of 0."""
        if len(classes) == len(self.classes):
            return self
        at = np.searchsorted(classes, self.classes)
        count = np.zeros(len(classes), np.int64)
        mean, squares = (np.zeros((len(classes), *self.mean.shape[1:])) for _ in range(2))
        count[at], mean[at], squares[at] = self.count, self.mean, self.squares
        return Moments(classes, count, mean, squares, self.products)

    def variance(self, ddof: int = 1) -> Numbers:
        """[classes, ...]: the variance, n - ddof in the denominator; NaN where n is not above ddof."""
        free = self.count - ddof
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(_wide(free, self.squares) > 0, self.squares / _wide(free, self.squares), np.nan)

    def places(self, classes: Sequence[int] | NDArray[Any]) -> Integers:
        """The index of each class; -1 for one that was not seen."""
        numbers = np.asarray(classes, np.int64)
        # a number above all classes would get a place behind the last
        at = np.minimum(np.searchsorted(self.classes, numbers), len(self.classes) - 1)
        return np.where(self.classes[at] == numbers, at, -1)


def _wide(by_class: NDArray[Any], like: NDArray[Any]) -> NDArray[Any]:
    """Numbers by class, to compute with an array [classes, ...]."""
    return by_class.reshape([-1, *[1] * (like.ndim - 1)])
