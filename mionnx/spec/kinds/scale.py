"""`Intervention.Scale`: the activation times a factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from mionnx.graph.hook_points import HookPoint
from mionnx.spec.kinds.kind import Array, Change, Kind, Operators, at_scores, lowest
from mionnx.spec.limits import Limits


@dataclass(frozen=True)
class Scale(Kind):
    """Multiply the activation by a factor."""

    name = "scale"
    has_strength = True
    # Masked scores are the dtype's lowest number; scaled up they would be -inf, and a row of them (padding) NaN.
    scores: bool = False

    @classmethod
    def make(cls, factor: ArrayLike, **limits: Unpack[Limits]) -> Change:
        """Multiply by `factor`: a number, or an array that broadcasts to the value's shape.

        Args:
            positions, heads, rows, experts, neurons: limits; everywhere if none is given.

        Raises:
            InterventionError: NaN or infinity among the factors.

        Example:
            Intervention.Scale(0.5, heads=[0, 3])
        """
        return cls().change([factor], **limits)

    def at(self, point: HookPoint, axes: Sequence[str], recurrent: bool) -> Scale:
        return replace(self, scores=at_scores(point))

    def nodes(self, op: Operators, x: Any, value: Any) -> Any:
        scaled = op.Mul(x, value)
        return op.Max(scaled, lowest(x.dtype)) if self.scores else scaled

    def reference(self, x: Array, value: Array) -> Array:
        with np.errstate(over="ignore"):
            scaled = x * value
        return np.maximum(scaled, lowest(x.dtype)) if self.scores else scaled

    def strength(self, *values: Array) -> float | None:
        return float(values[0].item()) if values[0].size == 1 else None

    def with_strength(self, op: Operators, value: Any, strength: Any) -> Any:  # a knob is the factor itself
        return strength
