"""`Intervention.Replace`: another tensor in place of the activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from mionnx.spec.kinds.kind import Array, Change, Kind, Operators, ValueShape
from mionnx.spec.limits import Limits


@dataclass(frozen=True)
class Replace(Kind):
    """Put a tensor in place of the activation."""

    name = "replace"
    shape = ValueShape.EXACT
    overwrites = True

    @classmethod
    def make(cls, tensor: ArrayLike, **limits: Unpack[Limits]) -> Change:
        """Put `tensor` in place of the value (activation patching).

        Args:
            tensor: of the value's shape. With `positions`, `heads` or `rows` it may instead have the selected part's
                shape, its entries in the order given, or one that broadcasts to it (a number, or a [hidden] vector at
                chosen positions); see `Intervention`.
            positions, heads, rows, experts, neurons: limits; everywhere if none is given.

        Raises:
            InterventionError: NaN or infinity in the tensor.

        Example:
            Intervention.Replace(clean["resid_post", 2][:, -1], positions=-1)
        """
        return cls().change([tensor], **limits)

    def nodes(self, op: Operators, x: Any, value: Any) -> Any:
        return op.Identity(value)

    def reference(self, x: Array, value: Array) -> Array:
        return np.broadcast_to(value, x.shape)
