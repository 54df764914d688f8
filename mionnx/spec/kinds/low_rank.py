"""`Intervention.LowRank`: directions read from the activation, and other directions written by what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from mionnx.errors import InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.kinds.kind import Array, Change, Kind, Operators, ValueReader, ValueShape
from mionnx.spec.limits import ExpertLimits


@dataclass(frozen=True)
class LowRank(Kind):
    """Write directions by as much as others were read: x + (x R^T + offset) W."""

    name = "low_rank"
    values = ("write", "read", "offset")  # a strength multiplies the first: what is written
    shape = ValueShape.DIRECTIONS
    spelling = "READ,WRITE[,OFFSET]"
    has_strength = True

    @classmethod
    def make(cls, read: ArrayLike, write: ArrayLike, offset: ArrayLike = 0.0, **limits: Unpack[ExpertLimits]) -> Change:
        """Change the activation within a few directions: x + (x R^T + offset) W along the last axis.

        With A = R^T [width, k] and B = W [k, width] this is x + (x A + c) B, of which steering (A = 0), ablation
        (A = -B^T), swaps, clamps and interchanges of coordinates are cases: see `Subspace`, which makes them.

        Args:
            read: R, [k, width], or [width] for k = 1: the directions whose products with x are taken.
            write: W, of the same shape: the directions that are added, each by its product and its offset.
            offset: c: a number, [k], or what broadcasts to the activation with k in place of its width, such as
                [positions, k].
            positions, heads, rows, experts: limits; everywhere if none is given.

        Raises:
            InterventionError: NaN or infinity, other shapes than these, or directions of which all written are zero.

        Example:
            Intervention.LowRank(read=-direction, write=direction, positions=-1)  # |direction| = 1: it is removed
        """
        kind = cls()
        down, up, shift = (kind._numbers(*one) for one in (("read", read), ("write", write), ("offset", offset)))
        down, up = np.atleast_2d(down), np.atleast_2d(up)
        if down.ndim != 2 or down.shape != up.shape:
            raise InterventionError(
                f"low_rank: read {list(np.shape(read))} and write {list(np.shape(write))} must both be [width] or "
                "[k, width], of one shape"
            )
        return kind.change([up, down, shift], **limits)

    def check(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        write, read, offset = values
        if write.ndim != 2 or write.shape != read.shape:
            raise InterventionError(
                f"low_rank: write {list(write.shape)} and read {list(read.shape)} must be [k, width], of one shape"
            )
        if offset.shape[-1:] not in ((), (1,), (len(write),)):
            raise InterventionError(
                f"low_rank: offset {list(offset.shape)} must be a number, or have 1 or {len(write)} entries along its "
                "last axis, one for each direction"
            )
        if not write.any():
            raise InterventionError("low_rank: all directions to write are zero, so it would do nothing")
        return write, read, np.array(np.broadcast_to(offset, (*offset.shape[:-1], len(write))))

    def shape_of(self, name: str) -> ValueShape:
        return ValueShape.COORDINATES if name == "offset" else self.shape

    def at(self, point: HookPoint, axes: Sequence[str], recurrent: bool) -> LowRank:
        if axes[-1] == "seq_k":
            raise InterventionError(
                f"low_rank at {point}: its last axis is keys, not features; nearest: "
                f"{HookPoint.AttnZ(point.layer or 0)}"
            )
        return self

    def read(self, text: str, reader: ValueReader) -> Sequence[Any]:
        parts = text.split(",")
        if len(parts) not in (2, 3):
            raise InterventionError(f"{text!r} has no two or three parts: write {self.spelling}")
        return [reader.array(part) for part in parts]

    def nodes(self, op: Operators, x: Any, write: Any, read: Any, offset: Any) -> Any:
        coordinates = op.Add(op.MatMul(x, op.Transpose(read, perm=[1, 0])), offset)
        return op.Add(x, op.MatMul(coordinates, write))

    def reference(self, x: Array, write: Array, read: Array, offset: Array) -> Array:
        return x + (x @ read.T + offset) @ write
