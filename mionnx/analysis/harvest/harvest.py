"""`harvest`: the activations of a dataset, written to disk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mionnx.analysis.features.sae import SAE
from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.harvest.formats import finish_saelens
from mionnx.analysis.harvest.manifest import TOKEN_COLUMNS, Manifest, finished, read_manifest, refuse_other
from mionnx.analysis.harvest.rows import POOLED, HarvestRows, Positions, separator_of
from mionnx.analysis.harvest.settings import Settings, cast_spec, exact_spec
from mionnx.analysis.harvest.shard_maker import (
    PARTIAL_SHARD,
    Column,
    FinishedShard,
    Groups,
    Make,
    ShardMaker,
    columns_of,
    forward,
    in_turn,
)
from mionnx.analysis.harvest.texts import Source, Texts
from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.spec_rows import choosing_rows
from mionnx.errors import InputError, InterventionError, SpecFileError
from mionnx.machine.arrays import read_dtype
from mionnx.machine.files import make_folder
from mionnx.machine.progress import Progress, shown
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import Outputs
from mionnx.run.batching import AUTO
from mionnx.run.runner import Runner
from mionnx.spec.hook_choice import Hooks
from mionnx.spec.hook_spec import HookSpec

HARVEST_LOCK = ".harvest.lock"
HOOKS_ONLY = Outputs(logits=False, carried=False)


@typed(leave=["texts", "points", "positions"])
def harvest(
    model: Runner,
    texts: Source,
    points: Hooks | None,
    folder: str | Path,
    *,
    hooks: HookSpec | None = None,
    context: int | None = None,
    packed: bool = False,
    separator: int | str | None = None,
    positions: Positions | None = None,
    dtype: str | None = None,
    format: str = "safetensors",
    sae: SAE | None = None,
    k: int | None = None,
    batch_size: int | str = AUTO,
    shard_bytes: int = 2**28,
    column: str | None = None,
    progress: bool | None = None,
) -> Activations:
    """Write the activations of a dataset to disk, in one pass over it.

    The graph ends at the last hook point. A harvest that was interrupted goes on where it was: shards that are whole
    stay, a damaged one is made again. Two harvests of the same give the same bytes.

    Args:
        texts: a file (.txt with a text a line, .jsonl, .parquet), a folder of such or of Hugging Face's `datasets`, or
            an iterable of texts, ids [seq] or `Tokens`, which gives the same at every call.
        points: hook points; None where `sae` or the captures of `hooks` say what is written.
        folder: where the shards go; `Activations(folder)` reads them.
        hooks: interventions in force, and captures, which are written besides.
        context: tokens of a window if `packed`; otherwise the most of a text, the rest of which is left out.
        packed: run windows over all texts, one after the other, and not a text at a time.
        separator: a token (id or text) that is put before each text of packed windows, if it does not begin with it.
        positions: whose activations are written: positions of each row, negative ones from its end; of an encoder
            "first" for the first token of each text, "pooled" for values of which a text has one; a string, whose
            tokens they are; or a function of the row's ids [seq] that gives a mask, bool [seq]. All if left out.
        dtype: "float32", "float16" or "bfloat16"; the model's own if left out.
        format: "safetensors", which `Activations` reads; "parquet", a row a token; or "saelens", a folder that its
            loader of cached activations reads for each hook point.
        sae: write the features of this sparse autoencoder, and not the value that it reads: `hook_top_ids` and
            `hook_top_values` [tokens, top_k].
        k: how many features of each token, the most active first; 32 if left out.
        batch_size: rows of one pass; "auto" chooses by their length.
        shard_bytes: size of a shard, about.
        column: of tables and JSON lines, the one with the texts; "text" if left out.
        progress: see `patch_sweep`.

    Raises:
        HookError: a hook point without one value a token.
        InputError: texts that cannot be read, settings that exclude one another, or positions that no text has.
        InterventionError: an intervention of some rows of a batch.
        SpecFileError: a folder that cannot be written to, that holds another harvest, or in which one is going on.

    Example:
        texts, points = "texts.jsonl", "blocks.*.hook_resid_post"
        activations = model.harvest(texts, points, "activations", context=128, packed=True)
        activations["blocks.2.hook_resid_post"].shape  # (tokens, hidden)
    """
    settings = Settings(context, packed, separator, positions, dtype, format, sae, k, batch_size, shard_bytes, column)
    return open_writer(model, texts, points, hooks, folder, settings).write(in_turn, progress)


def open_writer(
    model: Runner, texts: Source, points: Hooks | None, hooks: HookSpec | None, folder: str | Path, settings: Settings
) -> ShardWriter:
    """Check a harvest; nothing is written yet."""
    model = _settled(model)
    spec = exact_spec(points, hooks, settings)
    bound = model.binder.bind(spec, HOOKS_ONLY)
    if (named := choosing_rows(bound)) is not None:
        raise InterventionError(
            f"{named}: rows are those of one batch, and a harvest runs its texts in batches of its own: give "
            "interventions of all rows, or harvest the texts apart"
        )
    separator = separator_of(model, settings.packed, settings.separator)
    dataset = Texts(texts, settings.column)
    rows = HarvestRows(model, dataset, settings.context, settings.packed, separator, settings.positions)
    changes = HookSpec().extend(spec)
    changes.captures = []  # named below: the hash is of interventions
    identity = {
        "model": {"family": model.hooked.metadata.family, "weights_sha256": model.hooked.weights_sha256},
        "hooks": [capture.node.output for capture in bound.captures],
        "interventions_sha256": changes.sha256,
    }
    return ShardWriter(model, spec, bound, rows, settings, identity | settings.record(separator), Path(folder))


def _settled(model: Runner) -> Runner:
    """The model with packed weights, unless its options say otherwise."""
    # Packed or not moves the last bits, and the first call of a model decides: the bytes of a harvest are not to depend
    # on what the model ran before, nor on the process that runs it.
    packed = model.options.prepack is None or model.options.prepack
    if model.variants.settle(packed):
        return model
    return type(model)(model.hooked, replace(model.options, prepack=packed))


class DamagedShardWarning(UserWarning):
    """A shard that did not have its checksum any more, and is made again."""


@dataclass(frozen=True)
class ShardWriter:
    """A harvest that is going on."""

    model: Runner
    spec: HookSpec
    bound: BoundSpec
    rows: HarvestRows
    settings: Settings
    identity: dict[str, Any]  # everything that determines the activations, as the manifest has it
    folder: Path

    def write(self, make: Make, progress: bool | None) -> Activations:
        """Write all shards that are not there yet, and the manifest."""
        make_folder(self.folder)
        with _alone(self.folder), shown(progress) as show:
            self._run(make, show)
        self.model.give_back(later=True)
        return Activations(self.folder)

    def _run(self, make: Make, progress: Progress) -> None:
        left = iter(self.rows)
        first = next(left, None)
        if first is None:
            raise InputError("nothing to harvest: there are no texts")
        settings = self.settings
        # other engines have dtypes that they do not give: numpy casts their values
        cast = cast_spec(self.spec, self.bound, settings.dtype if self.model.variants.engine.casts else None)
        dtype = None if settings.dtype is None else read_dtype(settings.dtype)
        # one row tells the shapes; what an iterator gave for it is put back below
        columns = columns_of(
            self.bound.captures,
            forward(self.model, [first], cast),
            dtype,
            self.model.bidirectional,
            self.settings.positions == POOLED,
        )
        manifest = self._begin(columns)
        a_token = sum(column.bytes_a_token for column in columns)
        a_token += sum(kind.itemsize for kind in TOKEN_COLUMNS.values())
        # An iterator gave its first row above, and gives it no more.
        rows = self.rows if self.rows.texts.again else chain([first], left)
        exact, shards = cast_spec(self.spec, self.bound, None), dict(enumerate(manifest.shards))
        how = settings.format, settings.batch_size, settings.context
        maker = ShardMaker(self.folder, self.model, cast, exact, tuple(columns), *how, shards)
        self._finish(manifest, self._all(make, maker, Groups(rows, a_token, settings.shard_bytes), progress))

    def _all(self, make: Make, maker: ShardMaker, groups: Groups, progress: Progress) -> list[FinishedShard]:
        shards: dict[int, FinishedShard] = {}
        texts = 0
        for one in make(maker, groups):
            if one.damage is not None:
                warnings.warn(f"{one.damage}: it was made again", DamagedShardWarning, stacklevel=2)
            shards[one.number], texts = one, max(texts, one.texts)
            progress("harvest", texts, self.rows.texts.count)
        # More shards than these texts make: they are of a longer dataset, and would be left without an entry.
        count = max([-1, *finished(self.folder), *maker.earlier]) + 1
        if count > len(shards):
            raise SpecFileError(f"{self.folder} holds {count} shards, and these texts make {len(shards)}")
        return [shards[number] for number in range(len(shards))]

    def _begin(self, columns: Sequence[Column]) -> Manifest:
        """The manifest of an earlier harvest of the same into the folder, or a new one."""
        _remove_partial(self.folder)  # no process is writing them: this one has the lock
        earlier = read_manifest(self.folder)
        if earlier is not None:
            refuse_other(self.folder, earlier.settings, self.identity)
            return earlier
        if others := [path.name for path in self.folder.iterdir() if not path.name.startswith(".")]:
            raise SpecFileError(f"{self.folder} holds other files ({others[0]}): choose an empty or a new folder")
        manifest = Manifest(self.identity, {column.name: (column.dtype.name, column.shape) for column in columns})
        manifest.write(self.folder)
        return manifest

    def _finish(self, manifest: Manifest, shards: Sequence[FinishedShard]) -> None:
        _remove_partial(self.folder)
        if not any(one.shard.tokens for one in shards):
            why = "positions= chose none of them" if self.settings.positions is not None else "no window is full"
            raise InputError(f"no token of these texts would be written: {why}")
        if self.settings.format == "saelens":
            finish_saelens(self.folder, [capture.node.output for capture in self.bound.captures], len(shards))
        files, dropped = [one.shard for one in shards], sum(one.dropped for one in shards)
        complete = replace(manifest, shards=files, complete=True, texts=shards[-1].texts, dropped_tokens=dropped)
        complete.write(self.folder)


def _remove_partial(folder: Path) -> None:
    """Remove files that a killed process or worker was writing."""
    for path in folder.glob(PARTIAL_SHARD):
        path.unlink(missing_ok=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    try:
        with FileLock(folder / HARVEST_LOCK, timeout=0):
            yield
    except Timeout as error:
        raise SpecFileError(f"another process harvests into {folder}: wait for it, or choose another folder") from error
    except OSError as error:
        raise SpecFileError(f"cannot write to {folder}: {error}") from error
