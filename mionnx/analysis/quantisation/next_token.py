"""`Divergence`: KL of next-token distributions from those of a first run, to the last digits of small differences."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.machine.softmax import log_softmax

LOGITS_AT_ONCE = 2**20  # numbers looked at together


@dataclass
class Divergence:
    """KL(first || other) in nats over all positions so far, and equal top tokens.

    KL = log E exp(d - m), d the difference of the logits and m its mean, both over the first distribution: small
    differences keep their digits, which those of two logarithms of probabilities lose.
    """

    positions: int = 0
    total: float = 0.0
    largest: float = 0.0
    same: int = 0

    def add(self, first: NDArray[np.float32], other: NDArray[Any]) -> None:
        """Compare a first run's log probabilities with another's logits, [..., vocab]."""
        vocab = first.shape[-1]
        one, two = first.reshape(-1, vocab), other.reshape(-1, vocab)
        rows = max(1, LOGITS_AT_ONCE // vocab)
        for start in range(0, len(one), rows):
            self._add(one[start : start + rows], two[start : start + rows])

    def _add(self, first: NDArray[np.float32], other: NDArray[Any]) -> None:
        chances = np.exp(first)
        with np.errstate(invalid="ignore"):
            apart = other.astype(np.float32) - first
        apart[chances == 0] = 0  # also where both are minus infinity
        for _ in range(2):  # the second time for what the first one rounds away
            apart -= (chances * apart).sum(axis=-1, keepdims=True) / chances.sum(axis=-1, keepdims=True)
        kl = np.log1p((chances * np.expm1(apart)).sum(axis=-1).astype(np.float64))
        if np.isnan(kl).any():
            raise ModelError("the logits of a model with other weights are no numbers: its weights are damaged")
        self.positions += len(kl)
        self.total += float(kl.clip(min=0).sum())
        self.largest = max(self.largest, float(kl.max(initial=0)))
        self.same += int((first.argmax(-1) == other.argmax(-1)).sum())

    @property
    def mean(self) -> float:
        """KL by position."""
        return self.total / max(1, self.positions)

    @property
    def top_1(self) -> float:
        """Share of positions with the same top token."""
        return self.same / max(1, self.positions)


def log_probabilities(logits: NDArray[Any]) -> NDArray[np.float32]:
    """Logarithms of the probabilities of logits, in float32."""
    rows = [log_softmax(one.astype(np.float32), axis=-1) for one in logits.reshape(-1, logits.shape[-1])]
    return np.stack(rows).reshape(logits.shape)
