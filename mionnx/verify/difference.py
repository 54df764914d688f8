"""Differences of two arrays, added up piece by piece so that no third array of their size is made."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mionnx.machine.softmax import log_softmax

ELEMENTS_AT_ONCE = 2**18  # elements looked at together
TOP = 5


@dataclass
class Difference:
    """Difference of two values over all prompts so far.

    Units in the last place are those of `unit`, the coarser of the two models' dtypes.

    Where both are below half of that dtype's least number they are masked scores, which say nothing, and are left out.

    Attributes:
        count: elements compared.
        max_abs, sum_abs: of the absolute differences; infinite where one of the two is not finite and the other is.
        scale: the largest absolute value of the first array.
        max_ulp, sum_ulp: of the distances in units in the last place.
        error: sum of the squared differences, where both are numbers.
        identical: whether all bits are the same (0 and -0 are, and NaN and NaN).
        finite: whether the first array has numbers only, but for what is masked.
    """

    count: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0
    scale: float = 0.0
    max_ulp: float = 0.0
    sum_ulp: float = 0.0
    identical: bool = True
    finite: bool = True
    dot: float = 0.0
    squares: tuple[float, float] = (0.0, 0.0)
    error: float = 0.0
    unit: str = "float32"

    def add(self, one: NDArray[Any], other: NDArray[Any]) -> None:
        """Compare two arrays of the same shape."""
        if one.shape != other.shape:
            raise ValueError(f"shapes {list(one.shape)} and {list(other.shape)}")
        flat, beside = one.reshape(-1), other.reshape(-1)
        for start in range(0, flat.size, ELEMENTS_AT_ONCE):
            self._add(flat[start : start + ELEMENTS_AT_ONCE], beside[start : start + ELEMENTS_AT_ONCE])

    def _add(self, one: NDArray[Any], other: NDArray[Any]) -> None:
        if np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
            self._count(one.astype(np.float64), np.zeros(one.shape), one.astype(np.float64))
            return
        self.identical = False
        first, second = one.astype(np.float64), other.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.abs(first - second)
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        apart[same] = 0
        apart[np.isnan(apart)] = np.inf
        compared = self._count(first, apart, second)
        ulps = ulp_distance(one, other, self.unit)[compared]
        self.max_ulp = max(self.max_ulp, float(ulps.max(initial=0)))
        self.sum_ulp += float(ulps.sum())

    def _count(
        self, one: NDArray[np.float64], apart: NDArray[np.float64], other: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        masked = float(ml_dtypes.finfo(self.unit).min) / 2
        compared = ~((one < masked) & (other < masked))
        if not compared.all():
            one, other, apart = one[compared], other[compared], apart[compared]
        self.count += one.size
        self.max_abs = max(self.max_abs, float(apart.max(initial=0)))
        self.sum_abs += float(apart.sum())
        self.finite &= bool(np.isfinite(one).all())
        fine = np.isfinite(one) & np.isfinite(other)
        one, other, apart = one[fine], other[fine], apart[fine]
        self.error += float(apart @ apart)
        self.scale = max(self.scale, float(np.abs(one).max(initial=0)))
        self.dot += float(one @ other)
        self.squares = (self.squares[0] + float(one @ one), self.squares[1] + float(other @ other))
        return compared

    @property
    def mean_abs(self) -> float:
        """The mean absolute difference."""
        return self.sum_abs / max(1, self.count)

    @property
    def mean_ulp(self) -> float:
        """The mean distance in units in the last place."""
        return self.sum_ulp / max(1, self.count)

    @property
    def relative(self) -> float:
        """Largest absolute difference, as a share of the first array's largest absolute value."""
        return self.max_abs if self.max_abs in (0.0, np.inf) else self.max_abs / (self.scale or 1.0)

    @property
    def lost(self) -> float:
        """Length of the difference as a share of the second array's length."""
        return float(np.sqrt(self.error / self.squares[1])) if self.squares[1] else float(self.error > 0)

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the two; 1 where both are zero."""
        size = float(np.sqrt(self.squares[0]) * np.sqrt(self.squares[1]))
        return min(1.0, self.dot / size) if size else float(self.squares[0] == self.squares[1])


def coarser(*dtypes: str) -> str:
    """The one of some floating dtypes that has the fewest digits."""
    return max(dtypes, key=lambda dtype: float(ml_dtypes.finfo(dtype).eps))


def ulp_distance(one: NDArray[Any], other: NDArray[Any], unit: str = "float32") -> NDArray[np.float64]:
    """Distance in units in the last place of a floating dtype, element by element.

    The bits of a float, read as an integer with the sign taken out, are in the order of the numbers.
    """
    if one.dtype.kind != "f" or other.dtype.kind != "f":
        return np.abs(one.astype(np.float64) - other.astype(np.float64))
    dtype = np.dtype(ml_dtypes.bfloat16 if unit == "bfloat16" else unit)
    integer = np.dtype(f"i{dtype.itemsize}")
    least = -(2.0 ** (8 * dtype.itemsize - 1))
    lines = []
    for array in (one, other):
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(array.astype(dtype)).view(integer).astype(np.float64)
        lines.append(np.where(bits < 0, least - bits, bits))
    return np.abs(lines[0] - lines[1])


def _divergence(
    first: NDArray[np.float64], second: NDArray[np.float64], equal: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """KL(first || second) of log probabilities [positions, vocab]; 0 where they are equal."""
    kl = np.maximum((np.exp(first) * (first - second)).sum(-1), 0)
    kl[np.isnan(kl)] = np.inf
    kl[equal] = 0
    return kl


@dataclass
class LogitDifference:
    """Difference of two models' next-token distributions over all positions of all prompts.

    Attributes:
        sum_kl, max_kl: KL(first || second), in nats.
        sum_back, max_back: KL(second || first), in nats.
        same_first: positions with the same top token.
        shared: number of tokens among both top `TOP`, over all positions.
    """

    positions: int = 0
    sum_kl: float = 0.0
    max_kl: float = 0.0
    sum_back: float = 0.0
    max_back: float = 0.0
    same_first: int = 0
    shared: int = 0

    def add(self, one: NDArray[Any], other: NDArray[Any]) -> None:
        """Compare logits [batch, seq, vocab]."""
        vocab = one.shape[-1]
        rows = max(1, ELEMENTS_AT_ONCE // vocab)
        flat, beside = one.reshape(-1, vocab), other.reshape(-1, vocab)
        for start in range(0, len(flat), rows):
            self._add(flat[start : start + rows].astype(np.float64), beside[start : start + rows].astype(np.float64))

    def _add(self, one: NDArray[np.float64], other: NDArray[np.float64]) -> None:
        first, second = log_softmax(one, axis=-1), log_softmax(other, axis=-1)
        equal = (one == other).all(-1)
        kl, back = _divergence(first, second, equal), _divergence(second, first, equal)
        self.positions += len(one)
        self.sum_kl, self.sum_back = self.sum_kl + float(kl.sum()), self.sum_back + float(back.sum())
        self.max_kl = max(self.max_kl, float(kl.max(initial=0)))
        self.max_back = max(self.max_back, float(back.max(initial=0)))
        self.same_first += int((one.argmax(-1) == other.argmax(-1)).sum())
        top = min(TOP, one.shape[-1])
        best = [np.argsort(-rows, axis=-1, kind="stable")[:, :top] for rows in (one, other)]
        self.shared += int((best[0][:, :, None] == best[1][:, None]).sum())

    def to_dict(self, vocab: int) -> dict[str, float]:
        """Means and shares, by name."""
        count = max(1, self.positions)
        return {
            "positions": self.positions,
            "kl_mean": self.sum_kl / count,
            "kl_max": self.max_kl,
            "kl_back_mean": self.sum_back / count,
            "kl_back_max": self.max_back,
            "top_1": self.same_first / count,
            f"top_{min(TOP, vocab)}": self.shared / (count * min(TOP, vocab)),
        }
