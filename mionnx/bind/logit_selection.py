"""A part of the logits: chosen positions, chosen tokens, or the largest ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.values import columns
from mionnx.errors import InputError
from mionnx.graph.metadata import Metadata
from mionnx.inputs.token_batch import Place, TokenBatch
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import LOGIT_COLUMNS, LOGIT_TOKENS, LOGIT_TOP_K, Outputs
from mionnx.spec.limits import indices_of


@typed(InputError)
@dataclass(frozen=True)
class Logits:
    """A part of the logits, computed inside the graph.

    Attributes:
        positions: of these positions of each row's own text, negative ones from its end (with a `prompt_length`, from
            the prompt's), whichever side is padded; "mask" is that of the text's one mask token; all if left out. The
            head's matrix product is computed for these alone.
        token_ids: of these tokens (of an encoder with labels, these labels' numbers), in this order; of all if left
            out.
        k: only the largest k, in descending order; `HookCache.top_ids` has their tokens (places in `token_ids`, if
            these were given too).

    Example:
        cache = model.forward("The capital of France is", logits=Logits(positions=-1, k=10))
        cache.output().shape, cache.top_ids.shape  # (1, 1, 10), (1, 1, 10)
    """

    positions: Place | Sequence[Place] | None = None
    token_ids: int | Sequence[int] | None = None
    k: int | None = None

    def outputs(self, carried: bool) -> Outputs:
        """The structure of a graph with this part of the logits."""
        # the last position alone, as in generation, is a Slice, which needs no input
        last = self.positions_ == [-1]
        return Outputs(
            last=last,
            at_positions=self.positions is not None and not last,
            of_tokens=self.token_ids is not None,
            ranked=self.k is not None,
            carried=carried,
        )

    @property
    def positions_(self) -> list[Place]:
        """The positions as a list."""
        if self.positions is None:
            return []
        several = isinstance(self.positions, Iterable) and not isinstance(self.positions, str)
        listed: Iterable[Any] = self.positions if several else [self.positions]  # type: ignore[assignment]
        return [one if isinstance(one, str) else int(one) for one in listed]

    def feeds(self, call: TokenBatch, metadata: Metadata) -> dict[str, NDArray[Any]]:
        """The inputs with the positions, tokens and k of this part."""
        feeds: dict[str, NDArray[Any]] = {}
        size = metadata.columns
        if self.positions is not None:
            if not metadata.positional:
                raise InputError(f"logits at positions {self.positions}: this model has one row of them a text")
            if not self.positions_:
                raise InputError("logits of no positions would be empty")
            feeds[LOGIT_COLUMNS] = columns("logits", self.positions_, call)
        if self.token_ids is not None:
            tokens = indices_of("token_ids", self.token_ids)
            if max(tokens) >= size:
                raise InputError(f"logits of the tokens {[*tokens]}; there are 0 to {size - 1}")
            feeds[LOGIT_TOKENS], size = np.array(tokens), len(tokens)  # k counts among the chosen tokens
        if self.k is not None:
            if not 1 <= self.k <= size:
                raise InputError(f"k={self.k} of {size} logits")
            feeds[LOGIT_TOP_K] = np.array([self.k])
        return feeds
