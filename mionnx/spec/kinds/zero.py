"""`Intervention.Zero`: zeros in place of the activation."""

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from mionnx.spec.kinds.kind import Array, Change, Kind, Operators
from mionnx.spec.limits import Limits


@dataclass(frozen=True)
class Zero(Kind):
    """Put zeros in place of the activation."""

    name = "zero"
    values = ()
    spelling = ""
    overwrites = True

    @classmethod
    def make(cls, **limits: Unpack[Limits]) -> Change:
        """Put zeros in place of the value (zero ablation).

        Args:
            positions, heads, rows, experts, neurons: limits; everywhere if none is given.

        Example:
            Intervention.Zero(heads=3)
        """
        return cls().change([], **limits)

    def nodes(self, op: Operators, x: Any) -> Any:
        # Not a product with 0: that would keep NaN and infinity.
        return op.Expand(np.zeros((), x.dtype), op.Shape(x))

    def reference(self, x: Array) -> Array:
        return np.zeros_like(x)
