"""`ShardMaker`: runs the rows of a shard batch by batch, and writes their activations, a `Column` a hook point."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.formats import WRITERS, open_shard
from mionnx.analysis.harvest.manifest import TOKEN_COLUMNS, Shard, note, noted, sha256_of
from mionnx.analysis.harvest.rows import HarvestRow, digest
from mionnx.bind.plan import BoundCapture
from mionnx.errors import HookError, InputError, MIError, SpecFileError
from mionnx.graph.axes import SEQUENCE_AXES, has_sequence, sequence_axis
from mionnx.graph.metadata import ATTENDS_TO_PADDING
from mionnx.machine.streamed_file import StreamedFile, streamed
from mionnx.run.batching import batches_of
from mionnx.run.hook_cache import HookCache
from mionnx.run.nan_logits import INFINITY
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

PARTIAL_SHARD = ".shard-*.partial"  # names of files that are being written
Task = tuple[int, list[HarvestRow]]  # number of a shard, and its rows


@dataclass(frozen=True)
class Column:
    """One hook point's values, an entry a token."""

    name: str
    axis: int  # the axis of the captured array with one entry a token
    shape: tuple[int, ...]  # one token's value
    # dtype, own: dtype that is written; dtype of the model's value.
    dtype: "np.dtype[Any]"
    own: "np.dtype[Any]"
    right: bool = False  # whether rows are padded on the right

    @property
    def bytes_a_token(self) -> int:
        """Size of one token's value."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def rows(self, value: NDArray[Any], rows: Sequence[HarvestRow]) -> list[NDArray[Any]]:
        """Cut the chosen tokens of each row out of a captured array, padded on one side; or a text's one value."""
        if not self.axis:
            return [self._cast(value[n][None]) for n in range(len(rows))]
        by_token = np.moveaxis(value, self.axis, 1)
        begins = [0 if self.right else by_token.shape[1] - len(row) for row in rows]
        each = enumerate(zip(begins, rows, strict=True))
        cut = [by_token[n, begin : begin + len(row)][row.keep] for n, (begin, row) in each]
        return [self._cast(one) for one in cut]

    def lost(self, values: Sequence[NDArray[Any]]) -> bool:
        """Whether values, cast to fewer bits by the graph, hold infinity or NaN."""
        # A cast to fewer bits makes numbers above its range infinite, with all bits of the exponent set.
        if self.dtype.itemsize >= self.own.itemsize or self.dtype not in INFINITY:
            return False
        infinity = INFINITY[self.dtype]
        return any(bool(((one.view(np.uint16) & infinity) == infinity).any()) for one in values)

    def _cast(self, values: NDArray[Any]) -> NDArray[Any]:
        if values.dtype == self.dtype:
            return values
        with np.errstate(over="ignore"):  # refused below, with the number
            cast = values.astype(self.dtype)
        # Infinity or NaN of the model itself is written as it is.
        if self.dtype.itemsize < values.dtype.itemsize and not np.isfinite(cast).all() and np.isfinite(values).all():
            raise InputError(f"{self.name} has {np.abs(values).max():.4g}, too large for {self.dtype}: use bfloat16")
        return cast


def columns_of(
    captures: Sequence[BoundCapture], cache: HookCache, dtype: "np.dtype[Any] | None", right: bool, pooled: bool
) -> list[Column]:
    """The columns of captures, from one pass.

    Args:
        dtype: in which fractions are written; their own if None.
        right: whether rows are padded on the right.
        pooled: whether one value a text is written.
    """
    columns = []
    for node, own in ((capture.node, capture.dtype) for capture in captures):
        by_text = not {*SEQUENCE_AXES, "seq_k", "seq_src"} & {*node.axes}
        if by_text and not pooled and right:
            raise HookError(f"{node.output} {list(node.axes)} has one value a text: harvest(..., positions='pooled')")
        if has_sequence(node.axes) and pooled:
            raise HookError(f"{node.output} {list(node.axes)} has a value a token: harvest(..., positions='first')")
        if (not has_sequence(node.axes) and not (by_text and pooled)) or {"seq_k", "seq_src"} & {*node.axes}:
            raise HookError(
                f"{node.output} {list(node.axes)} has no value of one size for each token, and cannot be harvested"
            )
        axis, value = 0 if by_text else sequence_axis(node.axes), cache[node.output]
        shape = tuple(size for at, size in enumerate(value.shape) if at not in (0, axis))
        # Features and experts are numbered far below 2^31; int32 halves the file.
        written = np.dtype(np.int32) if own == np.int64 else own
        columns.append(
            Column(node.output, axis, shape, written if own.kind in "iub" or dtype is None else dtype, own, right)
        )
    return columns


