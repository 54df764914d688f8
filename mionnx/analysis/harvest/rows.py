"""Rows of tokens that the model runs on: one text each, or windows of a fixed length over all texts."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.texts import Texts
from mionnx.errors import InputError, TokenizerError
from mionnx.inputs.tokens import Tokens
from mionnx.machine.ranges import listed
from mionnx.run.prompt import one_prompt, token_of
from mionnx.run.runner import Runner

Integers = NDArray[np.int64]
Chooser = Callable[[Integers], Any]
Positions = int | Sequence[int] | str | Chooser
FIRST, POOLED = "first", "pooled"  # positions of an encoder: the first token, and values of which a text has one


@dataclass(frozen=True)
class HarvestRow:
    """Tokens that run together, an entry [seq] each."""

    ids: Integers
    # text, position: number of the text that each token is of, and its position there.
    text: Integers
    position: Integers
    keep: NDArray[np.bool_]  # the tokens whose activations are written, bool

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def count(self) -> int:
        """Number of tokens whose activations are written."""
        return int(self.keep.sum())


@dataclass(frozen=True)
class HarvestRows:
    """The rows of a dataset, the same at every call; settings as `harvest` has them."""

    model: Runner
    texts: Texts
    context: int | None
    packed: bool
    separator: int | None
    positions: Positions | None

    def __iter__(self) -> Iterator[HarvestRow]:
        return self._windows() if self.packed else (self._row(n, text) for n, text in enumerate(self.texts))

    def _row(self, number: int, text: Any) -> HarvestRow:
        """One text, cut to the context."""
        with _in_text(number):
            ids, tokens = self._ids(text)
            length = min(len(ids), self.context or len(ids))
            first = self.model.bidirectional and isinstance(self.positions, str) and self.positions in (FIRST, POOLED)
            keep = keep_mask(ids[:length], tokens, 0 if first else self.positions)
        return HarvestRow(ids[:length], np.full(length, number), np.arange(length), keep)

    def _ids(self, text: Any) -> tuple[Integers, Tokens | None]:
        """The ids of a text, and the places of its letters if it is one."""
        if isinstance(text, str):
            text = self.model.tokenize(text)
        return one_prompt(self.model, text), text if isinstance(text, Tokens) else None

    def _windows(self) -> Iterator[HarvestRow]:
        """All texts one after the other, cut into windows; the last one may be shorter."""
        size, waiting = self.context or 0, [np.empty((0, 3), np.int64)]
        for number, text in enumerate(self.texts):
            waiting.append(self._columns(number, text))
            if sum(map(len, waiting)) >= size:
                tokens = np.concatenate(waiting)
                full = len(tokens) // size * size
                yield from (self._window(tokens[at : at + size]) for at in range(0, full, size))
                waiting = [tokens[full:]]
        if sum(map(len, waiting)):
            yield self._window(np.concatenate(waiting))

    def _columns(self, number: int, text: Any) -> Integers:
        """Ids, text and positions of a text's tokens, [seq, 3]."""
        with _in_text(number):
            ids, _ = self._ids(text)
        place = np.arange(len(ids))
        if self.separator is not None and ids[0] != self.separator:
            ids, place = np.r_[self.separator, ids], np.r_[-1, place]  # -1: a separator is in no text
        return np.stack([ids, np.full(len(ids), number), place], axis=1)

    def _window(self, columns: Integers) -> HarvestRow:
        ids, text, position = np.ascontiguousarray(columns.T)
        return HarvestRow(ids, text, position, keep_mask(ids, None, self.positions))


@contextmanager
def _in_text(number: int) -> Iterator[None]:
    try:
        yield
    except (InputError, TokenizerError) as error:
        raise type(error)(f"text {number}: {error}") from error


def keep_mask(ids: Integers, tokens: Tokens | None, positions: Positions | None) -> NDArray[np.bool_]:
    """The tokens of a row that positions mean, [seq] bool."""
    if positions is None:
        return np.ones(len(ids), bool)
    if callable(positions):
        mask = np.asarray(positions(ids))
        if mask.shape != ids.shape or mask.dtype != bool:
            raise InputError(f"positions= gave {mask.dtype} {list(mask.shape)}, it must give bool [{len(ids)}]")
        return mask
    if isinstance(positions, str):
        if tokens is None:
            raise InputError(f"positions={positions!r} are found in a text, and this row came as ids: give texts")
        chosen = [at for at in tokens.positions_of(positions) if at < len(ids)]
    else:
        chosen = integers(positions)
    mask = np.zeros(len(ids), bool)
    for at in chosen:
        if not -len(ids) <= at < len(ids):
            raise InputError(f"position {at} of a row of {len(ids)} tokens")
        mask[at] = True
    return mask


def integers(positions: Any) -> list[int]:
    """Positions by number."""
    several = listed("positions", positions) if isinstance(positions, Iterable) else [positions]
    if not all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in several):
        raise InputError(f"positions are integers, a string, or a function of ids, not {positions!r:.60}")
    return [int(one) for one in several]


def separator_of(model: Runner, packed: bool, separator: int | str | None) -> int | None:
    """The id of the token between packed texts."""
    if separator is not None and not packed:
        raise InputError("separator= stands between packed texts: give packed=True")
    return None if separator is None else token_of(model, separator)


def digest(rows: Iterable[HarvestRow]) -> str:
    """SHA-256 of the tokens of rows and of which are written, hexadecimal."""
    sha256 = hashlib.sha256()
    for row in rows:
        for part in (row.ids, row.text, row.position, row.keep):
            # Lengths come before the numbers, so that rows cut at other places have another digest.
            sha256.update(np.int64(len(part)).tobytes() + np.ascontiguousarray(part).tobytes())
    return sha256.hexdigest()
