"""`TokenArray`: one array over the shards of a folder, read where it is indexed."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.arrays import to_array


class NoTokenError(InputError, IndexError):
    """A token that an array does not have."""


class TokenArray:
    """An array [tokens, ...] whose first axis runs over shards.

    It is indexed as a numpy array is: by numbers, slices, lists and masks along the first axis, and by anything
    along the others; `np.asarray` reads all of it.

    Attributes:
        shape, dtype, ndim: as of a numpy array.
    """

    def __init__(self, name: str, parts: Sequence[NDArray[Any]]) -> None:
        self.name = name
        self._parts = [*parts]
        self._ends = np.cumsum([len(part) for part in parts])
        self.shape: tuple[int, ...] = (int(self._ends[-1]), *parts[0].shape[1:])
        self.dtype = parts[0].dtype
        self.ndim = len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for part in self._parts:
            yield from map(np.asarray, part)

    def __getitem__(self, index: Any) -> Any:
        first, others = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if isinstance(index, tuple) and not index:
            return self.__array__()
        if first is None or first is Ellipsis:
            return self.__array__()[index]
        if isinstance(first, slice):
            values = self._slice(first)
        elif isinstance(first, int | np.integer) and not isinstance(first, bool):
            return self._chosen(np.array([first]))[0][others] if others else self._chosen(np.array([first]))[0]
        else:
            values = self._chosen(self._tokens(first))
        return values[(slice(None), *others)] if others else values

    def _slice(self, along: slice) -> NDArray[Any]:
        begin, end, step = along.indices(len(self))
        if step != 1:
            return self._chosen(np.arange(begin, end, step))
        pieces, start = [], 0
        for part in self._parts:
            low, high = max(begin - start, 0), min(end - start, len(part))
            pieces += [np.asarray(part[low:high])] if low < high else []
            start += len(part)
        return np.concatenate(pieces) if pieces else np.empty((0, *self.shape[1:]), self.dtype)

    def _tokens(self, index: Any) -> NDArray[Any]:
        """The numbers or the mask of an index."""
        try:
            tokens = to_array(index)
        except ValueError as error:
            raise InputError(f"{self.name} is indexed by numbers, slices and masks: {error}") from error
        if tokens.dtype.kind not in "iub" and tokens.size:
            raise InputError(f"{self.name} is indexed by numbers, slices and masks, not by {index!r:.60}")
        return tokens

    def _chosen(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """The entries of some tokens, in their order."""
        if tokens.dtype == bool:
            if tokens.shape != (len(self),):
                raise InputError(f"a mask {list(tokens.shape)} on {self.name}, which has {len(self)} tokens")
            tokens = np.flatnonzero(tokens)
        if tokens.size and not (-len(self) <= tokens.min() and tokens.max() < len(self)):
            raise NoTokenError(f"{self.name} has the tokens 0 to {len(self) - 1}")
        flat = np.where(tokens < 0, tokens + len(self), tokens).astype(np.int64).reshape(-1)
        values = np.empty((len(flat), *self.shape[1:]), self.dtype)
        where = np.searchsorted(self._ends, flat, side="right")
        for shard in np.unique(where):
            own = np.flatnonzero(where == shard)
            begin = self._ends[shard] - len(self._parts[shard])
            values[own] = self._parts[shard][flat[own] - begin]
        return values.reshape(*tokens.shape, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = np.concatenate(self._parts)
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        return f"TokenArray({self.name}, {self.dtype} {list(self.shape)}, {len(self._parts)} shards)"
