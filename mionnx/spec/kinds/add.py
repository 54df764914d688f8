"""`Intervention.Add`: a vector added to the activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

from numpy.typing import ArrayLike

from mionnx.spec.kinds.kind import Array, Change, Kind, Operators
from mionnx.spec.limits import Limits


@dataclass(frozen=True)
class Add(Kind):
    """Add a vector to the activation."""

    name = "add"
    has_strength = True

    @classmethod
    def make(cls, vector: ArrayLike, **limits: Unpack[Limits]) -> Change:
        """Add `vector`, broadcast to the value's shape and cast to its dtype (steering).

        Args:
            vector: numbers, such as [hidden] in the residual stream.
            positions, heads, rows, experts, neurons: limits; everywhere if none is given.

        Raises:
            InterventionError: NaN or infinity in the vector.

        Example:
            Intervention.Add(4.0 * direction, positions="generated")
        """
        return cls().change([vector], **limits)

    def nodes(self, op: Operators, x: Any, value: Any) -> Any:
        return op.Add(x, value)

    def reference(self, x: Array, value: Array) -> Array:
        return x + value
