"""`MIModel.quantise`: an open model's weights as blocks of 4 or 8 bits, chosen by text where a budget is given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.budget import IN_FLOATS, WIDE_BITS, MeasuredText, Search, text_of, whole_stacks
from mionnx.analysis.quantisation.layer_chain import Importance, mean_squares
from mionnx.analysis.quantisation.matrix_loss import Divergence, FloatModel
from mionnx.analysis.quantisation.windows import Ids, calls_of, digest, own_text, windows
from mionnx.bind.bound_spec import bind
from mionnx.engine.engines import engine_of
from mionnx.engine.options import Options
from mionnx.errors import InputError, ModelError
from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.lacking import refuse_without_distribution
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.progress import Progress, shown
from mionnx.machine.typed import typed
from mionnx.quantise.choice import FewBlocksWarning, choose
from mionnx.quantise.quantise import quantise, quantise_into
from mionnx.quantise.settings import Quantisation
from mionnx.rewrite import rewrite
from mionnx.rewrite.plan import Outputs
from mionnx.run.open_model import at_level
from mionnx.run.predictions import distributions
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec


@typed()
def quantise_model(
    model: Runner,
    folder: str | Path,
    *,
    bits: int = 4,
    block_size: int = 32,
    symmetric: bool = True,
    accuracy_level: int = 0,
    keep: Sequence[str] = (),
    in_8_bits: Sequence[str] = (),
    embedding: bool = True,
    unembedding: bool = True,
    budget: float | None = None,
    texts: str | Sequence[str] | None = None,
    importance: bool | str | Sequence[str] = False,
) -> Path:
    """Write the model with its weights quantised, as a hooked model with all of its hook points.

    Products become ONNX Runtime's `MatMulNBits`, the token table `GatherBlockQuantized`. Norms, biases and
    routers keep their floats. `from_pretrained(..., dtype="int4")` does the same with the defaults, into the
    store.

    Args:
        folder: path of a folder that does not exist yet.
        bits: 4 or 8 of a number.
        block_size: neighbouring numbers of a row that share a scale: 16, 32, 64, 128 or 256.
        symmetric: a block has a scale; if False, a zero point too.
        accuracy_level: 0: products in floats, every hook point within 5e-5 of the same numbers in float32; 4: ONNX
            Runtime rounds what a product reads to 8 bits, faster and less exact.
        keep: names or globs of weights that stay in floats.
        in_8_bits: names or globs of weights that take 8 bits, where the others take 4.
        embedding, unembedding: whether the token table and the unembedding are quantised.
        budget: a bound of KL(floats || blocks) in nats, the mean over the predictions on a text (tokens, or by the head
            labels, tags, ends of a span): the matrices that cost most KL for a byte take 8 bits, or floats if 8 bits
            for all do not do, until the written model is within it. The choice, KL and the text's hash are in the
            metadata (`hooked.metadata.quantised["budget"]`).
        texts: to measure on, in windows of 256 tokens; if left out, what the model writes by itself (1,024 tokens),
            which an encoder does not.
        importance: choose the scales of blocks of 4 bits by least squares, each input weighted with its mean square, on
            what the model writes by itself, or on texts given here (llama.cpp's importance matrix): the same bytes, and
            on SmolLM2 a KL of 0.23 in place of 0.39.

    Returns:
        the folder.

    Raises:
        InputError: other settings; texts without a budget; an encoder without texts, a budget of an embedding model.
        ModelError: a budget that cannot be met (with the best one); the folder exists or cannot be written, a pattern
            names no weight, or nothing is left to quantise.

    Example:
        small = MIModel.from_pretrained(model.quantise("world-int4", in_8_bits=["*down_proj*"]))
    """
    settings = Quantisation(
        bits, block_size, symmetric, accuracy_level, tuple(keep), tuple(in_8_bits), embedding, unembedding
    )
    if budget is None and texts is not None:
        raise InputError("texts= is what a budget is measured on: give budget= too")
    with shown() as progress:
        if budget is not None or importance:
            return _quantise_by_text(model, Path(folder), settings, budget, texts, importance, progress)
        return quantise(model.hooked, Path(folder), settings, progress)


def _quantise_by_text(
    model: Runner,
    folder: Path,
    settings: Quantisation,
    budget: float | None,
    texts: str | Sequence[str] | None,
    importance: bool | str | Sequence[str],
    progress: Progress,
) -> Path:
    """Write a quantised model: scales by what matrices read, bits within a bound of KL."""
    if budget is not None and not (np.isfinite(budget) and budget > 0):
        raise InputError(f"budget must be a number of nats above 0, got {budget!r}")
    # At once: measuring takes minutes.
    if folder.exists():
        raise ModelError(f"{folder} exists already")
    remove_leftovers(folder.parent, holding=())
    if importance and settings.bits == WIDE_BITS:
        raise InputError("importance has no effect on 8 bits: it weights the scales of blocks of 4")
    model.hooked.need_weights("quantising it")
    if budget is not None:
        refuse_without_distribution(model.hooked, "budget=")
    weights, entry = Importance(), dict[str, Any]()
    options = Options(threads=model.options.threads, prepack=False)
    if importance:
        ids = own_text(model, "importance=texts") if importance is True else windows(model, importance)
        weights = mean_squares(model.hooked, calls_of(model, ids), options, progress)
        entry = {"importance": _text(ids, importance is True)}
    if budget is None:
        with new_folder(folder, ModelError) as partial:
            quantise_into(model.hooked, partial, settings, progress, importance=weights)
            _record(HookedModel.open(partial, check="none"), entry)
        return folder
    floats = FloatModel(model.hooked, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewBlocksWarning)  # it comes when the model is written
        matrices = whole_stacks(choose(model.hooked, floats.uses, settings).matrices)
    ids = own_text(model, "texts=") if texts is None else windows(model, texts)
    with text_of(floats, calls_of(model, ids), progress) as text:
        search = Search(floats, text, matrices, settings, budget, progress, weights)
        return _within(model, folder, search, entry, _text(ids, texts is None))


def _text(ids: Sequence[Ids], own: bool) -> dict[str, Any]:
    return {"text": "own" if own else "given", "text_sha256": digest(ids), "tokens": sum(one.size for one in ids)}


class _AboveError(Exception):
    """The model as it is written is above the bound."""


def _within(model: Runner, folder: Path, search: Search, entry: dict[str, Any], text: dict[str, Any]) -> Path:
    """Choose bits and write the model; the next bits if it turns out to be above the bound."""
    bits, more = search.run()
    settings, threads = search.settings, model.options.threads
    begin = {name: matrix.bits for name, matrix in search.matrices.items()}
    facts = {"bound": search.bound, "kl_without": search.kl(begin), "bytes_without": search.bytes(begin), **text}
    for one in (bits, *more):
        floats = [name for name, count in one.items() if count == IN_FLOATS]
        wide = [name for name, count in one.items() if count == WIDE_BITS]
        moved = [name for name in wide if settings.bits_of(name) != WIDE_BITS]
        changed = _settings(settings, wide, floats, len(wide) + len(floats) == len(one))
        with suppress(_AboveError):
            with new_folder(folder, ModelError) as partial:
                quantise_into(model.hooked, partial, changed, search.progress, importance=search.importance)
                opened = HookedModel.open(partial, check="none")
                divergence = _measured(opened, search.text, threads, search.progress)
                if divergence.mean > search.bound:
                    raise _AboveError
                facts |= {"kl": divergence.mean, "top_1": divergence.top_1, "bytes": search.bytes(one)}
                facts |= {"moved_to_8_bits": moved, "moved_to_floats": floats}
                _record(opened, {**entry, "budget": facts})
            return folder
    raise ModelError(f"budget={search.bound:g} is not met by the model as it is written, whatever the bits")


def _settings(settings: Quantisation, wide: list[str], floats: list[str], no_other: bool) -> Quantisation:
    keep = (*settings.keep, *map(escape, floats))
    if no_other:
        return replace(settings, bits=WIDE_BITS, in_8_bits=(), keep=keep)
    return replace(settings, in_8_bits=tuple(map(escape, wide)), keep=keep)


def _measured(hooked: HookedModel, text: MeasuredText, threads: int, progress: Progress) -> Divergence:
    """KL of a quantised model over a text, its products in floats."""
    products = any(node.op_type == "MatMulNBits" for node in hooked.proto.graph.node)
    # In floats: rounding of what products read is no part of the blocks' cost.
    model = at_level(hooked, 0) if products else hooked
    bound, options = bind(HookSpec(), model, Outputs(carried=False)), Options(threads=threads)
    graph, _ = rewrite(model.proto, bound.plan, model.metadata)
    with engine_of(options).opened_alone(graph, model.folder, options) as program:

        def logits() -> Iterator[NDArray[Any]]:
            for number, call in enumerate(text.calls):
                progress("measuring the written model", number, len(text.calls))
                feeds = {name: np.asarray(value) for name, value in bound.inputs(call).items()}
                yield distributions(program.run([LOGITS], feeds)[LOGITS], model.metadata)

        return Divergence.of(text.first, logits())


def _record(hooked: HookedModel, entry: dict[str, Any]) -> None:
    proto = onnx_file.read(hooked.folder / GRAPH)
    metadata = replace(hooked.metadata, quantised={**hooked.metadata.quantised, **entry})
    del proto.metadata_props[:]
    for key, value in metadata.to_props().items():
        proto.metadata_props.add(key=key, value=value)
    (hooked.folder / GRAPH).write_bytes(proto.SerializeToString())
