"""Prompts of a list as rows of ids without padding, to be run in batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.metadata import Sizes
from mionnx.inputs.token_batch import Past, make_token_batch
from mionnx.inputs.token_rows import entries_of

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PromptList:
    """Prompts of unequal length.

    Attributes:
        ids: [seq] each, without padding.
        past_mask: [rows, past], 1 for tokens of the past and 0 for its padding.
    """

    ids: list[Ids]
    past: Past | None
    past_mask: Ids | None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> list[int]:
        """[rows]: tokens of each row, its past not counted."""
        return [*map(len, self.ids)]

    @property
    def seen(self) -> int:
        """Columns of the past."""
        return 0 if self.past_mask is None else self.past_mask.shape[1]

    def part(self, rows: Sequence[int]) -> tuple[list[Ids], Ids | None, Past | None]:
        """Ids, attention mask [rows, total] and past of some rows, padded on the left."""
        ids = [self.ids[row] for row in rows]
        if self.past is None or self.past_mask is None:
            return ids, None, None
        width = max(map(len, ids))
        # padding between a row's past and its own tokens: rows of unequal length end in one column
        own = np.array([[0] * (width - size) + [1] * size for size in map(len, ids)])
        return ids, np.concatenate([self.past_mask[list(rows)], own], axis=1), self.past.select(rows)


def read_prompts(tokens: Any, attention_mask: ArrayLike | None, past: Past | None, sizes: Sizes) -> PromptList:
    """Read a list of prompts; one prompt is a list of one.

    Args:
        tokens, attention_mask: as `make_token_batch` takes them; padding on either side is left out.
        past: what came before, a row each.
    """
    rows = entries_of(tokens)
    if rows is None or attention_mask is not None or past is not None:
        batch = make_token_batch(tokens, attention_mask, past, sizes)
        ids = [row[real] for row, real in zip(batch.input_ids, batch.real, strict=True)]
        return PromptList(ids, past, None if past is None else batch.attention_mask[:, : batch.total - batch.seq])
    prompts = []
    for number, row in enumerate(rows):
        try:
            # one by one, so that an error can say which row it is
            batch = make_token_batch([row], None, None, sizes)
        except InputError as error:
            raise InputError(f"row {number}: {error}" if len(rows) > 1 else str(error)) from error
        prompts.append(batch.input_ids[0][batch.real[0]])
    return PromptList(prompts, None, None)
