"""`ShardMaker`: runs the rows of a shard batch by batch, and writes their activations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.columns import TOKEN_COLUMNS, Column, token_columns
from mionnx.analysis.harvest.formats import WRITERS
from mionnx.analysis.harvest.manifest import Shard, note, noted
from mionnx.analysis.harvest.rows import HarvestRow, digest
from mionnx.analysis.harvest.shard_file import new_shard, open_shard, sha256_of
from mionnx.errors import MIError, SpecFileError
from mionnx.inputs.lacking import ATTENDS_TO_PADDING
from mionnx.machine.streamed_file import StreamedFile
from mionnx.run.batching import batches_of
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

PARTIAL_SHARD = ".shard-*.partial"  # names of files that are being written
Task = tuple[int, list[HarvestRow]]  # number of a shard, and its rows


@dataclass(frozen=True)
class Groups:
    """The rows of each shard: a shard ends with the row that makes it large enough.

    Attributes:
        shard_bytes: size of a shard, about.
    """

    rows: Iterable[HarvestRow]
    bytes_a_token: int
    shard_bytes: int

    def __iter__(self) -> Iterator[Task]:
        group: list[HarvestRow] = []
        number = size = 0
        for row in self.rows:
            group.append(row)
            size += row.kept * self.bytes_a_token
            if size >= self.shard_bytes:
                yield number, group
                group, size, number = [], 0, number + 1
        if group:
            yield number, group


@dataclass(frozen=True)
class Made:
    """A shard that is there.

    Attributes:
        texts: number of texts up to its end.
        dropped: tokens of rows that the format has no place for.
        damage: of the file that was there before, if it had any.
    """

    number: int
    shard: Shard
    texts: int
    dropped: int
    damage: str | None = None


@dataclass(frozen=True)
class ShardMaker:
    """Makes shards, each from its rows alone: any process with the model can make any of them.

    Attributes:
        cast: of the passes; the graph casts what leaves it.
        exact: the same without casts.
        context: tokens of a window; None where a row is a text.
        earlier: shards of a complete harvest, by number.
    """

    folder: Path
    model: Runner
    cast: HookSpec
    exact: HookSpec
    columns: tuple[Column, ...]
    format: str
    batch_size: int | str
    context: int | None
    earlier: Mapping[int, Shard] = field(default_factory=dict)

    def shard(self, number: int, rows: Sequence[HarvestRow]) -> Made:
        """A shard: as it is there, or made now.

        Raises:
            SpecFileError: it was made of other texts, or cannot be written.
            InputError: a number that the dtype cannot hold.
        """
        windows = [row for row in rows if self.format != "saelens" or len(row) == self.context]
        texts, dropped = int(rows[-1].text[-1]) + 1, sum(map(len, rows)) - sum(map(len, windows))
        earlier, tokens, damage = noted(self.folder, number) or self.earlier.get(number), digest(windows), None
        if earlier is not None:
            if earlier.digest != tokens:
                raise SpecFileError(f"{self.folder}: shard {number} was made of other texts: choose another folder")
            damage = self._damage(earlier)
            if damage is None:
                return Made(number, earlier, texts, dropped)
        path = self._write(number, windows)
        names = WRITERS[self.format](self.folder, number, path, open_shard(path), self.context or 0)
        files = {name: sha256_of(self.folder / name) for name in names}
        shard = Shard(files, sum(row.kept for row in windows), len(windows), tokens)
        note(self.folder, number, shard)
        return Made(number, shard, texts, dropped, damage)

    def _damage(self, shard: Shard) -> str | None:
        """The damage of a shard that was written before; None if it is whole."""
        for name, expected in shard.files.items():
            try:
                if sha256_of(self.folder / name) != expected:
                    return f"{self.folder / name} does not have its checksum"
            except SpecFileError as error:
                return str(error)
        return None

    def _write(self, number: int, rows: Sequence[HarvestRow]) -> Path:
        """Run rows, and write their activations in the order of the texts."""
        path = self.folder / PARTIAL_SHARD.replace("*", f"{number:05}.{uuid4().hex}")
        count, places = sum(row.kept for row in rows), np.cumsum([0, *(row.kept for row in rows)]).tolist()
        kinds = {column.name: (column.dtype, (count, *column.shape)) for column in self.columns}
        kinds |= {name: (dtype, (count,)) for name, dtype in TOKEN_COLUMNS.items()}
        padded = ATTENDS_TO_PADDING not in self.model.hooked.metadata.exporter
        with new_shard(path, kinds) as file:
            for batch in batches_of([len(row) for row in rows], self.batch_size, padded):
                self._put(file, [rows[n] for n in batch], [places[n] for n in batch])
        return path

    def _put(self, file: StreamedFile, rows: Sequence[HarvestRow], places: Sequence[int]) -> None:
        """Run one batch, and write what is wanted of it."""
        for name, by_row in self._values(rows).items():
            for place, values in zip(places, by_row, strict=True):
                file.put(name, place, values)
        for place, row in zip(places, rows, strict=True):
            for name, values in token_columns(row).items():
                file.put(name, place, values)

    def _values(self, rows: Sequence[HarvestRow]) -> dict[str, list[NDArray[Any]]]:
        """The wanted values of one batch, by column, an array a row.

        Where the graph's casts give infinite or no numbers, the exact values say whether a number was too large.
        """
        values = _cut(self.columns, forward(self.model, rows, self.cast), rows)
        if any(column.lost(values[column.name]) for column in self.columns):
            return _cut(self.columns, forward(self.model, rows, self.exact), rows)
        return values


def _cut(columns: Sequence[Column], cache: HookCache, rows: Sequence[HarvestRow]) -> dict[str, list[NDArray[Any]]]:
    return {column.name: column.rows(cache[column.name], rows) for column in columns}


def forward(model: Runner, rows: Sequence[HarvestRow], spec: HookSpec) -> HookCache:
    """Run rows up to the last capture."""
    try:
        return model.forward([row.ids for row in rows], spec, logits=False)
    except MIError as error:
        raise type(error)(f"texts {rows[0].text[0]} to {rows[-1].text[-1]}: {error}") from error


Make = Callable[[ShardMaker, Groups], Iterator[Made]]  # makes all shards, in any order


def in_turn(maker: ShardMaker, groups: Groups) -> Iterator[Made]:
    """Make shards one after the other."""
    for number, rows in groups:
        yield maker.shard(number, rows)
