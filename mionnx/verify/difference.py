"""Differences of two runs: of arrays, of next-token distributions, at a hook point, of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import nan
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mionnx.graph.hook_points import HookPoint
from mionnx.machine.softmax import log_softmax
from mionnx.machine.stored import Storable

ELEMENTS_AT_ONCE = 2**18  # elements looked at together, so that no third array of the size of the two is made
TOP = 5
TWICE, ONE_THREAD, IN_BATCH = "the same run twice", "1 thread and all", "row alone and in a batch"


@dataclass(frozen=True)
class HookDifference(Storable):
    """One hook point in one runtime beside the first.

    Attributes:
        scale: the largest absolute value in the first runtime.
        relative: max_abs as a share of scale.
        max_ulp, mean_ulp: distance in units in the last place, of the coarser of the two models' dtypes.
        identical: whether all bits are.
        finite: whether the first runtime has numbers only: NaN agrees with NaN, and says nothing.
        local: what this step alone adds, as a share of scale; None where it was not measured.
        lost: length of the difference, as a share of the value's length in this runtime.
    """

    name: str
    max_abs: float
    mean_abs: float
    scale: float
    relative: float
    cosine: float
    max_ulp: float
    mean_ulp: float
    identical: bool
    finite: bool
    local: float | None = None
    lost: float = 0.0


@dataclass
class Difference:
    """Difference of two values over all prompts so far."""

    count: int = 0
    # max_abs, sum_abs: of the absolute differences; infinite where one of the two is not finite and the other is.
    max_abs: float = 0.0
    sum_abs: float = 0.0
    scale: float = 0.0  # the largest absolute value of the first array
    # max_ulp, sum_ulp: distances in units in the last place of `unit`, the coarser of the two models' dtypes.
    max_ulp: float = 0.0
    sum_ulp: float = 0.0
    identical: bool = True  # whether all bits are the same (0 and -0 are, and NaN and NaN)
    finite: bool = True  # whether the first array has numbers only, except for what is masked
    dot: float = 0.0
    squares: tuple[float, float] = (0.0, 0.0)
    error: float = 0.0  # sum of the squared differences, where both are numbers
    unit: str = "float32"

    def add(self, one: NDArray[Any], other: NDArray[Any]) -> None:
        """Compare two arrays of the same shape."""
        if one.shape != other.shape:
            raise ValueError(f"shapes {list(one.shape)} and {list(other.shape)}")
        flat, beside = one.reshape(-1), other.reshape(-1)
        for start in range(0, flat.size, ELEMENTS_AT_ONCE):
            self._add(flat[start : start + ELEMENTS_AT_ONCE], beside[start : start + ELEMENTS_AT_ONCE])

    def _add(self, one: NDArray[Any], other: NDArray[Any]) -> None:
        # Of equal arrays no distance is computed: all are 0.
        if np.array_equal(one, other, equal_nan=one.dtype.kind == "f"):
            self._count(one.astype(np.float64), np.zeros(one.shape), one.astype(np.float64))
            return
        self.identical = False
        first, second = one.astype(np.float64), other.astype(np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.abs(first - second)
        same = (first == second) | (np.isnan(first) & np.isnan(second))
        apart[same] = 0
        apart[np.isnan(apart)] = np.inf  # a number beside NaN
        compared = self._count(first, apart, second)
        ulps = ulp_distance(one, other, self.unit)[compared]
        self.max_ulp = max(self.max_ulp, float(ulps.max(initial=0)))
        self.sum_ulp += float(ulps.sum())

    def _count(
        self, one: NDArray[np.float64], apart: NDArray[np.float64], other: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        masked = float(ml_dtypes.finfo(self.unit).min) / 2  # below it both are masked scores, which say nothing
        compared = ~((one < masked) & (other < masked))
        if not compared.all():
            one, other, apart = one[compared], other[compared], apart[compared]
        self.count += one.size
        self.max_abs = max(self.max_abs, float(apart.max(initial=0)))
        self.sum_abs += float(apart.sum())
        self.finite &= bool(np.isfinite(one).all())
        # Infinite numbers would make all sums infinite; `max_abs` and `finite` tell of them.
        fine = np.isfinite(one) & np.isfinite(other)
        one, other, apart = one[fine], other[fine], apart[fine]
        self.error += float(apart @ apart)
        self.scale = max(self.scale, float(np.abs(one).max(initial=0)))
        self.dot += float(one @ other)
        self.squares = (self.squares[0] + float(one @ one), self.squares[1] + float(other @ other))
        return compared

    @property
    def relative(self) -> float:
        """Largest absolute difference, as a share of the first array's largest absolute value."""
        # where all is zero there is no scale: the difference stands as it is
        return self.max_abs if self.max_abs in (0.0, np.inf) else self.max_abs / (self.scale or 1.0)

    @property
    def lost(self) -> float:
        """Length of the difference as a share of the second array's length."""
        return float(np.sqrt(self.error / self.squares[1])) if self.squares[1] else float(self.error > 0)

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the two; 1 where both are zero."""
        size = float(np.sqrt(self.squares[0]) * np.sqrt(self.squares[1]))
        # Rounding can take it above 1.
        return min(1.0, self.dot / size) if size else float(self.squares[0] == self.squares[1])

    def at(self, name: str, local: "Difference | None") -> HookDifference:
        """The difference of all prompts at a hook point."""
        mean_abs, mean_ulp = (total / max(1, self.count) for total in (self.sum_abs, self.sum_ulp))
        return HookDifference(
            name, self.max_abs, mean_abs, self.scale, self.relative, self.cosine, self.max_ulp, mean_ulp,
            self.identical, self.finite, local.relative if local else None, self.lost,
        )  # fmt: skip


def coarser(*dtypes: str) -> str:
    """The one of some floating dtypes that has the fewest digits."""
    # The largest step between 1 and the next number.
    return max(dtypes, key=lambda dtype: float(ml_dtypes.finfo(dtype).eps))


def ulp_distance(one: NDArray[Any], other: NDArray[Any], unit: str = "float32") -> NDArray[np.float64]:
    """Distance in units in the last place of a floating dtype, element by element."""
    if one.dtype.kind != "f" or other.dtype.kind != "f":
        return np.abs(one.astype(np.float64) - other.astype(np.float64))
    dtype = np.dtype(ml_dtypes.bfloat16 if unit == "bfloat16" else unit)
    integer = np.dtype(f"i{dtype.itemsize}")
    least = -(2.0 ** (8 * dtype.itemsize - 1))
    lines = []
    for array in (one, other):
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(array.astype(dtype)).view(integer).astype(np.float64)
        # a float's bits, read as an integer with the sign taken out, are in the order of the numbers
        lines.append(np.where(bits < 0, least - bits, bits))
    return np.abs(lines[0] - lines[1])


def _divergence(
    first: NDArray[np.float64], second: NDArray[np.float64], equal: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """KL(first || second) of log probabilities [positions, vocab]; 0 where they are equal."""
    kl = np.maximum((np.exp(first) * (first - second)).sum(-1), 0)  # rounding can take it below 0
    kl[np.isnan(kl)] = np.inf  # a token is impossible in one of the two
    kl[equal] = 0
    return kl


@dataclass
class LogitDifference:
    """Difference of two models' predictions (next tokens; labels, tags or spans of an encoder) over all prompts."""

    positions: int = 0
    # sum_kl, max_kl: KL(first || second), in nats.
    sum_kl: float = 0.0
    max_kl: float = 0.0
    # sum_back, max_back: KL(second || first), in nats.
    sum_back: float = 0.0
    max_back: float = 0.0
    same_first: int = 0  # positions with the same top token
    shared: int = 0  # number of tokens among both top `TOP`, over all positions
    most: int = 0  # the most that were looked at: `TOP`, or all of fewer choices
    looked: int = 0  # how many were, over all positions

    def add(self, one: NDArray[Any], other: NDArray[Any]) -> None:
        """Compare logits [..., choices]."""
        vocab = one.shape[-1]
        rows = max(1, ELEMENTS_AT_ONCE // vocab)
        flat, beside = one.reshape(-1, vocab), other.reshape(-1, vocab)
        for start in range(0, len(flat), rows):
            self._add(flat[start : start + rows].astype(np.float64), beside[start : start + rows].astype(np.float64))

    def _add(self, one: NDArray[np.float64], other: NDArray[np.float64]) -> None:
        first, second = log_softmax(one, axis=-1), log_softmax(other, axis=-1)
        # Rows of -inf at masked tokens give NaN, although they are equal.
        equal = (one == other).all(-1)
        kl, back = _divergence(first, second, equal), _divergence(second, first, equal)
        self.positions += len(one)
        self.sum_kl, self.sum_back = self.sum_kl + float(kl.sum()), self.sum_back + float(back.sum())
        self.max_kl = max(self.max_kl, float(kl.max(initial=0)))
        self.max_back = max(self.max_back, float(back.max(initial=0)))
        self.same_first += int((one.argmax(-1) == other.argmax(-1)).sum())
        top = min(TOP, one.shape[-1])
        self.most, self.looked = max(self.most, top), self.looked + top * len(one)
        best = [np.argsort(-rows, axis=-1, kind="stable")[:, :top] for rows in (one, other)]
        self.shared += int((best[0][:, :, None] == best[1][:, None]).sum())

    def to_dict(self) -> dict[str, float]:
        """Means and shares, by name; no numbers where nothing was compared, as of embeddings."""
        count, nothing = self.positions or nan, 0.0 if self.positions else nan
        return {
            "positions": self.positions,
            "kl_mean": self.sum_kl / count,
            "kl_max": self.max_kl + nothing,
            "kl_back_mean": self.sum_back / count,
            "kl_back_max": self.max_back + nothing,
            "top_1": self.same_first / count,
            f"top_{self.most or TOP}": self.shared / (self.looked or nan),
        }


@dataclass(frozen=True)
class LayerLoss(Storable):
    """One layer's share of the distance of two models.

    A distance is the length of the difference of two residual streams over all positions, as a share of the length of
    the second model's stream.

    Attributes:
        added: what is after less what was before; negative where the layer mends something.
    """

    layer: int
    before: float
    after: float
    added: float


def layer_losses(lost: Mapping[str, float]) -> list[LayerLoss]:
    """The layers whose stream was compared before and after them, from hook point -> distance."""
    losses = []
    for layer in sorted({layer for name in lost if (layer := HookPoint.parse(name).layer) is not None}):
        before, after = lost.get(str(HookPoint.ResidPre(layer))), lost.get(str(HookPoint.ResidPost(layer)))
        if before is not None and after is not None:
            losses.append(LayerLoss(layer, before, after, after - before))
    return losses


@dataclass(frozen=True)
class Repeat(Storable):
    """Difference of a run that was repeated in another way.

    Attributes:
        what: `TWICE`, `ONE_THREAD` or `IN_BATCH`.
        identical: whether all bits are, at every hook point.
        relative: the largest difference as a share of its hook point's largest value.
        first: the first hook point that differs.
    """

    runtime: str
    what: str
    identical: bool
    max_abs: float
    relative: float
    first: str | None
