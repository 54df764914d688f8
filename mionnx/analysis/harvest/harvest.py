"""`harvest`: the activations of a dataset, written to disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from mionnx.analysis.features.network import ranking
from mionnx.analysis.features.sae import SAE
from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.harvest.formats import check_format
from mionnx.analysis.harvest.rows import Positions, Rows, separator_of
from mionnx.analysis.harvest.shard_writer import ShardWriter
from mionnx.analysis.harvest.texts import Source, Texts
from mionnx.bind.bound_spec import BoundSpec
from mionnx.errors import HookError, InputError, SpecFileError
from mionnx.machine.arrays import read_dtype
from mionnx.machine.files import make_folder
from mionnx.machine.progress import Progress, bars
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import Outputs
from mionnx.run.batching import AUTO, check_batch_size
from mionnx.run.runner import Runner
from mionnx.spec.hook_choice import Hooks
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

LOCK = ".harvest.lock"
TOP_K = 32  # features of a token, if nothing is said
HOOKS_ONLY = Outputs(logits=False, carried=False)


@typed(leave=["texts", "spec", "positions"])
def harvest(
    model: Runner,
    texts: Source,
    spec: HookSpec | Hooks,
    folder: str | Path,
    *,
    context: int | None = None,
    packed: bool = False,
    separator: int | str | None = None,
    positions: Positions | None = None,
    dtype: str | None = None,
    format: str = "safetensors",
    sae: SAE | None = None,
    top_k: int | None = None,
    batch_size: int | str = AUTO,
    shard_bytes: int = 2**28,
    column: str | None = None,
    progress: Progress | None = None,
) -> Activations:
    """Write the activations of a dataset to disk, in one pass over it.

    The graph ends at the last hook point. A harvest that was interrupted goes on where it was: shards that are whole
    stay, a damaged one is made again. Two harvests of the same give the same bytes.

    Args:
        texts: a file (.txt with a text a line, .jsonl, .parquet), a folder of such or of Hugging Face's `datasets`, or
            an iterable of texts, ids [seq] or `Tokens`, which gives the same at every call.
        spec: hook points, or a `HookSpec` with captures and interventions.
        folder: where the shards go; `Activations(folder)` reads them.
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
        top_k: how many features of each token, the most active first; 32 if left out.
        batch_size: rows of one pass; "auto" chooses by their length.
        shard_bytes: size of a shard, about.
        column: of tables and JSON lines, the one with the texts; "text" if left out.
        progress: called with (stage, texts done, texts in all or 0); bars on a terminal if left out.

    Raises:
        HookError: a hook point without one value a token.
        InputError: texts that cannot be read, or settings that exclude one another.
        SpecFileError: a folder that cannot be written to, that holds another harvest, or in which one is going on.

    Example:
        made = model.harvest("texts.jsonl", "blocks.*.hook_resid_post", "activations", context=128, packed=True)
        made["blocks.2.hook_resid_post"].shape  # (tokens, hidden)
    """
    at_least("shard_bytes", shard_bytes, 1)
    check_batch_size(batch_size)
    if context is not None or packed:
        at_least("context (tokens of a window)", context or 0, 1)
    check_format(format, dtype, packed and positions is None)
    made = None if dtype is None else read_dtype(dtype)
    if top_k is not None and sae is None:
        raise InputError("top_k= is how many features of an autoencoder are written: give sae=")
    top_k = TOP_K if top_k is None else top_k
    asked = _spec(spec, sae, top_k)
    bound = model.binder.bind(asked, HOOKS_ONLY)
    rows = Rows(model, Texts(texts, column), context, packed, separator_of(model, packed, separator), positions)
    settings = _settings(model, bound, asked, rows, sae)
    settings |= {"dtype": dtype, "format": format, "batch_size": batch_size, "shard_bytes": shard_bytes}
    settings |= {"top_k": top_k if sae is not None else None}
    target = Path(folder)
    make_folder(target)
    with _alone(target), bars() if progress is None else nullcontext(progress) as shown:
        ShardWriter(model, asked, bound, rows, made, settings, target, shown).run()
    return Activations(target)


def _spec(given: HookSpec | Hooks, sae: SAE | None, top_k: int) -> HookSpec:
    """The spec of the passes."""
    spec = HookSpec().extend(given) if isinstance(given, HookSpec) else HookSpec().capture(given)
    if spec.gradients or spec.metric is not None:
        raise InputError("harvest writes captures; a spec with gradients or a metric has no place there")
    if any(request.positions is not None for request in spec.captures):
        raise InputError("positions of a capture: give positions= to harvest, which counts them in each row")
    if sae is None:
        if not spec.captures:
            raise HookError("nothing to harvest: the spec captures no hook point")
        return spec
    where = sae.config.hook
    if not where:
        raise HookError("the SAE's file does not say what it reads: SAE.load(path, hook='blocks.3....')")
    at_least("top_k", top_k, 1)
    if top_k > sae.d_sae:
        raise InputError(f"top_k={top_k} of {sae.d_sae} features")
    spec.captures = [request for request in spec.captures if request.text != where]
    asked = {"k": np.array([top_k]), "followed": np.array([0])}
    spec.intervene(where, Intervention.Splice(ranking(sae.config, sae.weights, asked)))
    return spec.capture([f"{where}.hook_top_ids", f"{where}.hook_top_values"])


def _settings(model: Runner, bound: BoundSpec, spec: HookSpec, rows: Rows, sae: SAE | None) -> dict[str, Any]:
    """Everything that determines the activations, as JSON can hold it."""
    changes = HookSpec().extend(spec)
    changes.captures = []
    by = rows.positions
    named = by if by is None or isinstance(by, int | str) else getattr(by, "__qualname__", None) or [*by]  # type: ignore[misc]
    return {
        "model": {"family": model.hooked.metadata.family, "weights_sha256": model.hooked.weights_sha256},
        "hooks": [capture.node.output for capture in bound.captures],
        "interventions_sha256": changes.sha256,
        "sae_hook": None if sae is None else sae.config.hook,
        "context": rows.context,
        "packed": rows.packed,
        "separator": rows.separator,
        "positions": named,
    }


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other harvests out of a folder.

    Raises:
        SpecFileError: one is going on there.
    """
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout as error:
        raise SpecFileError(f"another process harvests into {folder}: wait for it, or choose another folder") from error
    except OSError as error:
        raise SpecFileError(f"cannot write to {folder}: {error}") from error
