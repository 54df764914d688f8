"""`Activations`: a folder of harvested activations, as arrays over all its shards, each a `TokenArray`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.formats import open_shard, pieces
from mionnx.analysis.harvest.manifest import HARVEST_MANIFEST, TOKEN_COLUMNS, finished, read_manifest, sha256_of
from mionnx.errors import HookError, InputError, SpecFileError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed

BLOCK = 1024  # neighbours that stay together: a disk reads them in one piece
MIXED = 64  # blocks that are mixed at a time
Batch = dict[str, Any]


class NoTokenError(InputError, IndexError):
    """A token that an array does not have."""


class TokenArray:
    """An array [tokens, ...] whose first axis runs over shards.

    It is read where it is indexed, as a numpy array is: by numbers, slices, lists and masks along the first axis, and
    by anything along the others; `np.asarray` reads all of it.
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
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        for part in self._parts:
            yield from map(np.asarray, part)

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        # An index that does not begin with the tokens, as `[..., 0]`, needs all of them.
        if not entries or entries[0] is None or entries[0] is Ellipsis:
            return self.__array__()[index]
        first, others = entries[0], entries[1:]
        # True is an integer to Python, and a mask to numpy.
        if isinstance(first, int | np.integer) and not isinstance(first, bool):
            return self._chosen(np.array([first]))[0][others]
        values = self._slice(first) if isinstance(first, slice) else self._chosen(self._tokens(first))
        return values[(slice(None), *others)]

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
        try:
            tokens = to_array(index)
        except ValueError as error:
            raise InputError(f"{self.name} is indexed by numbers, slices and masks: {error}") from error
        if tokens.dtype.kind not in "iub" and tokens.size:
            raise InputError(f"{self.name} is indexed by numbers, slices and masks, not by {index!r:.60}")
        return tokens

    def _chosen(self, tokens: NDArray[Any]) -> NDArray[Any]:
        if tokens.dtype == bool:
            if tokens.shape != (len(self),):
                raise InputError(f"a mask {list(tokens.shape)} on {self.name}, which has {len(self)} tokens")
            tokens = np.flatnonzero(tokens)
        if tokens.size and not (-len(self) <= tokens.min() and tokens.max() < len(self)):
            raise NoTokenError(f"{self.name} has the tokens 0 to {len(self) - 1}")
        # As in numpy the numbers may have several axes, which the result has in their place.
        flat = np.where(tokens < 0, tokens + len(self), tokens).astype(np.int64).reshape(-1)
        values = np.empty((len(flat), *self.shape[1:]), self.dtype)
        where = np.searchsorted(self._ends, flat, side="right")
        for shard in np.unique(where):  # each is read in one piece
            own = np.flatnonzero(where == shard)
            begin = self._ends[shard] - len(self._parts[shard])
            values[own] = self._parts[shard][flat[own] - begin]
        return values.reshape(*tokens.shape, *self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        values = np.concatenate(self._parts)
        return values if dtype is None else values.astype(dtype)

    def __repr__(self) -> str:
        return f"TokenArray({self.name}, {self.dtype} {list(self.shape)}, {len(self._parts)} shards)"


@typed(InputError, leave=["hook"])
class Activations(Brief, Mapping[str, TokenArray]):
    """Harvested activations by hook point, [tokens, ...] each, in the order of the texts.

    They are mapped from the disk, and read where they are indexed.

    Attributes:
        settings: those of the harvest.

    Example:
        activations = Activations("activations")
        activations["blocks.2.hook_resid_post"][:1000].mean(axis=0)
        for batch in activations.batches(4096):
            batch["blocks.2.hook_resid_post"].shape, batch["token_ids"].shape
    """

    def __init__(self, folder: str | Path) -> None:
        """Open a folder; its arrays are read when they are used.

        Raises:
            SpecFileError: there is no finished harvest.
        """
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        if manifest is None:
            raise SpecFileError(f"{self.folder} holds no harvested activations: it has no {HARVEST_MANIFEST}")
        if not manifest.complete:
            shards = count(len(finished(self.folder)), "shard")
            raise SpecFileError(
                f"{self.folder} was not finished: {shards}; harvest again with the same settings, and it goes on"
            )
        self._manifest = manifest
        self.settings = manifest.settings

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self._manifest.tokens

    @property
    def texts(self) -> int:
        """Number of texts."""
        return self._manifest.texts

    @property
    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of one token's value, by hook point."""
        return dict(self._manifest.columns)

    @property
    def token_ids(self) -> TokenArray:
        """Id of each token, int32 [tokens]."""
        return self._array("token_ids")

    @property
    def text_index(self) -> TokenArray:
        """Number of the text that each token is of, int64 [tokens]."""
        return self._array("text_index")

    @property
    def positions(self) -> TokenArray:
        """Position of each token in its text, int32 [tokens]; -1 for a separator."""
        return self._array("positions")

    def __getitem__(self, hook: str | HookPoint) -> TokenArray:
        name = str(hook) if isinstance(hook, str | HookPoint) else spelled(hook)
        if name not in self._manifest.columns:
            raise HookError(f"{name!r} was not harvested{nearest(name, self) or '; ' + ', '.join(self)}")
        return self._array(name)

    def __contains__(self, hook: object) -> bool:
        return str(hook) in self._manifest.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._manifest.columns)

    def __len__(self) -> int:
        return len(self._manifest.columns)

    @cached_property
    def _shards(self) -> list[dict[str, NDArray[Any]]]:
        if (kind := self.settings["format"]) != "safetensors":
            reader = {"parquet": "pyarrow", "saelens": "datasets.load_from_disk"}.get(kind, "its own library")
            raise SpecFileError(f"{self.folder} holds {kind} files: read them with {reader}")
        return [open_shard(self.folder / name) for shard in self._manifest.shards for name in shard.files]

    def _array(self, name: str) -> TokenArray:
        try:
            return TokenArray(name, [shard[name] for shard in self._shards])
        except KeyError:
            raise SpecFileError(f"a shard of {self.folder} is damaged: it has no {name}") from None

    def batches(
        self,
        size: int,
        shuffle: bool = True,
        seed: int | None = None,
        *,
        points: list[str] | None = None,
        convert: Callable[[NDArray[Any]], Any] | None = None,
    ) -> Iterator[Batch]:
        """Go through all tokens once, in batches across shards.

        Args:
            size: tokens of a batch; the last one may have fewer.
            shuffle: whether the order is random. Blocks of 1,024 neighbours are drawn in a random order over all shards
                and mixed 64 at a time, so that the disk is read in long pieces.
            seed: of that order; 0 if left out.
            points: the hook points that are read; all if left out.
            convert: applied to each array, `torch.from_numpy` for one.

        Returns:
            {hook point: [size, ...]}, with "token_ids", "text_index" and "positions" besides.

        Raises:
            HookError: a hook point that was not harvested.

        Example:
            for batch in activations.batches(4096, seed=1, convert=torch.from_numpy):
                ...
        """
        at_least("size", size, 1)
        if seed is not None and not shuffle:
            raise InputError(f"seed={seed} is of a random order, and shuffle=False reads the tokens as they come")
        arrays = {name: self[name] for name in (self if points is None else points)}
        arrays |= {name: self._array(name) for name in TOKEN_COLUMNS}
        order: Iterator[Any] = shuffled(self.tokens, size, seed or 0) if shuffle else pieces(self.tokens, size)
        change = convert or (lambda values: values)
        return ({name: change(array[chosen]) for name, array in arrays.items()} for chosen in order)

    def check(self) -> None:
        """Compare every file with its checksum.

        Raises:
            SpecFileError: naming the first that is damaged; harvest again with the same settings to mend it.
        """
        for shard in self._manifest.shards:
            for name, expected in shard.files.items():
                if sha256_of(self.folder / name) != expected:
                    raise SpecFileError(f"{self.folder / name} is damaged: it does not have its checksum")

    def __reduce__(self) -> tuple[Any, ...]:
        return Activations, (self.folder,)

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self), "hook point"), f"{self.tokens:,} tokens", f"{self.texts:,} texts")

    def _lines(self) -> Iterator[str]:
        for name, (dtype, shape) in self._manifest.columns.items():
            yield f"{name}: {dtype} {[self.tokens, *shape]}"


def shuffled(count: int, size: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Pieces of `size` tokens in a random order, each of `count` once; the last may be shorter."""
    random = np.random.default_rng(seed)
    order = random.permutation(-(-count // BLOCK))
    waiting = np.empty(0, np.int64)
    for begin in range(0, len(order), MIXED):
        chosen = order[begin : begin + MIXED, None] * BLOCK + np.arange(BLOCK)
        mixed = random.permutation(chosen[chosen < count])
        waiting = np.concatenate([waiting, mixed])
        full = len(waiting) // size * size
        yield from waiting[:full].reshape(-1, size)
        waiting = waiting[full:]  # less than a batch goes into the next mix
    if len(waiting):
        yield waiting
