"""Masks of attention: those of padding, causal and sliding-window ones, and `KnockoutMask`, of a knockout on a batch.

Rows and columns of a knockout's mask are positions of each row's own text: padding is no position, wherever it stands,
and keys of the past count. One mask so means the same in every batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InterventionError
from mionnx.graph.axes import KEYS, SEQUENCE_AXES, format_shape
from mionnx.inputs.token_batch import TokenBatch

Shape = tuple[int, ...]
Queries = Mapping[int, NDArray[np.int64]]
AXES_OF_SCORES = ("batch", "n_heads", "seq_q", "seq_k")


def of_texts(batch: TokenBatch, axes: Sequence[str]) -> NDArray[np.bool_]:
    """Entries of a value outside of padding: bool, 1 wide along axes without tokens."""
    tokens = {KEYS: batch.attention_mask.astype(bool), **dict.fromkeys(SEQUENCE_AXES, batch.real)}
    real = np.ones((1,) * len(axes), np.bool_)
    for at, axis in enumerate(axes):
        if axis in tokens:
            shape = [batch.batch, *(-1 if n == at else 1 for n in range(1, len(axes)))]
            real = real & tokens[axis].reshape(shape)
    return real


def visible_keys(batch: TokenBatch, window: int | None) -> NDArray[np.bool_]:
    """[batch, seq, total] bool: keys that a query reads.

    Padding, later positions and positions before the sliding window are not read; the window counts no padding.

    Args:
        window: number of keys that a query reads, its own included; None for all before it. In an encoder a query
            reads those behind it as well, and the window holds on either side.
    """
    key = np.arange(batch.total)
    # the new tokens are the last columns: query i stands in column total - seq + i
    seen = np.broadcast_to(batch.attention_mask.astype(bool)[:, None, :], (batch.batch, batch.seq, batch.total))
    if not batch.both:
        seen = seen & (key <= key[batch.total - batch.seq :, None])
    if window is not None:
        # keys counted without padding, as positions of the row's own text
        places = batch.attention_mask.cumsum(axis=1)
        distances = places[:, batch.total - batch.seq :, None] - places[:, None, :]
        seen = seen & ((abs(distances) if batch.both else distances) < window)
    return seen


def refuse_rows_without_keys(hook: str, blocked: NDArray[np.bool_], batch: TokenBatch, window: int | None) -> None:
    """Refuse a knockout that leaves a query without a key; `blocked` broadcasts to [batch, n_heads, seq, total]."""
    # the softmax of such a row would be NaN, or fall on masked keys
    left = (visible_keys(batch, window)[:, None] & ~blocked).any(axis=-1)  # [batch, n_heads or 1, seq]
    blind = np.argwhere(~left & batch.real[:, None, :])
    if len(blind):
        row, head, query = blind[0].tolist()
        heads = "every head" if left.shape[1] == 1 else f"head {head}"
        raise InterventionError(
            f"knockout at {hook}: the query at position {batch.token_positions[row, query]} of row {row} is left with "
            f"no key in {heads}; its attention would be NaN. Keep at least one edge (a position may read itself)"
        )


@dataclass(frozen=True)
class KnockoutMask:
    """A mask of 0 and -inf, [batch, n_heads, seq_q, seq_k] or what broadcasts to it."""

    title: str
    array: NDArray[Any]
    shape: Shape
    call: TokenBatch
    rows: list[int]
    by_row: bool = False  # rows are a limit: the mask may have one entry for each of them
    heads: list[int] | None = None
    positions: Mapping[int, list[int]] | None = None  # of the selected queries, in order; None if no list limits them

    @cached_property
    def value(self) -> NDArray[Any]:
        """The mask with four axes, its heads at their places."""
        if self.array.ndim > 4:
            raise self._misfit()
        value = self.array.reshape((1,) * (4 - self.array.ndim) + self.array.shape)
        rows, heads, _, keys = value.shape
        if not (rows in (1, self.shape[0]) or (self.by_row and rows == len(self.rows))):
            raise self._misfit()
        # during a generation texts grow: a mask of any length is right at some step
        if self.call.final_lengths is None and keys not in (1, *self._lengths):
            raise self._misfit()
        if self.by_row and 1 < rows == len(self.rows):
            self._refuse_twice("rows", self.rows)
        if heads > 1 and self.heads is not None and heads == len(self.heads):
            self._refuse_twice("heads", self.heads)
            # one entry for each chosen head; all others keep their scores
            full = np.zeros((rows, self.shape[1], *value.shape[2:]), value.dtype)
            full[:, self.heads] = value
            return full
        if heads not in (1, self.shape[1]):
            raise self._misfit()
        return value

    @property
    def _lengths(self) -> list[int]:
        """Accepted lengths of a text: the longest selected row's, the longest row's, with padding."""
        lengths = self.call.lengths
        return sorted({int(lengths[self.rows].max()), int(lengths.max()), self.call.total})

    def _misfit(self) -> InterventionError:
        shape = format_shape(AXES_OF_SCORES, self.shape)
        return InterventionError(
            f"{self.title}: value of shape {list(self.array.shape)} must broadcast to {shape};"
            f" its last two axes are positions of each row's own text, 1 or {' or '.join(map(str, self._lengths))} of "
            "them, and `create_knockout_mask` takes a length for each row"
        )

    def _refuse_twice(self, limit: str, indices: Sequence[int]) -> None:
        if len({*indices}) < len(indices):
            raise InterventionError(
                f"{self.title}: one of {limit}={[*indices]} is chosen twice, and the mask of shape "
                f"{list(self.array.shape)} has two entries for it"
            )

    def row(self, row: int) -> NDArray[Any]:
        """[heads or 1, seq_q, seq_k] of the mask: the part of one row."""
        return self.value[self._index(row)]

    def _index(self, row: int) -> int:
        if len(self.value) == 1:
            return 0
        return self.rows.index(row) if self.by_row and len(self.value) == len(self.rows) else row

    @cached_property
    def queries(self) -> Queries | None:
        """Row -> text positions of the mask's queries; None if it holds for every query."""
        count, call = self.value.shape[2], self.call
        if count == 1:
            return None
        chosen = self.positions
        if chosen is not None and all(len(chosen[row]) == count for row in self.rows):
            for row in self.rows:
                self._refuse_twice("positions", chosen[row])
            return {row: np.array(chosen[row], np.int64) for row in self.rows}
        here = np.arange(count)
        if call.final_lengths is not None or count in self._lengths:
            return dict.fromkeys(self.rows, here)
        if count not in (call.seq, int(call.real[self.rows].sum(axis=1).max())):
            raise self._misfit()
        # as many queries as the call has new tokens: counted from the end of the past
        return {row: first_position(call, row) + here for row in self.rows}

    @cached_property
    def in_batch(self) -> NDArray[Any]:
        """The mask in the batch's columns, 0 at padding and beyond it; broadcasts to the scores."""
        _, heads, queries, keys = self.value.shape
        # one more row and column, of zeros: what has no place in the mask takes them, by the index -1
        wide = np.pad(self.value, [(0, 0), (0, 0), (0, int(queries > 1)), (0, int(keys > 1))])
        at = {row: (self._query_places(row), self._key_places(row)) for row in self.rows}
        shape = heads, self.call.seq if queries > 1 else 1, self.call.total if keys > 1 else 1
        # rows with their tokens in the same columns share one mask, broadcast over the batch
        if len(self.value) == 1 and all(_equal(places, at[self.rows[0]]) for places in at.values()):
            return _taken(wide[0], *at[self.rows[0]])[None]
        full = np.zeros((self.shape[0], *shape), wide.dtype)
        for row, places in at.items():
            full[row] = _taken(wide[self._index(row)], *places)
        return full

    def _query_places(self, row: int) -> NDArray[np.int64] | None:
        """[seq]: index in the mask of each query of the batch; -1 for none."""
        if self.queries is None:
            return None
        return _places(self.queries[row], self.call.token_positions[row])

    def _key_places(self, row: int) -> NDArray[np.int64] | None:
        """[total]: index in the mask of each key of the batch; -1 for none."""
        count = self.value.shape[3]
        if count == 1:
            return None
        mask = self.call.attention_mask[row]
        return _places(np.arange(count), np.where(mask == 1, mask.cumsum() - 1, -1))

    def edges(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """A row's edges: text positions of queries [q] and keys [k]; which are cut in any selected head [q, k]."""
        end = end_of(self.call, row)
        cut = np.isneginf(self.row(row))
        cut = cut if self.heads is None or len(cut) == 1 else cut[self.heads]
        queries = np.arange(first_position(self.call, row), end) if self.queries is None else self.queries[row]
        keys = np.arange(end if cut.shape[2] == 1 else cut.shape[2])
        return queries, keys, np.broadcast_to(cut.any(axis=0), (len(queries), len(keys)))


@dataclass(frozen=True)
class WindowMask:
    """A mask that follows from distances: a query reads its own position and `tokens` before it, or on either side."""

    tokens: int
    call: TokenBatch
    rows: list[int]

    @cached_property
    def in_batch(self) -> NDArray[Any]:
        """The mask in the batch's columns, 0 at padding: [batch, 1, seq, total]."""
        mask = self.call.attention_mask == 1
        keys = np.where(mask, mask.cumsum(axis=1) - 1, -1)[:, None]
        distances = self.call.token_positions[:, :, None] - keys
        far = ((abs(distances) if self.call.both else distances) > self.tokens) & (keys >= 0)
        return np.where(far, np.float32(-np.inf), np.float32(0))[:, None]

    def queries(self, row: int, selected: Sequence[int], window: int | None) -> list[int]:
        """The queries among some of a row that lose an edge."""
        # the layer's own window, its query included, cuts all of these already
        if window is not None and window <= self.tokens + 1:
            return []
        end = end_of(self.call, row)
        return [
            query
            for query in selected
            if query < end and self.tokens < (max(query, end - 1 - query) if self.call.both else query)
        ]


def first_position(call: TokenBatch, row: int) -> int:
    """The text position of a row's first token in a batch."""
    return int(call.lengths[row] - call.real[row].sum())


def end_of(call: TokenBatch, row: int) -> int:
    """Length of a row's text after the call, or after the generation that it begins."""
    return int((call.lengths if call.final_lengths is None else call.final_lengths)[row])


def _places(positions: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of each target among some positions; -1 where it is not among them."""
    size = 2 + max(int(positions.max(initial=0)), int(targets.max(initial=0)))
    table = np.full(size, -1, np.int64)  # its last entry, which padding's -1 finds, is not among them
    table[positions] = np.arange(len(positions))
    return table[targets]


Places = tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]


def _equal(one: Places, other: Places) -> bool:
    return all(a is None or b is None or np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def _taken(part: NDArray[Any], queries: NDArray[np.int64] | None, keys: NDArray[np.int64] | None) -> NDArray[Any]:
    part = part if queries is None else part.take(queries, axis=1)
    return part if keys is None else part.take(keys, axis=2)


def cut_edges(
    mask: KnockoutMask | WindowMask, selected: Mapping[int, Sequence[int]], limited: bool, window: int | None
) -> Iterator[tuple[int, bool, list[int]]]:
    """Edges that a mask cuts in each selected row, in this call or its whole generation.

    Args:
        selected: row -> text positions of the queries that the intervention selects.
        limited: whether positions limit it: what the mask asks for elsewhere is then not meant.
        window: see `visible_keys`.

    Yields:
        the row; whether the mask asks there for any edge that a query could read; the text positions
        of the queries that lose an edge which they would have read.
    """
    for row in mask.rows:
        if isinstance(mask, WindowMask):  # asks for no edge by name: a short text beside a long one loses none
            yield row, False, mask.queries(row, selected[row], window)
            continue
        queries, keys, cut = mask.edges(row)
        here = np.isin(queries, list(selected[row]))[:, None]
        # later keys are hidden by the causal mask anyway
        meant = cut & (mask.call.both | (keys <= queries[:, None])) & (here | (not limited))
        read = meant & here & (keys < end_of(mask.call, row))
        if window is not None:
            distances = queries[:, None] - keys
            read &= (abs(distances) if mask.call.both else distances) < window
        yield row, bool(meant.any()), queries[read.any(axis=1)].tolist()
