"""`ShardWriter`: a folder of shards, from its first manifest to its last."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from mionnx.analysis.harvest.columns import TOKEN_COLUMNS, Column, columns_of
from mionnx.analysis.harvest.formats import finish_saelens
from mionnx.analysis.harvest.manifest import Manifest, finished, read_manifest, refuse_other
from mionnx.analysis.harvest.rows import HarvestRows
from mionnx.analysis.harvest.settings import Settings, cast_spec
from mionnx.analysis.harvest.shard_maker import PARTIAL_SHARD, Groups, Made, Make, ShardMaker, forward
from mionnx.bind.bound_spec import BoundSpec
from mionnx.errors import InputError, SpecFileError
from mionnx.machine.arrays import read_dtype
from mionnx.machine.progress import Progress
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec


class DamagedShardWarning(UserWarning):
    """A shard that did not have its checksum any more, and is made again."""


@dataclass(frozen=True)
class ShardWriter:
    """A harvest that is going on.

    Attributes:
        spec: of the passes.
        identity: everything that determines the activations, as the manifest has it.
    """

    model: Runner
    spec: HookSpec
    bound: BoundSpec
    rows: HarvestRows
    settings: Settings
    identity: dict[str, Any]
    folder: Path

    def run(self, make: Make, progress: Progress) -> None:
        """Write all shards that are not there yet, and the manifest."""
        left = iter(self.rows)
        first = next(left, None)
        if first is None:
            raise InputError("nothing to harvest: there are no texts")
        cast = cast_spec(self.spec, self.bound, self.settings.dtype if self._casts else None)
        dtype = None if self.settings.dtype is None else read_dtype(self.settings.dtype)
        columns = columns_of(self.bound.captures, forward(self.model, [first], cast), dtype)
        manifest = self._begin(columns)
        a_token = sum(column.bytes_a_token for column in columns)
        a_token += sum(kind.itemsize for kind in TOKEN_COLUMNS.values())
        rows = self.rows if self.rows.texts.again else chain([first], left)
        groups = Groups(rows, a_token, self.settings.shard_bytes)
        self._finish(manifest, self._all(make, self._maker(cast, columns, manifest), groups, progress))

    @property
    def _casts(self) -> bool:
        """Whether the graph casts; other engines have dtypes that they do not give, and numpy casts."""
        return self.model.variants.engine.casts

    def _maker(self, cast: HookSpec, columns: Sequence[Column], manifest: Manifest) -> ShardMaker:
        exact, shards = cast_spec(self.spec, self.bound, None), dict(enumerate(manifest.shards))
        how = self.settings.format, self.settings.batch_size, self.settings.context
        return ShardMaker(self.folder, self.model, cast, exact, tuple(columns), *how, shards)

    def _all(self, make: Make, maker: ShardMaker, groups: Groups, progress: Progress) -> list[Made]:
        """All shards in their order."""
        shards: dict[int, Made] = {}
        texts = 0
        for one in make(maker, groups):
            if one.damage is not None:
                warnings.warn(f"{one.damage}: it was made again", DamagedShardWarning, stacklevel=2)
            shards[one.number], texts = one, max(texts, one.texts)
            progress("harvest", texts, self.rows.texts.count)
        count = max([-1, *finished(self.folder), *maker.earlier]) + 1
        if count > len(shards):
            raise SpecFileError(f"{self.folder} holds {count} shards, and these texts make {len(shards)}")
        return [shards[number] for number in range(len(shards))]

    def _begin(self, columns: Sequence[Column]) -> Manifest:
        """The manifest of an earlier harvest of the same into the folder, or a new one."""
        self._remove_partial()
        earlier = read_manifest(self.folder)
        if earlier is not None:
            refuse_other(self.folder, earlier.settings, self.identity)
            return earlier
        if others := [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]:
            raise SpecFileError(f"{self.folder} holds other files ({others[0]}): choose an empty or a new folder")
        manifest = Manifest(self.identity, {column.name: (column.dtype.name, column.shape) for column in columns})
        manifest.write(self.folder)
        return manifest

    def _remove_partial(self) -> None:
        """Remove what a killed process or worker was writing."""
        for path in self.folder.glob(PARTIAL_SHARD):
            path.unlink(missing_ok=True)

    def _finish(self, manifest: Manifest, shards: Sequence[Made]) -> None:
        """Write the manifest of all shards."""
        self._remove_partial()
        if self.settings.format == "saelens":
            finish_saelens(self.folder, [capture.node.output for capture in self.bound.captures], len(shards))
        files, dropped = [one.shard for one in shards], sum(one.dropped for one in shards)
        complete = replace(manifest, shards=files, complete=True, texts=shards[-1].texts, dropped_tokens=dropped)
        complete.write(self.folder)
