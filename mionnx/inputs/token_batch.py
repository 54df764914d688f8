"""Tokens of one pass: ids, padding and positions of each row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.metadata import Sizes
from mionnx.inputs.kv_cache import KVCache
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.tokens import Tokens

Past = KVCache | RWKVState
Positions = str | Sequence[int | str]


@dataclass(frozen=True)
class TokenBatch:
    """The token inputs of one forward pass.

    Attributes:
        input_ids: [batch, seq].
        attention_mask: [batch, total], past included: 1 for tokens, 0 for padding.
        position_ids: [batch, seq]: the position of each token in its row's text, padding not counted.
        prompt_lengths: [batch], past included: what follows is the phase "generated", and negative positions count
            from there. None if the whole text is prompt.
        final_lengths: [batch], during generation: the final length of each row. Lower positions that are not in this
            batch belong to another step and select nothing here.
        past_lengths: [batch], during generation: tokens of each row's text in the cache that it began with, which no
            step computes.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64] | None = None
    final_lengths: NDArray[np.int64] | None = None
    past_lengths: NDArray[np.int64] | None = None

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.input_ids.shape[0]

    @property
    def seq(self) -> int:
        """Tokens per row in this batch, padding included."""
        return self.input_ids.shape[1]

    @property
    def total(self) -> int:
        """Keys per row: past and this batch, padding included."""
        return self.attention_mask.shape[1]

    @property
    def real(self) -> NDArray[np.bool_]:
        """[batch, seq] bool: tokens that are no padding."""
        return self.attention_mask[:, self.total - self.seq :].astype(bool)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[batch]: length of each row's text so far, past included, padding not."""
        return self.attention_mask.sum(axis=1)

    @property
    def token_positions(self) -> NDArray[np.int64]:
        """[batch, seq]: each token's position in its row's text, -1 for padding."""
        return np.where(self.real, self.position_ids, -1)

    def absolute(self, position: int, row: int) -> int:
        """A position of a row's text, counted from its start.

        Args:
            position: from 0, or negative from the end of the prompt.
            row: the batch row.

        Raises:
            LookupError: the row has no such position, or it lies in the past.
        """
        length = int((self.lengths if self.final_lengths is None else self.final_lengths)[row])
        end = length if self.prompt_lengths is None else int(self.prompt_lengths[row])
        if not -end <= position < length:
            raise LookupError(
                f"position {position} does not exist in row {row}, which has {length} tokens (0 to {length - 1})"
            )
        found, first = position + end if position < 0 else position, self._first_computed(row)
        if found < first:
            raise LookupError(
                f"position {found} of row {row} lies in the cached past, where nothing is computed any "
                f"more; this call computes {first} to {length - 1}"
            )
        return found

    def _first_computed(self, row: int) -> int:
        """The first position of a row that this call computes, in any step of a generation."""
        if self.final_lengths is None:
            return int(self.lengths[row] - self.real[row].sum())
        return 0 if self.past_lengths is None else int(self.past_lengths[row])

    def absolutes(self, given: Positions, row: int) -> list[int]:
        """Positions of a row's text, counted from its start; for a phase, those in this batch.

        Raises:
            LookupError: see `absolute`.
        """
        found: dict[int, None] = {}
        for position in [given] if isinstance(given, str) else given:
            if isinstance(position, str):
                found |= dict.fromkeys(self._phase(position, row))
            else:
                found[self.absolute(position, row)] = None
        return list(found)

    def _phase(self, phase: str, row: int) -> list[int]:
        here = self.token_positions[row]
        end = here.max() + 1 if self.prompt_lengths is None else self.prompt_lengths[row]
        return [int(at) for at in here if at >= 0 and (at < end) == (phase == "prompt")]

    def columns(self, given: Positions, row: int) -> list[int | None]:
        """The column of each position of a row's text; None for positions of another step.

        Raises:
            LookupError: see `absolute`.
        """
        here = {int(at): column for column, at in enumerate(self.token_positions[row])}
        return [here.get(at) for at in self.absolutes(given, row)]

    def next_step(self, ids: NDArray[np.int64]) -> "TokenBatch":
        """The next decoding step: one new token per row.

        Args:
            ids: [batch].
        """
        mask = np.concatenate([self.attention_mask, np.ones((self.batch, 1), np.int64)], axis=1)
        return replace(self, input_ids=ids[:, None].copy(), attention_mask=mask, position_ids=self.lengths[:, None])

    def feeds(self) -> dict[str, NDArray[np.int64]]:
        """The inputs of the graph."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }


def make_token_batch(
    tokens: Any,
    attention_mask: ArrayLike | None,
    cache: Past | None,
    sizes: Sizes,
    prompt_length: int | Sequence[int] | None = None,
) -> TokenBatch:
    """Check and complete the token inputs of a forward pass.

    Args:
        tokens: ids as [seq] or [batch, seq], `Tokens`, or a list of either; lists of unequal length are padded left.
        attention_mask: [batch, seq] of this call's tokens, or [batch, total] with the past; 1 for tokens, 0 for
            padding.
        cache: what came before.
        sizes: of the model.
        prompt_length: tokens of each row's prompt, past included; what follows was generated. None: all is prompt.

    Raises:
        InputError: no tokens, ids outside the vocabulary, a mask that does not fit, or more positions than were
            learned.
    """
    ids, mask = _rows(tokens)
    if attention_mask is not None:
        mask = _mask(attention_mask, ids, cache)
    if cache is not None and mask.shape[1] == ids.shape[1]:
        _check_batch(cache, ids)
        mask = np.concatenate([cache.attention_mask, mask], axis=1)
    _check_ids(ids, mask[:, -ids.shape[1] :], sizes.vocab_size)
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
    if sizes.max_positions is not None and positions.max() >= sizes.max_positions:
        raise InputError(
            f"a text of {int(positions.max()) + 1} tokens, but the model has positions for {sizes.max_positions} only"
        )
    call = TokenBatch(ids, mask, np.ascontiguousarray(positions))
    return call if prompt_length is None else replace(call, prompt_lengths=_prompt_lengths(prompt_length, call))


def count_rows(tokens: Any) -> int:
    """Number of rows of a pass on these tokens; see `make_token_batch`."""
    return len(_rows(tokens)[0])


def _prompt_lengths(given: int | Sequence[int], call: TokenBatch) -> NDArray[np.int64]:
    lengths = np.asarray(given)
    if lengths.dtype.kind not in "iu" or lengths.shape not in ((), (call.batch,)):
        raise InputError(f"prompt_length must be an integer, or one for each of the {call.batch} rows, got {given!r}")
    spread = np.broadcast_to(lengths, call.batch).astype(np.int64)
    if (spread < 1).any() or (spread > call.lengths).any():
        raise InputError(f"prompt_length {given!r}: the rows have {call.lengths.tolist()} tokens")
    return spread


def _rows(tokens: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[batch, seq] ids and mask, from whatever was given."""
    if isinstance(tokens, Tokens):
        tokens = tokens.ids
    if isinstance(tokens, Sequence) and tokens and not isinstance(tokens[0], int | np.integer):
        return _pad_left([_row(row) for row in tokens])
    ids = _array("tokens", tokens)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2:
        raise InputError(f"tokens must be [seq] or [batch, seq], got shape {list(ids.shape)}")
    if ids.size == 0:
        raise InputError("the prompt is empty: there is no token to run on")
    return _integers(ids), np.ones(ids.shape, np.int64)


