"""Prompts as rows of ids: arrays and tensors, lists, `Tokens`, a tokenizer's encodings and dictionaries.

transformers' tokenizers give a dictionary (`BatchEncoding`), `tokenizers` gives an `Encoding`; neither library is
imported here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, nearest
from mionnx.inputs.tokens import Tokens
from mionnx.machine.arrays import to_array

IDS, ATTENTION_MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
# Keys of a tokenizer's dictionary that say something of the text and nothing to the model.
ASIDE = ("special_tokens_mask", "offset_mapping", "length", "overflow_to_sample_mapping", "num_truncated_tokens")


@dataclass(frozen=True)
class TokenRows:
    """Rows of ids as they were given, padded where they have unequal lengths.

    Attributes:
        ids: [batch, seq], int64; a copy.
        widths: [batch]: number of ids that were given for each row; the others are padding of ours.
        own_mask: attention mask that came with the ids, as it was given.
        types: [batch, seq], int64: token types that came with the ids; None for one text a row.
        right: whether our padding is on the right.
    """

    ids: NDArray[np.int64]
    widths: tuple[int, ...]
    own_mask: Any = None
    types: NDArray[np.int64] | None = None
    right: bool = False

    @property
    def mask(self) -> NDArray[np.int64]:
        """[batch, seq]: 1 for what was given, 0 for padding of ours."""
        if min(self.widths, default=0) == self.ids.shape[1]:  # nothing was padded
            return np.ones(self.ids.shape, np.int64)
        columns, widths = np.arange(self.ids.shape[1]), np.array(self.widths)[:, None]
        real = columns < widths if self.right else columns >= self.ids.shape[1] - widths
        return real.astype(np.int64)

    def chosen_mask(self, attention_mask: Any) -> Any:
        """The attention mask to use: the parameter, or the one that came with the ids; two that differ are refused."""
        if attention_mask is None or self.own_mask is None:
            return self.own_mask if attention_mask is None else attention_mask
        if not np.array_equal(self.mask_array(attention_mask), self.mask_array(self.own_mask)):
            raise InputError("attention_mask is given twice, by itself and with the ids, and the two differ")
        return attention_mask

    def mask_array(self, attention_mask: Any) -> NDArray[Any]:
        """A mask [batch, seq or total]; rows of unequal length are padded as the ids are."""
        if _is_ragged(attention_mask) and tuple(map(len, attention_mask)) == self.widths:
            rows = [read_array("a row of attention_mask", row) for row in attention_mask]
            if (wrong := next((row for row in rows if row.ndim != 1), None)) is not None:
                raise InputError(f"each row of attention_mask must be [seq], got shape {list(wrong.shape)}")
            return _padded(rows, self.right)
        return np.atleast_2d(read_array("attention_mask", attention_mask))


def read_rows(tokens: Any, right: bool = False) -> TokenRows:
    """Rows of ids [seq] or [batch, seq], `Tokens`, an encoding, a dictionary of ids, or a list of these.

    Args:
        right: whether rows of unequal length are padded on the right, rather than on the left.
    """
    if isinstance(tokens, Mapping):
        return _of_dictionary(tokens, right)
    if _is_encoding(tokens):
        return _of_encoding(tokens)
    if (entries := entries_of(tokens)) is not None:
        return _of_rows([read_row(row) for row in entries], right)
    ids = read_array("tokens", tokens)
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2:
        raise InputError(f"tokens must be [seq] or [batch, seq], got shape {list(ids.shape)}")
    if ids.size == 0:
        raise InputError("the prompt is empty: there is no token to run on")
    return TokenRows(_integers(ids), (ids.shape[1],) * len(ids))


def entries_of(tokens: Any) -> Sequence[Any] | None:
    """The rows of a list of prompts; None of a single prompt, or of an array of all."""
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str) and not _is_encoding(tokens)
    return tokens if listed and any(map(_is_row, tokens)) else None


def read_row(prompt: Any) -> TokenRows:
    """One row of a list of rows."""
    if isinstance(prompt, Mapping) or _is_encoding(prompt):
        row = read_rows(prompt)
        if len(row.ids) != 1:
            raise InputError(f"each entry of a list of prompts is one row, got {len(row.ids)} in one")
        return row
    if isinstance(prompt, str):
        raise InputError(f"a list of prompts holds texts or ids, not both: {prompt!r} is among ids")
    ids = read_array("a row of tokens", prompt)
    if ids.ndim != 1:
        raise InputError(f"each row of tokens must be [seq], got shape {list(ids.shape)}")
    if ids.size == 0:
        raise InputError("a prompt is empty: there is no token to run on")
    return TokenRows(_integers(ids)[None], (len(ids),))


def _of_rows(rows: list[TokenRows], right: bool) -> TokenRows:
    own = types = None
    if any(row.own_mask is not None for row in rows):  # where one row brings a mask all need one
        own = [row.mask_array(np.ones(row.widths) if row.own_mask is None else row.own_mask)[0] for row in rows]
    if any(row.types is not None for row in rows):
        own_types = [np.zeros(row.ids.shape[1], np.int64) if row.types is None else row.types[0] for row in rows]
        types = _padded(own_types, right)
    ids = _padded([row.ids[0] for row in rows], right)
    return TokenRows(ids, tuple(row.widths[0] for row in rows), own, types, right)


def _of_dictionary(dictionary: Mapping[Any, Any], right: bool) -> TokenRows:
    if IDS not in dictionary:
        if "role" in dictionary:
            raise InputError("a message of a chat is no prompt: give model.tokenize_chat(messages)")
        raise InputError(f"a prompt given as a dictionary has {IDS!r}; this one has {sorted(map(str, dictionary))}")
    keys = (IDS, ATTENTION_MASK, TYPES)
    for key in dictionary:
        if key not in (*keys, *ASIDE) and dictionary[key] is not None:
            choice = nearest(str(key), keys) or f"; it may have {', '.join(keys)}"
            raise InputError(f"the prompt's dictionary has {key!r}, which the model does not read{choice}")
    rows = read_rows(dictionary[IDS], right)
    own = dictionary.get(ATTENTION_MASK)
    types = _types(rows, dictionary.get(TYPES))
    return replace(rows, own_mask=rows.own_mask if own is None else rows.chosen_mask(own), types=types)


def _types(rows: TokenRows, types: Any) -> NDArray[np.int64] | None:
    """Token types [batch, seq] beside rows of ids; None where all are 0, as those of one text."""
    if types is None:
        return rows.types
    array = rows.mask_array(types)
    if array.shape != rows.ids.shape:
        raise InputError(f"{TYPES} is {list(array.shape)}, the ids are {list(rows.ids.shape)}")
    if array.dtype.kind not in "iub" or (array < 0).any():
        raise InputError(f"{TYPES} holds whole numbers from 0, got {array.dtype}")
    return array.astype(np.int64) if array.any() else None


def refuse_types(types: NDArray[np.int64] | None) -> None:
    """Refuse token types other than the zeros that tokenizers write for one text: the graph has no input for them."""
    if types is not None and types.any():
        raise InputError(f"{TYPES} holds other numbers than 0, and the model has no such input: leave it out")


def is_one_prompt(value: Any) -> bool:
    """Whether a value is one prompt, not a list: a text, an encoding or a dictionary."""
    return isinstance(value, str | Mapping) or _is_encoding(value)


def _is_encoding(value: Any) -> bool:
    """Whether a value is an encoding: `Tokens`, `tokenizers.Encoding`, a World one."""
    # by its attributes: neither tokenizer library is imported here
    return isinstance(value, Tokens) or (hasattr(value, "ids") and hasattr(value, "offsets"))


def _of_encoding(encoding: Any) -> TokenRows:
    row = read_row(encoding.ids)
    types = getattr(encoding, "type_ids", None)
    return replace(row, own_mask=getattr(encoding, ATTENTION_MASK, None), types=_types(row, types))


def _is_row(entry: Any) -> bool:
    return _is_encoding(entry) or (hasattr(entry, "__len__") and getattr(entry, "ndim", 1) > 0)


def _is_ragged(rows: Any) -> bool:
    return isinstance(rows, list | tuple) and all(map(_is_row, rows)) and len({*map(len, rows)}) > 1


def read_array(what: str, array: Any) -> NDArray[Any]:
    """An array or a tensor of ids as a numpy array; its dtype is not checked."""
    try:
        return to_array(array)
    except ValueError as error:
        raise InputError(f"{what} must be an array of integers: {error}") from error


def _integers(ids: NDArray[Any]) -> NDArray[np.int64]:
    if ids.dtype.kind not in "iu":
        raise InputError(f"tokens must be integers, got {ids.dtype}")
    return np.array(ids, np.int64)  # a copy: impossible ids of padding are overwritten later


def _padded(rows: list[NDArray[Any]], right: bool) -> NDArray[Any]:
    """[batch, longest]: rows with zeros on one side."""
    width = max(len(row) for row in rows)
    padded = np.zeros((len(rows), width), np.result_type(*{row.dtype for row in rows}))
    for place, row in zip(padded, rows, strict=True):
        place[slice(len(row)) if right else slice(width - len(row), None)] = row
    return padded
