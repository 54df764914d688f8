"""`Intervention.Window`: attention edges longer than a number of tokens removed before the softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from mionnx.errors import InterventionError
from mionnx.spec.kinds.kind import Array, Change, ValueReader
from mionnx.spec.kinds.knockout import Knockout
from mionnx.spec.limits import RowLimits


@dataclass(frozen=True)
class Window(Knockout):
    """Remove attention edges longer than a number of tokens."""

    name = "window"
    infinities = {}  # noqa: RUF012
    spelling = "TOKENS"
    of_prompt = False
    by_distance = True

    # of a number, where the mask of a knockout is given
    @classmethod
    def make(cls, tokens: int, **limits: Unpack[RowLimits]) -> Change:  # type: ignore[override]
        """Let a query read its own position and the `tokens` before it (in an encoder on either side), and no other.

        A mask of 0 and -inf, as `Knockout` adds it, in a text of any length, with a cache and in batches. A layer's own
        sliding window of n keys counts the query's own: it is a window of n - 1 tokens.

        Args:
            tokens: how many earlier positions of its own text a query reads, 0 or more; in an encoder as many later
                ones.
            positions, heads, rows: queries, heads and rows that it applies to.

        Raises:
            InterventionError: no whole number of 0 or above; when it is used, texts in which no selected query reads
                so far back.

        Example:
            HookSpec().intervene("blocks.*.attn.hook_scores", Intervention.Window(64))
        """
        return cls().change([tokens], **limits)

    def check(self, values: tuple[Array, ...]) -> tuple[Array, ...]:
        (value,) = values
        if value.size != 1 or value.item() < 0 or value.item() != np.floor(value.item()):
            raise InterventionError(f"window: a number of tokens, 0 or more, got {value.tolist()}")
        return (value.reshape(()).astype(np.int64),)

    def read(self, text: str, reader: ValueReader) -> Sequence[Any]:
        return [reader.array(text)]
