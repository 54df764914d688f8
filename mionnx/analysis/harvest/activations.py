"""`Activations`: a folder of harvested activations, as arrays over all its shards."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.columns import TOKEN_COLUMNS
from mionnx.analysis.harvest.manifest import HARVEST_MANIFEST, finished, read_manifest
from mionnx.analysis.harvest.shard_file import open_shard, sha256_of
from mionnx.analysis.harvest.token_array import TokenArray
from mionnx.errors import HookError, InputError, SpecFileError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed

BLOCK = 1024  # neighbours that stay together: a disk reads them in one piece
MIXED = 64  # blocks that are mixed at a time
Batch = dict[str, Any]


@typed(InputError, leave=["hook"])
class Activations(Brief, Mapping[str, TokenArray]):
    """Harvested activations by hook point, [tokens, ...] each, in the order of the texts.

    They are mapped from the disk, and read where they are indexed.

    Attributes:
        folder: where the shards lie.
        settings: how they were made.

    Example:
        made = Activations("activations")
        made["blocks.2.hook_resid_post"][:1000].mean(axis=0)
        for batch in made.batches(4096):
            batch["blocks.2.hook_resid_post"].shape, batch["token_ids"].shape
    """

    def __init__(self, folder: str | Path) -> None:
        """Open a folder; its arrays are read when they are used.

        Raises:
            SpecFileError: there is no harvest, it is damaged, or it is not finished.
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
            for batch in made.batches(4096, seed=1, convert=torch.from_numpy):
                ...
        """
        at_least("size", size, 1)
        if seed is not None and not shuffle:
            raise InputError(f"seed={seed} is of a random order, and shuffle=False reads the tokens as they come")
        arrays = {name: self[name] for name in (self if points is None else points)}
        arrays |= {name: self._array(name) for name in TOKEN_COLUMNS}
        order = shuffled(self.tokens, size, seed or 0) if shuffle else blocks(self.tokens, size)
        return (_read(arrays, chosen, convert) for chosen in order)

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


def _read(arrays: Mapping[str, TokenArray], chosen: Any, convert: Callable[[NDArray[Any]], Any] | None) -> Batch:
    read = {name: array[chosen] for name, array in arrays.items()}
    return read if convert is None else {name: convert(array) for name, array in read.items()}


def blocks(count: int, size: int) -> Iterator[slice]:
    """Pieces of `size` tokens, one after the other."""
    yield from (slice(at, min(at + size, count)) for at in range(0, count, size))


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
        waiting = waiting[full:]
    if len(waiting):
        yield waiting
