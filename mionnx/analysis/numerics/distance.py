"""Distances of next-token distributions from those of a first run, which lie on disk."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.machine.softmax import log_softmax
from mionnx.machine.stored import Storable

AT_ONCE = 2**20  # numbers looked at together
VECTOR_MEASURE = "half the squared relative distance"


@dataclass
class Distance(Storable):
    """KL(first || other) in nats over positions, and what else tells two runs apart.

    Of vectors, as embeddings are, half the squared relative distance stands in the place of KL: |a - b|^2 / 2|a|^2,
    which of vectors of one length is 1 - cos(a, b).

    Attributes:
        positions: how many there were; `not_finite` of them have an infinity or NaN, and count in nothing else.
        logit: the largest difference of two logits, or of two numbers of a vector.
        vectors: whether rows are vectors, not logits.
    """

    positions: int = 0
    not_finite: int = 0
    total: float = 0.0
    kl_max: float = 0.0
    logit: float = 0.0
    same: int = 0
    vectors: bool = False

    @classmethod
    def of(cls, firsts: Iterable[NDArray[Any]], others: Iterable[NDArray[Any]], *, vectors: bool = False) -> "Distance":
        """Compare logits text by text, [..., vocab] each, or vectors, [..., width]."""
        distance = cls(vectors=vectors)
        for first, other in zip(firsts, others, strict=True):
            vocab = first.shape[-1]
            one, two, rows = first.reshape(-1, vocab), other.reshape(-1, vocab), max(1, AT_ONCE // vocab)
            for start in range(0, len(one), rows):
                distance._add(one[start : start + rows], two[start : start + rows].astype(np.float32))
        return distance

    def _add(self, first: NDArray[Any], other: NDArray[np.float32]) -> None:
        finite = np.isfinite(other).all(-1)
        self.positions += len(other)
        self.not_finite += int((~finite).sum())
        if not finite.any():
            return
        one, two = first[finite].astype(np.float64), other[finite].astype(np.float64)
        if self.vectors:
            kl = np.square(one - two).sum(-1) / (2 * np.maximum(np.square(one).sum(-1), np.finfo(np.float64).tiny))
        else:
            expected, actual = log_softmax(one, axis=-1), log_softmax(two, axis=-1)
            kl = (np.exp(expected) * (expected - actual)).sum(-1).clip(min=0)
        self.total += float(kl.sum())
        self.kl_max = max(self.kl_max, float(kl.max()))
        self.logit = max(self.logit, float(np.abs(one - two).max()))
        self.same += int((one.argmax(-1) == two.argmax(-1)).sum())

    @property
    def compared(self) -> int:
        """Positions with finite logits."""
        return self.positions - self.not_finite

    @property
    def kl(self) -> float:
        """The mean over positions with finite numbers; NaN without any."""
        return self.total / self.compared if self.compared else float("nan")

    @property
    def top_1(self) -> float:
        """Share of positions with the same top token, those without finite logits being others; NaN of vectors."""
        return self.same / self.positions if self.positions and not self.vectors else float("nan")

    def to_entry(self) -> dict[str, float | int]:
        """Its numbers by name."""
        names = ("kl", "kl_max", "logit", "top_1", "not_finite", "positions")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        if not self.sound:
            return f"{self.not_finite} of {self.positions} positions not finite"
        if self.vectors:
            return f"{VECTOR_MEASURE} {self.kl:.2g} ({self.kl_max:.2g} at most)"
        return f"KL {self.kl:.2g} nats ({self.kl_max:.2g} at most), top-1 {self.top_1:.1%}"

    @property
    def measure(self) -> str:
        """What `kl` is."""
        return VECTOR_MEASURE if self.vectors else "KL in nats"

    @property
    def sound(self) -> bool:
        """Whether all logits are finite."""
        return not self.not_finite


class FirstRun:
    """The logits of a first run, a file a text."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def add(self, logits: NDArray[Any]) -> None:
        """Write those of one more text."""
        np.save(self.folder / f"{self.count}.npy", logits)
        self.count += 1

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (np.load(self.folder / f"{number}.npy", mmap_mode="r") for number in range(self.count))


@contextmanager
def first_run(logits: Iterable[NDArray[Any]]) -> Iterator[FirstRun]:
    """Run first, and hold the logits while others are compared with them."""
    with TemporaryDirectory() as scratch:
        run = FirstRun(Path(scratch))
        for one in logits:
            run.add(one)
        yield run
