"""`narrow`: a model of float32 as a file of a narrow dtype, rescaled and with islands where it needs them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mionnx.analysis.numerics.distance import first_run
from mionnx.analysis.numerics.dtypes import narrow_of
from mionnx.analysis.numerics.forecast import check_casts
from mionnx.analysis.numerics.range import measure
from mionnx.analysis.numerics.remedy import AUTOMATIC, Remedy, find_remedy
from mionnx.analysis.numerics.texts_run import TextsRun
from mionnx.errors import InputError, ModelError
from mionnx.graph import onnx_file
from mionnx.graph.folder_file import files_beside
from mionnx.graph.hooked_model import DTYPES, GRAPH, KEPT, HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.graph.own_version import own_version
from mionnx.graph.weight_record import describe_export
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.progress import Progress, shown
from mionnx.machine.streamed_file import Kind, StreamedFile, streamed
from mionnx.machine.typed import typed
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.narrow import NarrowGraph, WeightJob, narrow, narrowed_array
from mionnx.rewrite.rescale import rescale
from mionnx.run.runner import Runner

WEIGHTS_FILE = "narrowed.safetensors"
ROWS = 2**22  # numbers of a weight that are narrowed together


@typed()
def narrow_model(
    model: Runner,
    folder: str | Path,
    *,
    dtype: str = "float16",
    texts: str | Sequence[str] | None = None,
    bound: float = 1e-3,
    rescale: str = AUTOMATIC,
    islands: str = AUTOMATIC,
    progress: bool | None = None,
) -> Path:
    """Write the model in a narrow dtype, with an exact remedy for what the dtype cannot hold.

    Values beyond the dtype's range are divided by powers of two, which changes no bit of float32's logits: every node
    of the graph is proved to compute the same numbers, shifted. What is still too wide, as squares inside norms that a
    file has in their own nodes, stays float32. Captures and edits are of the true values, in float32 where those were
    divided: every spec and analysis means the same on both files.

    Args:
        folder: path of a folder that does not exist yet.
        dtype: "float16" or "bfloat16".
        texts: to measure on, in windows of 256 tokens; if left out, what the model writes by itself (1,024 tokens).
        bound: of KL(float32 || narrow) in nats, the mean over the tokens of the texts, as forecast; of embeddings and
            other vectors, of half the squared relative distance.
        rescale: "auto": classes of values that reach a quarter of the dtype's limit, the residual stream say, so that
            they reach no more; a number k: the stream times 2^-k; or "none".
        islands: "auto": groups of nodes in the order of what they cost, until the bound holds; "none"; or a glob of
            values, or a group of the forecast.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Returns:
        the folder: a hooked model; `hooked.metadata.narrowed` says what was done, and the forecast before and after.

    Raises:
        InputError: another dtype, bound or choice.
        ModelError: the model is no float32 model, or narrowed already; a node has no type, and is named; the bound
            does not hold; the folder exists or cannot be written.

    Example:
        half = MIModel.from_pretrained(model.narrow("world-float16", texts="The capital of France is Paris."))
    """
    narrow_of(dtype)
    folder, hooked = Path(folder), model.hooked
    if not (np.isfinite(bound) and bound > 0):
        raise InputError(f"bound must be a number above 0, nats of KL, got {bound!r}")
    refuse_narrowed(hooked)
    if folder.exists():  # at once: measuring takes minutes
        raise ModelError(f"{folder} exists already")
    check_casts(dtype)
    remove_leftovers(folder.parent, holding=())
    with shown(progress) as show:
        run = TextsRun(model, texts, show)
        measured = measure(run, run.graph)
        with first_run(run.logits(run.graph.proto, "float32")) as first:
            remedy = find_remedy(run, measured, first, dtype, bound, power=rescale, islands=islands)
        with new_folder(folder, ModelError) as partial:
            write(hooked, partial, dtype, remedy, {"bound": bound, **run.facts}, show)
    model.give_back(later=True)
    return folder


def refuse_narrowed(hooked: HookedModel) -> None:
    """Refuse a model that is no plain one of float32."""
    if hooked.metadata.exponents or hooked.metadata.narrowed:
        raise ModelError(f"{hooked.name} is narrowed already: narrow the model of float32 that it was made of")
    if hooked.metadata.dtype != "float32":
        raise ModelError(
            f"{hooked.name} computes in {hooked.metadata.dtype}: a remedy starts from float32; open its checkpoint "
            "with dtype='float32'"
        )
    hooked.need_weights("narrowing it")


def write(
    hooked: HookedModel, folder: Path, dtype: str, remedy: Remedy, facts: dict[str, Any], progress: Progress
) -> None:
    """Write the files of a narrowed model: graph, weights piece by piece, what stands beside them."""
    graph = FloatGraph(hooked.proto, hooked.metadata.hooks)
    rescaled = rescale(graph, remedy.exponents)
    narrow_graph = narrow(rescaled.graph, dtype, remedy.islands)
    write_weights(hooked, narrow_graph, dtype, folder, progress)
    digest, files = describe_export(folder, [WEIGHTS_FILE], [folder / WEIGHTS_FILE], progress)
    wide = {
        name: "float32" for name in hooked.metadata.hooks if name in rescaled.exponents or name in narrow_graph.wide
    }
    metadata = replace(
        hooked.metadata,
        dtype=dtype,
        exporter={**hooked.metadata.exporter, "mionnx": own_version()},
        weights_sha256=digest,
        weight_files=files,
        hook_dtypes=wide,
        exponents=dict(rescaled.exponents),
        narrowed={**remedy.to_entry(), **facts, "dtype": dtype, "of_weights_sha256": hooked.weights_sha256},
        fused=[],
        stock={},
    )
    narrow_graph.describe(metadata.to_props())
    onnx_file.rename(narrow_graph.proto, LOGITS, metadata.output)  # as files have it
    (folder / GRAPH).write_bytes(narrow_graph.proto.SerializeToString())
    for path in files_beside(hooked.folder, KEPT):
        shutil.copyfile(path, folder / path.name)


def write_weights(hooked: HookedModel, narrow_graph: NarrowGraph, dtype: str, folder: Path, progress: Progress) -> None:
    """Write the weights of a narrow graph into one file, and point its initializers there."""
    narrow_kind, shapes = np.dtype(DTYPES[dtype]), narrow_graph.shapes
    arrays = {name: onnx_file.weight(hooked.proto, hooked.folder, name) for name in narrow_graph.untouched}
    kinds: dict[str, Kind] = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    kinds |= {
        job.name: (np.dtype(np.float32) if job.wide else narrow_kind, shapes[job.name]) for job in narrow_graph.jobs
    }
    with streamed(folder / WEIGHTS_FILE, kinds, ModelError) as file:
        for name, array in arrays.items():
            file.put(name, 0, array)
        for number, job in enumerate(narrow_graph.jobs):
            progress(f"writing {dtype}", number, len(narrow_graph.jobs))
            _put(hooked, job, dtype, file)
        narrow_graph.point(WEIGHTS_FILE, file.places, kinds)


def _put(hooked: HookedModel, job: WeightJob, dtype: str, file: StreamedFile) -> None:
    """Write one weight, some rows at a time."""
    array = onnx_file.weight(hooked.proto, hooked.folder, job.source)
    rows = max(1, ROWS // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, len(array), rows) if array.ndim else (0,):
        part = array[start : start + rows] if array.ndim else array
        file.put(job.name, start, narrowed_array(part, job.exponent, "" if job.wide else dtype, job.source))