def _row(row: Any) -> NDArray[np.int64]:
    ids = _array("a row of tokens", row.ids if isinstance(row, Tokens) else row)
    if ids.ndim != 1:
        raise InputError(f"each row of tokens must be [seq], got shape {list(ids.shape)}")
    if ids.size == 0:
        raise InputError("a prompt is empty: there is no token to run on")
    return _integers(ids)


def _array(what: str, given: Any) -> NDArray[Any]:
    try:
        return np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} must be an array of integers: {error}") from error


def _integers(ids: NDArray[Any]) -> NDArray[np.int64]:
    if ids.dtype.kind not in "iu":
        raise InputError(f"tokens must be integers, got {ids.dtype}")
    return np.array(ids, np.int64)  # a copy: impossible ids of padding are overwritten below


def _pad_left(rows: list[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    width = max(len(row) for row in rows)
    ids, mask = np.zeros((2, len(rows), width), np.int64)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return ids, mask


def _mask(given: ArrayLike, ids: NDArray[np.int64], cache: Past | None) -> NDArray[np.int64]:
    mask = np.atleast_2d(_array("attention_mask", given))
    total = ids.shape[1] + (cache.seq_len if cache else 0)
    if mask.shape not in ((len(ids), ids.shape[1]), (len(ids), total)):
        raise InputError(
            f"attention_mask is {list(mask.shape)}; for tokens {list(ids.shape)} it must be {list(ids.shape)}"
            + (f" or, with the past, {[ids.shape[0], total]}" if cache else "")
        )
    if not np.isin(mask, (0, 1)).all():
        raise InputError("attention_mask holds 1 for tokens and 0 for padding, and nothing else")
    mask = mask.astype(np.int64)
    if (mask[:, -ids.shape[1] :].sum(axis=1) == 0).any():
        raise InputError("a row of the attention_mask is all padding")
    return np.ascontiguousarray(mask)


def _check_batch(cache: Past, ids: NDArray[np.int64]) -> None:
    if cache.attention_mask.shape[0] != ids.shape[0]:
        raise InputError(f"the cache holds {cache.attention_mask.shape[0]} rows, the tokens are {ids.shape[0]}")


def _check_ids(ids: NDArray[np.int64], mask: NDArray[np.int64], vocab: int) -> None:
    outside = (ids < 0) | (ids >= vocab)
    wrong = np.argwhere(outside & (mask == 1))
    if len(wrong):
        row, column = wrong[0].tolist()
        raise InputError(
            f"token {ids[row, column]} at row {row}, position {column}; the vocabulary is 0 to {vocab - 1}"
        )
    ids[outside] = 0  # padding may hold any id, -100 included; the graph looks it up all the same
