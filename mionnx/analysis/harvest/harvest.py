"""`harvest`: the activations of a dataset, written to disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from mionnx.analysis.features.sae import SAE
from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.harvest.rows import HarvestRows, Positions, separator_of
from mionnx.analysis.harvest.settings import Settings, exact_spec
from mionnx.analysis.harvest.shard_maker import Make, in_turn
from mionnx.analysis.harvest.shard_writer import ShardWriter
from mionnx.analysis.harvest.texts import Source, Texts
from mionnx.errors import SpecFileError
from mionnx.machine.files import make_folder
from mionnx.machine.progress import shown
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
        positions: whose activations are written: positions of each row, negative ones from its end; a string, whose
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
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Raises:
        HookError: a hook point without one value a token.
        InputError: texts that cannot be read, or settings that exclude one another.
        SpecFileError: a folder that cannot be written to, that holds another harvest, or in which one is going on.

    Example:
        made = model.harvest("texts.jsonl", "blocks.*.hook_resid_post", "activations", context=128, packed=True)
        made["blocks.2.hook_resid_post"].shape  # (tokens, hidden)
    """
    settings = Settings(context, packed, separator, positions, dtype, format, sae, k, batch_size, shard_bytes, column)
    return write(open_writer(model, texts, points, hooks, folder, settings), in_turn, progress)


def open_writer(
    model: Runner, texts: Source, points: Hooks | None, hooks: HookSpec | None, folder: str | Path, settings: Settings
) -> ShardWriter:
    """Check a harvest; nothing is written yet."""
    model = _settled(model)
    spec = exact_spec(points, hooks, settings)
    bound = model.binder.bind(spec, HOOKS_ONLY)
    separator = separator_of(model, settings.packed, settings.separator)
    dataset = Texts(texts, settings.column)
    rows = HarvestRows(model, dataset, settings.context, settings.packed, separator, settings.positions)
    changes = HookSpec().extend(spec)
    changes.captures = []
    identity = {
        "model": {"family": model.hooked.metadata.family, "weights_sha256": model.hooked.weights_sha256},
        "hooks": [capture.node.output for capture in bound.captures],
        "interventions_sha256": changes.sha256,
    }
    return ShardWriter(model, spec, bound, rows, settings, identity | settings.record(separator), Path(folder))


def _settled(model: Runner) -> Runner:
    """The model with packed weights, unless its options say otherwise.

    Packed or not moves the last bits, and the first call of a model decides: the bytes of a harvest are not to depend
    on what the model ran before, nor on the process that runs it.
    """
    packed = model.options.prepack is None or model.options.prepack
    if model.variants.settle(packed):
        return model
    return type(model)(model.hooked, replace(model.options, prepack=packed))


def write(writer: ShardWriter, make: Make, progress: bool | None) -> Activations:
    """Write the folder of a harvest."""
    make_folder(writer.folder)
    with _alone(writer.folder), shown(progress) as show:
        writer.run(make, show)
    return Activations(writer.folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other harvests out of a folder."""
    try:
        with FileLock(folder / HARVEST_LOCK, timeout=0):
            yield
    except Timeout as error:
        raise SpecFileError(f"another process harvests into {folder}: wait for it, or choose another folder") from error
    except OSError as error:
        raise SpecFileError(f"cannot write to {folder}: {error}") from error
