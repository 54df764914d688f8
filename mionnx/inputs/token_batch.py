"""Tokens of one pass: ids, padding and positions of each row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.kv_cache import KVCache
from mionnx.inputs.layer_cache import LayerCache
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_rows import read_rows, refuse_types

Past: TypeAlias = KVCache | RWKVState | LayerCache[Any]
Place = int | str  # a position of a text, or MASK
Positions = str | Sequence[Place]
MASK = "mask"  # the position of a text's one mask token


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
        token_type_ids: [batch, seq]: which of two texts a token belongs to; None for one text a row.
        both: whether tokens read those behind them too, as in an encoder.
        mask_token: the id of the token that stands for a hidden one; None where the vocabulary has none.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64] | None = None
    final_lengths: NDArray[np.int64] | None = None
    past_lengths: NDArray[np.int64] | None = None
    token_type_ids: NDArray[np.int64] | None = None
    both: bool = False
    mask_token: int | None = None

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

    @cached_property
    def padded(self) -> bool:
        """Whether any row has padding, in the past or here."""
        return not bool(self.attention_mask.all())

    @cached_property
    def real(self) -> NDArray[np.bool_]:
        """[batch, seq] bool: tokens that are no padding."""
        return self.attention_mask[:, self.total - self.seq :].astype(bool)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """[batch]: length of each row's text so far, past included, padding not."""
        return self.attention_mask.sum(axis=1)

    @cached_property
    def token_positions(self) -> NDArray[np.int64]:
        """[batch, seq]: each token's position in its row's text, -1 for padding."""
        return np.where(self.real, self.position_ids, -1)

    def masks(self, row: int) -> list[int]:
        """The positions of a row's mask tokens in its text."""
        there = self.real[row] & (self.input_ids[row] == self.mask_token)
        return [int(at) for at in self.position_ids[row][there]]

    def absolute(self, position: Place, row: int) -> int:
        """A position of a row's text, counted from its start; negative ones come from the end of the prompt.

        Raises:
            LookupError: the row has no such position, or it lies in the past.
        """
        if isinstance(position, str):
            return self._one_mask(position, row)
        # in a generation the text has its final length from the beginning: later steps have the positions not yet
        # computed
        length = int((self.lengths if self.final_lengths is None else self.final_lengths)[row])
        # negative positions count from the end of the prompt, which does not move while a text is generated
        end = length if self.prompt_lengths is None else int(self.prompt_lengths[row])
        if not -end <= position < length:
            raise LookupError(
                f"position {position} does not exist in row {row}, which has {length} tokens (0 to {length - 1})"
            )
        column, first = position + end if position < 0 else position, self._first_computed(row)
        if column < first:
            raise LookupError(
                f"position {column} of row {row} lies in the cached past, where nothing is computed any "
                f"more; this call computes {first} to {length - 1}"
            )
        return column

    def _one_mask(self, position: str, row: int) -> int:
        if position != MASK:
            raise LookupError(f"position {position!r} is no number, and not {MASK!r}")
        places = self.masks(row)
        if len(places) != 1:
            raise LookupError(
                f"position {MASK!r}: row {row} has {len(places) or 'no'} mask tokens"
                + (f", at {places}; give the position of one" if places else "; put one into the text")
            )
        return places[0]

    def _first_computed(self, row: int) -> int:
        """The first position of a row that this call computes, in any step of a generation."""
        if self.final_lengths is None:
            return int(self.lengths[row] - self.real[row].sum())
        return 0 if self.past_lengths is None else int(self.past_lengths[row])

    def absolutes(self, positions: Positions, row: int) -> list[int]:
        """Positions of a row's text, counted from its start; for a phase, those in this batch."""
        absolutes: dict[int, None] = {}  # in the order given, each once
        for position in [positions] if isinstance(positions, str) else positions:
            if isinstance(position, str) and position == MASK:
                absolutes |= dict.fromkeys(self.masks(row))
            elif isinstance(position, str):
                absolutes |= dict.fromkeys(self._phase(position, row))
            else:
                absolutes[self.absolute(position, row)] = None
        return list(absolutes)

    def _phase(self, phase: str, row: int) -> list[int]:
        here = self.token_positions[row]
        end = here.max() + 1 if self.prompt_lengths is None else self.prompt_lengths[row]
        return [int(at) for at in here if at >= 0 and (at < end) == (phase == "prompt")]

    def so_far(self, positions: Positions, row: int) -> list[int]:
        """Positions of a row's text, counted from its start; of a phase, those of earlier steps of a generation too."""
        first, length = self._first_computed(row), int(self.lengths[row])
        end = length if self.prompt_lengths is None else int(self.prompt_lengths[row])
        phases = {"prompt": range(first, end), "generated": range(max(first, end), length)}
        places: list[int] = []
        for position in [positions] if isinstance(positions, str) else positions:
            named = phases.get(position) if isinstance(position, str) else None
            places += [self.absolute(position, row)] if named is None else named
        return places

    def columns(self, positions: Positions, row: int) -> list[int | None]:
        """The column of each position of a row's text; None for positions of another step."""
        return [self.column_of[row].get(at) for at in self.absolutes(positions, row)]

    @cached_property
    def column_of(self) -> list[dict[int, int]]:
        """For each row: position in its text -> column of this batch."""
        return [{at: column for column, at in enumerate(row)} for row in self.token_positions.tolist()]

    def next_step(self, ids: NDArray[np.int64]) -> "TokenBatch":
        """The next decoding step: one new token per row, `ids` [batch]."""
        mask = np.concatenate([self.attention_mask, np.ones((self.batch, 1), np.int64)], axis=1)
        return replace(self, input_ids=ids[:, None].copy(), attention_mask=mask, position_ids=self.lengths[:, None])

    def feeds(self) -> dict[str, NDArray[np.int64]]:
        """The inputs of the graph; engines leave out what it does not read."""
        feeds = {name: getattr(self, name) for name in ("input_ids", "attention_mask", "position_ids")}
        types = np.zeros_like(self.input_ids) if self.token_type_ids is None else self.token_type_ids
        return feeds | {"token_type_ids": types}


