"""`Moves`: matrices that may take more bits, in order of KL for a byte, and the smallest sets of them.

The costs of single matrices are added up: it is the order of sets of matrices that they tell, not their KL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mionnx.analysis.quantisation.matrix_loss import MatrixLoss

GRAINS, TABLE = 2**18, 2**26  # parts that a sum of costs is counted in; of those, with all matrices, the most

Bits = Mapping[str, int]


@dataclass(frozen=True)
class Moves:
    """The matrices of a model that may move.

    Attributes:
        begin, end: bits of all matrices before and after all of them have moved.
        losses: what each matrix that may move costs alone before it does, those that pay most for a byte first.
        more: bytes that each takes more when it has moved, in that order.
    """

    begin: Bits
    end: Bits
    losses: Sequence[MatrixLoss]
    more: Sequence[int]

    @classmethod
    def of(cls, begin: Bits, end: Bits, losses: Sequence[MatrixLoss], more: Mapping[str, int]) -> "Moves":
        """The moves in order: those that save most KL for a byte first."""
        order = sorted(losses, key=lambda loss: (-loss.kl / more[loss.name], loss.name))
        return cls(begin, end, order, [more[loss.name] for loss in order])

    @cached_property
    def steps(self) -> list[dict[str, int]]:
        """Bits of all matrices after none, one, two .. have moved."""
        steps = [dict(self.begin)]
        for loss in self.losses:
            steps.append({**steps[-1], loss.name: self.end[loss.name]})
        return steps

    @cached_property
    def left(self) -> list[float]:
        """Sum of the single costs of the matrices left, after each step."""
        return [sum(loss.kl for loss in self.losses[at:]) for at in range(len(self.losses) + 1)]

    def bytes(self, bits: Bits) -> int:
        """Bytes more than before any has moved."""
        pairs = zip(self.losses, self.more, strict=True)
        return sum(more for loss, more in pairs if bits[loss.name] != self.begin[loss.name])

    def fewest(self, left: float) -> dict[str, int]:
        """Find the bits of fewest bytes for a sum of single costs.

        Args:
            left: the most that the matrices cost which have not moved, added up.

        Returns:
            the bits of all matrices: those that stay save most bytes, with costs in whole grains of the sum (a knapsack
            by dynamic programming; scipy's `milp` prints lines of its solver between those of a command).
        """
        grains = min(GRAINS, TABLE // max(1, len(self.losses)))
        costs = [int(min(np.ceil(loss.kl / max(left, 1e-300) * grains), grains + 1)) for loss in self.losses]
        saved, stays = np.zeros(grains + 1, np.int64), np.zeros((len(costs), grains + 1), bool)
        for at, (cost, more) in enumerate(zip(costs, self.more, strict=True)):
            if cost <= grains:
                other = saved[: grains + 1 - cost] + more
                stays[at, cost:] = other > saved[cost:]
                saved[cost:] = np.maximum(saved[cost:], other)
        moved, free = set[str](), grains
        for at in range(len(costs) - 1, -1, -1):
            if stays[at, free]:
                free -= costs[at]
            else:
                moved.add(self.losses[at].name)
        return {name: self.end[name] if name in moved else bits for name, bits in self.begin.items()}