@dataclass(frozen=True)
class Groups:
    """The rows of each shard: a shard ends with the row that makes it large enough."""

    rows: Iterable[HarvestRow]
    bytes_a_token: int
    shard_bytes: int

    def __iter__(self) -> Iterator[Task]:
        group: list[HarvestRow] = []
        number = size = 0
        for row in self.rows:
            group.append(row)
            size += row.count * self.bytes_a_token
            if size >= self.shard_bytes:
                yield number, group
                group, size, number = [], 0, number + 1
        if group:
            yield number, group


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is there."""

    number: int
    shard: Shard
    texts: int  # number of texts up to its end
    dropped: int  # number of tokens that the format has no place for
    damage: str | None = None  # damage of the file that was there before


@dataclass(frozen=True)
class ShardMaker:
    """Makes shards, each from its rows alone: any process with the model can make any of them."""

    folder: Path
    model: Runner
    # cast, exact: specs of the passes whose graph casts the values that leave it, and does not.
    cast: HookSpec
    exact: HookSpec
    columns: tuple[Column, ...]
    format: str
    batch_size: int | str
    context: int | None  # tokens of a window; None where a row is a text
    earlier: Mapping[int, Shard] = field(default_factory=dict)  # shards of a complete harvest, by number

    def shard(self, number: int, rows: Sequence[HarvestRow]) -> FinishedShard:
        """A shard: as it is there, or made now."""
        # A dataset of SAELens has rows of one length, so the last, shorter window has no place in it.
        windows = [row for row in rows if self.format != "saelens" or len(row) == self.context]
        texts, dropped = int(rows[-1].text[-1]) + 1, sum(map(len, rows)) - sum(map(len, windows))
        earlier, tokens, damage = noted(self.folder, number) or self.earlier.get(number), digest(windows), None
        if earlier is not None:
            # Texts are compared before checksums: a folder of other texts is refused, a damaged shard made again.
            if earlier.digest != tokens:
                raise SpecFileError(f"{self.folder}: shard {number} was made of other texts: choose another folder")
            damage = self._damage(earlier)
            if damage is None:
                return FinishedShard(number, earlier, texts, dropped)
        path = self._write(number, windows)
        names = WRITERS[self.format](self.folder, number, path, open_shard(path), self.context or 0)
        files = {name: sha256_of(self.folder / name) for name in names}
        shard = Shard(files, sum(row.count for row in windows), len(windows), tokens)
        note(self.folder, number, shard)
        return FinishedShard(number, shard, texts, dropped, damage)

    def _damage(self, shard: Shard) -> str | None:
        """The damage of a shard that was written before."""
        for name, expected in shard.files.items():
            try:
                if sha256_of(self.folder / name) != expected:
                    return f"{self.folder / name} does not have its checksum"
            except SpecFileError as error:
                return str(error)
        return None

    def _write(self, number: int, rows: Sequence[HarvestRow]) -> Path:
        """Run rows, and write their activations in the order of the texts."""
        # a name of its own: after a lost worker two may write the same shard
        path = self.folder / PARTIAL_SHARD.replace("*", f"{number:05}.{uuid4().hex}")
        count, places = sum(row.count for row in rows), np.cumsum([0, *(row.count for row in rows)]).tolist()
        kinds = {column.name: (column.dtype, (count, *column.shape)) for column in self.columns}
        kinds |= {name: (dtype, (count,)) for name, dtype in TOKEN_COLUMNS.items()}
        # a model that attends to padding runs rows of one length together only
        padded = ATTENDS_TO_PADDING not in self.model.hooked.metadata.exporter
        with streamed(path, kinds, SpecFileError) as file:
            for batch in batches_of([len(row) for row in rows], self.batch_size, padded):
                self._put(file, [rows[n] for n in batch], [places[n] for n in batch])
        return path

    def _put(self, file: StreamedFile, rows: Sequence[HarvestRow], places: Sequence[int]) -> None:
        """Run one batch, and write the kept tokens of each row."""
        values = self._cut(self.cast, rows)
        if any(column.lost(values[column.name]) for column in self.columns):
            values = self._cut(self.exact, rows)  # where casts give no numbers: was one too large, or none before?
        for name, by_row in values.items():
            for place, one in zip(places, by_row, strict=True):
                file.put(name, place, one)
        for place, row in zip(places, rows, strict=True):
            for (name, dtype), part in zip(TOKEN_COLUMNS.items(), (row.ids, row.text, row.position), strict=True):
                file.put(name, place, part[row.keep].astype(dtype))

    def _cut(self, spec: HookSpec, rows: Sequence[HarvestRow]) -> dict[str, list[NDArray[Any]]]:
        """The values of one batch by column, an array a row."""
        cache = forward(self.model, rows, spec)
        return {column.name: column.rows(cache[column.name], rows) for column in self.columns}


def forward(model: Runner, rows: Sequence[HarvestRow], spec: HookSpec) -> HookCache:
    """Run rows up to the last capture."""
    try:
        return model.forward([row.ids for row in rows], spec, logits=False)
    except MIError as error:
        raise type(error)(f"texts {rows[0].text[0]} to {rows[-1].text[-1]}: {error}") from error


Make = Callable[[ShardMaker, Groups], Iterator[FinishedShard]]  # makes all shards, in any order


def in_turn(maker: ShardMaker, groups: Groups) -> Iterator[FinishedShard]:
    """Make shards one after the other."""
    for number, rows in groups:
        yield maker.shard(number, rows)
