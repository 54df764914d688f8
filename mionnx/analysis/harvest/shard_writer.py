"""`ShardWriter`: runs rows batch by batch, and writes their activations shard by shard."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.analysis.harvest.columns import TOKEN_COLUMNS, Column, columns_of, token_columns
from mionnx.analysis.harvest.formats import FORMATS, finish_saelens
from mionnx.analysis.harvest.manifest import Manifest, Shard, note, read_manifest, refuse_other
from mionnx.analysis.harvest.rows import Row, Rows, digest
from mionnx.analysis.harvest.shard_file import new_shard, open_shard, sha256_of
from mionnx.bind.bound_spec import BoundSpec
from mionnx.errors import InputError, MIError, SpecFileError
from mionnx.inputs.lacking import ATTENDS_TO_PADDING
from mionnx.machine.progress import Progress
from mionnx.machine.streamed_file import StreamedFile
from mionnx.run.batching import batches_of
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

PARTIAL = ".shard.partial"


class DamagedShardWarning(UserWarning):
    """A shard that did not have its checksum any more, and is made again."""


@dataclass(frozen=True)
class ShardWriter:
    """A harvest that is going on.

    Attributes:
        model: the model.
        spec: of the passes.
        bound: the same, bound.
        rows: the dataset.
        dtype: of fractions, as they are written; their own if None.
        settings: as the manifest has them.
        folder: where the shards go.
        progress: shows how far it is.
    """

    model: Runner
    spec: HookSpec
    bound: BoundSpec
    rows: Rows
    dtype: "np.dtype[Any] | None"
    settings: dict[str, Any]
    folder: Path
    progress: Progress

    def run(self) -> None:
        """Write all shards that are not there yet, and the manifest."""
        left = iter(self.rows)
        first = next(left, None)
        if first is None:
            raise InputError("nothing to harvest: there are no texts")
        columns = columns_of([one.node for one in self.bound.captures], self._forward([first]), self.dtype)
        manifest = self._begin(columns)
        shards: list[Shard] = []
        texts = dropped = 0
        for number, rows in enumerate(self._groups(chain([first], left), columns)):
            texts = int(rows[-1].text[-1]) + 1
            whole = [row for row in rows if self.settings["format"] != "saelens" or len(row) == self.rows.context]
            dropped += sum(map(len, rows)) - sum(map(len, whole))
            shards.append(self._shard(number, whole, columns, manifest))
            self.progress("harvest", texts, self.rows.texts.count)
        if len(manifest.shards) > len(shards):
            raise SpecFileError(
                f"{self.folder} holds {len(manifest.shards)} shards, and these texts make {len(shards)}"
            )
        if self.settings["format"] == "saelens":
            finish_saelens(self.folder, [column.name for column in columns], len(shards))
        replace(manifest, shards=shards, complete=True, texts=texts, dropped_tokens=dropped).write(self.folder)

    def _begin(self, columns: Sequence[Column]) -> Manifest:
        """The manifest of an earlier harvest of the same into the folder, or a new one."""
        (self.folder / PARTIAL).unlink(missing_ok=True)
        found = read_manifest(self.folder)
        if found is not None:
            refuse_other(self.folder, found.settings, self.settings)
            return found
        if others := [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]:
            raise SpecFileError(f"{self.folder} holds other files ({others[0]}): choose an empty or a new folder")
        made = Manifest(self.settings, {column.name: (column.dtype.name, column.shape) for column in columns})
        made.write(self.folder)
        return made

    def _groups(self, rows: Iterator[Row], columns: Sequence[Column]) -> Iterator[list[Row]]:
        """The rows of each shard."""
        a_token = sum(column.bytes_a_token for column in columns)
        a_token += sum(dtype.itemsize for dtype in TOKEN_COLUMNS.values())
        group: list[Row] = []
        size = 0
        for row in rows:
            group.append(row)
            size += row.kept * a_token
            if size >= self.settings["shard_bytes"]:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _shard(self, number: int, rows: list[Row], columns: Sequence[Column], manifest: Manifest) -> Shard:
        """A shard: as it is there, or made now."""
        known, tokens = manifest.shards[number] if number < len(manifest.shards) else None, digest(rows)
        if known is not None and known.digest != tokens:
            raise SpecFileError(f"{self.folder}: shard {number} was made of other texts: choose another folder")
        if known is not None:
            damage = self._damage(known)
            if damage is None:
                return known
            warnings.warn(f"{damage}: it is made again", DamagedShardWarning, stacklevel=2)
        made = self._compute(rows, columns)
        names = FORMATS[self.settings["format"]](self.folder, number, made, open_shard(made), self.rows.context or 0)
        files = {name: sha256_of(self.folder / name) for name in names}
        shard = Shard(files, sum(row.kept for row in rows), len(rows), tokens)
        note(self.folder, number, shard)
        return shard

    def _damage(self, shard: Shard) -> str | None:
        """The damage of a shard that was written before; None if it is whole."""
        for name, expected in shard.files.items():
            try:
                if sha256_of(self.folder / name) != expected:
                    return f"{self.folder / name} does not have its checksum"
            except SpecFileError as error:
                return str(error)
        return None

    def _compute(self, rows: Sequence[Row], columns: Sequence[Column]) -> Path:
        """Run rows, and write their activations in the order of the texts."""
        path, count = self.folder / PARTIAL, sum(row.kept for row in rows)
        kinds = {column.name: (column.dtype, (count, *column.shape)) for column in columns}
        kinds |= {name: (dtype, (count,)) for name, dtype in TOKEN_COLUMNS.items()}
        places = np.cumsum([0, *(row.kept for row in rows)]).tolist()
        padded = ATTENDS_TO_PADDING not in self.model.hooked.metadata.exporter
        with new_shard(path, kinds) as file:
            for batch in batches_of([len(row) for row in rows], self.settings["batch_size"], padded):
                self._put(file, [rows[n] for n in batch], [places[n] for n in batch], columns)
        return path

    def _put(self, file: StreamedFile, rows: Sequence[Row], places: Sequence[int], columns: Sequence[Column]) -> None:
        """Run one batch, and write what is wanted of it."""
        cache = self._forward(rows)
        for column in columns:
            for place, values in zip(places, column.rows(cache[column.name], rows), strict=True):
                file.put(column.name, place, values)
        for place, row in zip(places, rows, strict=True):
            for name, values in token_columns(row).items():
                file.put(name, place, values)

    def _forward(self, rows: Sequence[Row]) -> HookCache:
        try:
            return self.model.forward([row.ids for row in rows], self.spec, logits=False)
        except MIError as error:
            raise type(error)(f"texts {rows[0].text[0]} to {rows[-1].text[-1]}: {error}") from error
