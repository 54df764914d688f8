"""Prompts of a list as rows of ids without padding, to be run in batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.inputs.token_rows import IDS, TYPES, entries_of

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PromptList:
    """Prompts of unequal length.

    Attributes:
        ids: [seq] each, without padding.
        types: [seq] each: which of two texts a token belongs to; None for one text.
        past_mask: [rows, past], 1 for tokens of the past and 0 for its padding.
    """

    ids: list[Ids]
    past: Past | None
    past_mask: Ids | None
    types: list[Ids | None] | None = None

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

    def row(self, row: int) -> Any:
        """One prompt, as `make_token_batch` takes it."""
        types = None if self.types is None else self.types[row]
        return self.ids[row] if types is None else {IDS: self.ids[row], TYPES: types}

    def part(self, rows: Sequence[int]) -> tuple[list[Any], Ids | None, Past | None]:
        """Prompts, attention mask [rows, total] and past of some rows."""
        ids = [self.row(row) for row in rows]
        if self.past is None or self.past_mask is None:
            return ids, None, None
        width = max(len(self.ids[row]) for row in rows)
        # padding between a row's past and its own tokens: rows of unequal length end in one column
        own = np.array([[0] * (width - size) + [1] * size for size in (len(self.ids[row]) for row in rows)])
        return ids, np.concatenate([self.past_mask[list(rows)], own], axis=1), self.past.select(rows)


def read_prompts(tokens: Any, attention_mask: ArrayLike | None, past: Past | None, model: HookedModel) -> PromptList:
    """Read a list of prompts; one prompt is a list of one.

    Args:
        tokens, attention_mask: as `make_token_batch` takes them; padding on either side is left out.
        past: what came before, a row each.
    """
    rows = entries_of(tokens)
    if rows is None or attention_mask is not None or past is not None:
        batch = make_token_batch(tokens, attention_mask, past, model)
        before = None if past is None else batch.attention_mask[:, : batch.total - batch.seq]
        return PromptList(real_ids(batch), past, before, real_types(batch))
    prompts: list[Ids] = []
    types: list[Ids | None] = []
    for number, row in enumerate(rows):
        try:
            # one by one, so that an error can say which row it is
            batch = make_token_batch([row], None, None, model)
        except InputError as error:
            raise InputError(f"row {number}: {error}" if len(rows) > 1 else str(error)) from error
        prompts += real_ids(batch)
        types += real_types(batch) or [None]
    return PromptList(prompts, None, None, types if any(one is not None for one in types) else None)


def real_ids(batch: TokenBatch) -> list[Ids]:
    """The ids of each row, [seq], without padding."""
    return [row[real] for row, real in zip(batch.input_ids, batch.real, strict=True)]


def real_types(batch: TokenBatch) -> list[Ids | None] | None:
    """The token types of each row, [seq], without padding; None where all are 0."""
    if batch.token_type_ids is None:
        return None
    return [row[real] for row, real in zip(batch.token_type_ids, batch.real, strict=True)]
