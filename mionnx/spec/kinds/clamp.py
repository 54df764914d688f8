"""`Intervention.Clamp`: the activation kept between two bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from mionnx.errors import InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.kinds.kind import Array, Change, Kind, Operators, ValueReader, at_scores, lowest
from mionnx.spec.limits import Limits


@dataclass(frozen=True)
class Clamp(Kind):
    """Clamp the activation between two bounds."""

    name = "clamp"
    values = ("low", "high")
    infinities = {"low": -np.inf, "high": np.inf}  # noqa: RUF012
    infinity_remedy = "a side that is open is None"
    spelling = "LOW..HIGH"
    scores: bool = False  # masked scores stay: a lower bound would let queries read keys that the mask hides

    @classmethod
    def make(cls, low: ArrayLike | None = None, high: ArrayLike | None = None, **limits: Unpack[Limits]) -> Change:
        """Clamp the value: min(max(x, low), high).

        Args:
            low, high: numbers, or arrays that broadcast to the value's shape; None leaves a side open.
            positions, heads, rows, experts, neurons: limits; everywhere if none is given.

        Raises:
            InterventionError: NaN, a lower bound above the upper one, or both sides open.

        Example:
            Intervention.Clamp(0.0, 2.5, positions=-1)
        """
        bounds = [-np.inf if low is None else low, np.inf if high is None else high]
        return cls().change(bounds, **limits)

    def check(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        low, high = values
        try:
            crossed = np.argwhere(low > high)
        except ValueError:
            raise InterventionError(
                f"clamp: low {list(low.shape)} and high {list(high.shape)} do not broadcast"
            ) from None
        if len(crossed):
            raise InterventionError(f"clamp: low lies above high{f' at {crossed[0].tolist()}' if crossed.size else ''}")
        if np.isinf(low).all() and np.isinf(high).all():
            raise InterventionError("clamp: both sides are open, so it would do nothing")
        return values

    def at(self, point: HookPoint, axes: Sequence[str], recurrent: bool) -> Clamp:
        return replace(self, scores=at_scores(point))

    def read(self, text: str, reader: ValueReader) -> Sequence[Any]:
        low, dots, high = text.partition("..")
        if not dots:
            raise InterventionError(f"{text!r} is no range: write LOW..HIGH, and leave an open side out")
        return [reader.array(bound) if bound else None for bound in (low, high)]

    def nodes(self, op: Operators, x: Any, low: Any, high: Any) -> Any:
        clamped = op.Min(op.Max(x, low), high)
        return op.Where(op.Greater(x, _masked(x.dtype)), clamped, x) if self.scores else clamped

    def reference(self, x: Array, low: Array, high: Array) -> Array:
        clamped = np.minimum(np.maximum(x, low), high)
        return np.where(x > _masked(x.dtype), clamped, x) if self.scores else clamped


def _masked(dtype: Any) -> float:
    """The number below which scores are masked; a `Scale` before may have shrunk the lowest one."""
    # In float16 the root would be 256, which scores may reach.
    return -max(float(-lowest(dtype)) ** 0.5, 4096.0)