def make_token_batch(
    tokens: Any,
    attention_mask: ArrayLike | None,
    cache: Past | None,
    model: HookedModel,
    prompt_length: int | Sequence[int] | None = None,
) -> TokenBatch:
    """Check and complete the token inputs of a forward pass.

    Args:
        tokens: ids [seq] or [batch, seq], `Tokens`, an encoding or dictionary of a tokenizer, or a list of these; lists
            of unequal length are padded on the left, those of an encoder on the right, since its head may read the
            first column. See `mionnx.inputs.token_rows`.
        attention_mask: [batch, seq] of this call's tokens, or [batch, total] with the past; 1 for tokens, 0 for
            padding.
        cache: what came before.
        prompt_length: tokens of each row's prompt, past included; what follows was generated. None: all is prompt.

    Raises:
        InputError: more positions than were learned, or a cache of other rows.
    """
    sizes, both = model.metadata.sizes, model.metadata.bidirectional
    rows = read_rows(tokens, right=both)
    if not model.has_token_types:
        refuse_types(rows.types)
    ids, mask, own_mask = rows.ids, rows.mask, rows.chosen_mask(attention_mask)
    if own_mask is not None:
        mask = _mask(rows.mask_array(own_mask), ids, cache)
        _refuse_our_padding(mask[:, -ids.shape[1] :] > rows.mask, rows.right)
    if cache is not None and mask.shape[1] == ids.shape[1]:  # a mask of the new tokens alone
        if len(cache.attention_mask) != len(ids):
            raise InputError(f"the cache holds {len(cache.attention_mask)} rows, the tokens are {len(ids)}")
        mask = np.concatenate([cache.attention_mask, mask], axis=1)
    _check_ids(ids, mask[:, -ids.shape[1] :], sizes.vocab_size)
    # padding before a text has position 0, which the graph may look up; nothing reads what it computes there
    positions = np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
    if sizes.max_positions is not None and positions.max() >= sizes.max_positions:
        raise InputError(
            f"a text of {int(positions.max()) + 1} tokens, but the model has positions for {sizes.max_positions} only"
        )
    facts = {"token_type_ids": rows.types, "both": both, "mask_token": model.mask_token if both else None}
    call = TokenBatch(ids, mask, np.ascontiguousarray(positions), **facts)  # type: ignore[arg-type]
    return call if prompt_length is None else replace(call, prompt_lengths=_prompt_lengths(prompt_length, call))


def count_rows(tokens: Any) -> int:
    """Number of rows of a pass on these tokens; see `make_token_batch`."""
    return len(read_rows(tokens).ids)


def _prompt_lengths(prompt_length: int | Sequence[int], call: TokenBatch) -> NDArray[np.int64]:
    lengths = np.asarray(prompt_length)
    if lengths.dtype.kind not in "iu" or lengths.shape not in ((), (call.batch,)):
        raise InputError(
            f"prompt_length must be an integer, or one for each of the {call.batch} rows, got {prompt_length!r}"
        )
    lengths = np.broadcast_to(lengths, call.batch).astype(np.int64)
    if (lengths < 1).any() or (lengths > call.lengths).any():
        raise InputError(f"prompt_length {prompt_length!r}: the rows have {call.lengths.tolist()} tokens")
    return lengths


def _mask(mask: NDArray[Any], ids: NDArray[np.int64], cache: Past | None) -> NDArray[np.int64]:
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


def _refuse_our_padding(counted: NDArray[np.bool_], right: bool) -> None:
    """Refuse a mask with tokens at the padding of a shorter row."""
    if counted.any():
        row, column = np.argwhere(counted)[0].tolist()
        raise InputError(
            f"attention_mask has 1 at row {row}, column {column}, which is padding: the rows have unequal lengths and "
            f"are padded on the {'right' if right else 'left'}; give a mask of each row's own length, or none"
        )


def _check_ids(ids: NDArray[np.int64], mask: NDArray[np.int64], vocab: int) -> None:
    outside = (ids < 0) | (ids >= vocab)
    if not outside.any():
        return
    wrong = np.argwhere(outside & (mask == 1))
    if len(wrong):
        row, column = wrong[0].tolist()
        raise InputError(
            f"token {ids[row, column]} at row {row}, position {column}; the vocabulary is 0 to {vocab - 1}"
        )
    ids[outside] = 0  # padding may hold any id, -100 included; the graph looks it up all the same
