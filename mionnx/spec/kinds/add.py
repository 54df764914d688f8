"""`Intervention.Add`: a vector added to the activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from mionnx.spec.kinds.kind import Array, Change, Kind, Operators
from mionnx.spec.limits import Indices, Positions


@dataclass(frozen=True)
class Add(Kind):
    """Add a vector to the activation."""

    name = "add"
    has_strength = True

    @classmethod
    def make(
        cls,
        vector: ArrayLike,
        *,
        positions: Positions | None = None,
        heads: Indices | None = None,
        rows: Indices | None = None,
        experts: Indices | None = None,
        neurons: Indices | None = None,
    ) -> Change:
        """Add `vector`, broadcast to the value's shape and cast to its dtype (steering).

        Args:
            vector: numbers, such as [hidden] in the residual stream.
            positions, heads, rows, experts, neurons: limits; everywhere if none is given.

        Raises:
            InterventionError: NaN or infinity in the vector.

        Example:
            Intervention.Add(4.0 * direction, positions="generated")
        """
        return cls().change([vector], positions, heads, rows, experts, neurons)

    def nodes(self, op: Operators, x: Any, value: Any) -> Any:
        return op.Add(x, value)

    def reference(self, x: Array, value: Array) -> Array:
        return x + value
