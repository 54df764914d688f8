"""`Intervention.ProjectOut`: directions removed from the activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from mionnx.errors import InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.kinds.kind import Array, Change, Kind, Operators, ValueShape
from mionnx.spec.limits import ExpertLimits


@dataclass(frozen=True)
class ProjectOut(Kind):
    """Remove directions from the activation.

    x - (x D^T) D, with the orthonormal directions D as [k, width].
    """

    name = "project_out"
    shape = ValueShape.DIRECTIONS
    has_strength = True
    strength_step = "along"  # x - strength (x D^T) D: the directions enter twice, the strength once

    @classmethod
    def make(cls, direction: ArrayLike, **limits: Unpack[ExpertLimits]) -> Change:
        """Remove a direction along the last axis (direction ablation): x - (x . d) d, |d| = 1.

        Args:
            direction: [width], or [k, width] for the subspace that k directions span; normalised here.
            positions, heads, rows, experts: limits; everywhere if none is given.

        Raises:
            InterventionError: a zero direction, or directions that depend on each other.

        Example:
            Intervention.ProjectOut(refusal_direction)
        """
        kind = cls()
        numbers = kind._numbers("value", direction)
        directions = np.atleast_2d(numbers).astype(np.float64)
        if directions.ndim != 2 or np.linalg.matrix_rank(directions) < len(directions):
            raise InterventionError(
                f"project_out: directions of shape {list(numbers.shape)} must be [width] or [k, width], "
                "not zero, and independent of each other"
            )
        # An orthonormal basis of the directions' span: projections along it add up.
        return kind.change([np.linalg.qr(directions.T)[0].T], **limits)

    def restored(self, tensors: Mapping[str, Array], reads: str | None, **limits: Any) -> Change:
        exact = tensors["value"].astype(np.float64)
        # Whoever wrote the file may have rounded.
        if exact.ndim != 2 or not np.allclose(exact @ exact.T, np.eye(len(exact)), atol=1e-2):
            raise ValueError("the value of project_out must be orthonormal directions, [k, width]")
        return super().restored(tensors, reads, **limits)

    def at(self, point: HookPoint, axes: Sequence[str], recurrent: bool) -> ProjectOut:
        if axes[-1] == "seq_k":
            raise InterventionError(
                f"project_out at {point}: its last axis is keys, not features; nearest: "
                f"{HookPoint.AttnZ(point.layer or 0)}"
            )
        return self

    def nodes(self, op: Operators, x: Any, value: Any) -> Any:
        coefficients = op.MatMul(x, op.Transpose(value, perm=[1, 0]))
        return op.Sub(x, op.MatMul(coefficients, value, name=self.strength_step))

    def reference(self, x: Array, value: Array) -> Array:
        return x - (x @ value.T) @ value
