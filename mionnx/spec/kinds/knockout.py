"""`Intervention.Knockout`: attention edges removed before the softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from mionnx.errors import InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.attention_knockout import create_knockout_mask, parse_edges
from mionnx.spec.kinds.kind import Array, Change, Kind, Operators, ValueReader, ValueShape
from mionnx.spec.limits import RowLimits


@dataclass(frozen=True)
class Knockout(Kind):
    """Remove attention edges before the softmax."""

    name = "knockout"
    shape = ValueShape.ATTENTION_MASK
    infinities = {"value": -np.inf}  # noqa: RUF012
    spelling = "EDGES"
    of_prompt = True

    @classmethod
    def make(cls, mask: ArrayLike, **limits: Unpack[RowLimits]) -> Change:
        """Add a mask of 0 (keep) and -inf (knock out) to attention scores, before the softmax.

        Args:
            mask: broadcastable to [batch, n_heads, seq_q, seq_k], where seq_q and seq_k are positions of each row's
                own text, past included and padding not; `create_knockout_mask` makes one. seq_q may be those of this
                call's tokens only. A shorter row takes its part of a longer mask.
            positions, heads, rows: queries, heads and rows that it applies to.

        Raises:
            InterventionError: another number than 0 and -inf; when it is used, a mask that knocks nothing out, or
                nothing in a row of which it asks for an edge.

        Example:
            Intervention.Knockout(create_knockout_mask(KnockoutSpec().edge(-1, 3), model.num_heads, len(tokens)))
        """
        return cls().change([mask], **limits)

    def check(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        if not np.isin(values[0].astype(np.float64), (0.0, -np.inf)).all():
            raise InterventionError(f"{self}: a mask holds 0 (keep) and -inf (knock out) only; Add takes other numbers")
        return values

    def at(self, point: HookPoint, axes: Sequence[str], recurrent: bool) -> Knockout:
        if recurrent:
            raise InterventionError(
                f"{self} at {point}: a recurrent model has no attention scores; use HookSpec.set_state_knockout"
            )
        if point.variant != "AttnScores":
            raise InterventionError(
                f"{self} at {point}: a mask is added before the softmax, at {HookPoint.AttnScores(point.layer or 0)}"
            )
        return self

    def read(self, text: str, reader: ValueReader) -> Sequence[Any]:
        edges = parse_edges(text)
        # Without a prompt the mask is as large as the edges ask for: a compiled graph serves any text.
        length = reader.seq_len or edges.length_of_any_text(reader.both)
        return [create_knockout_mask(edges, reader.n_heads, length, both=reader.both)]

    def nodes(self, op: Operators, x: Any, value: Any) -> Any:
        return op.Add(x, value)

    def reference(self, x: Array, value: Array) -> Array:
        return x + value
