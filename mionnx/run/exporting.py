"""Exports: a checkpoint becomes a hooked model by the exporter that knows it, found by its entry point."""

import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import SafetensorError, safe_open

from mionnx.errors import ExportError, InputError, boundary, install, nearest
from mionnx.graph.blocks import GivenBlocks
from mionnx.graph.folder_file import files_beside
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.graph.metadata import DTYPE_NAMES
from mionnx.machine.leftovers import new_folder, partial_path, remove_leftovers
from mionnx.machine.progress import Progress
from mionnx.quantise.matrices import find_weights
from mionnx.quantise.quantise import quantise_into
from mionnx.quantise.settings import BLOCK_DTYPES as BLOCKS
from mionnx.quantise.settings import Quantisation
from mionnx.run.source_path import advice, is_hooked

AUTO_DTYPE = "auto"
DTYPE_CHOICES = (*DTYPE_NAMES, *BLOCKS)
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # names in safetensors
MADE = (GRAPH, "converted.safetensors", "config.json")  # what tells a folder of an export that was killed
FLOATS_FOLDER = ".floats"  # folder of the model that is quantised, while it is
FOREIGN, FOREIGN_MODULE = "onnx", "exporters.adopt"  # entry point of the exporter of foreign ONNX files
EXPORT = f"exporting a checkpoint needs torch and transformers: {install('export')}"
NEEDED = {
    "onnx_ir": f"adopting an ONNX file needs onnx_ir: {install('adopt')}",
    "gguf": f"reading a GGUF file needs gguf, torch and transformers: {install('export')}",
}


class Unsaid(str):
    """A default that nobody wrote: a hooked model's own dtype comes before it."""

    __slots__ = ()


DEFAULT = Unsaid("float32")


def check_name(dtype: str) -> None:
    """Refuse a dtype that no model has."""
    if dtype not in (*DTYPE_CHOICES, AUTO_DTYPE):
        near = nearest(dtype, [*DTYPE_CHOICES, AUTO_DTYPE])
        raise InputError(f"dtype {dtype!r} is none of {', '.join(DTYPE_CHOICES)}, {AUTO_DTYPE}{near}")


def refuse_uncomputed(folder: Path, dtype: str, lacking: Collection[str], where: str) -> None:
    """Refuse to export a checkpoint in a dtype that its engine does not compute in."""
    kind = stored_dtype(folder) if dtype == AUTO_DTYPE else dtype
    if kind in lacking:
        own = f", the dtype of {folder}" if dtype == AUTO_DTYPE else ""
        left = " or ".join(name for name in DTYPE_NAMES if name not in lacking)
        raise InputError(f"dtype={dtype!r}{own}: {where} does not compute in {kind}; use {left}, or provider='cuda'")


def refuse_other(hooked: HookedModel, dtype: str) -> None:
    """Refuse another dtype than a hooked model has; it is chosen when a checkpoint is exported."""
    own = hooked.metadata.weight_dtype
    if not isinstance(dtype, Unsaid) and dtype not in (AUTO_DTYPE, own):
        narrower = own == "float32" and dtype in DTYPE_NAMES
        narrows = f"; model.narrow(folder, dtype={dtype!r}) writes it so, sound" * narrower
        raise InputError(
            f"dtype={dtype!r}, but {hooked.folder} is a hooked model in {own} already: leave dtype out, or export its "
            f"checkpoint with dtype={dtype!r}{narrows}"
        )


def stored_dtype(folder: Path) -> str | None:
    """The dtype of most tensors in a checkpoint's safetensors files; None without such files."""
    counts: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="np") as tensors:
                counts.update(tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118 - it is no dictionary
        except (OSError, SafetensorError):
            return None  # refused by the exporter, which says what is wrong with the file
    kinds = [STORED[name] for name, _ in counts.most_common() if name in STORED]
    return kinds[0] if kinds else None


def foreign_exporter() -> ModuleType:
    """The exporter of foreign ONNX files."""
    for entry in entry_points(group="mionnx.exporters", name=FOREIGN):
        return entry.load()
    raise ExportError("no exporter of foreign ONNX files is installed")


def exporter_for(folder: Path) -> ModuleType:
    """The installed exporter that knows a checkpoint."""
    installed = list(entry_points(group="mionnx.exporters"))
    for entry in installed:
        module = entry.load()
        if module.recognises(folder):
            return module
    files_beside(folder, ["config.json"])  # one that nobody reads says why
    names = ", ".join(entry.name for entry in installed) or "none"
    raise ExportError(
        f"{folder} holds neither a hooked model nor a checkpoint that an exporter knows (installed: {names})"
        f"{advice(folder)}"
    )


def dtype_of(exporter: ModuleType, folder: Path, dtype: str) -> str:
    """The dtype of an export: a checkpoint of integers keeps them unless floats are asked for."""
    bits = exporter.packed_bits(folder) if hasattr(exporter, "packed_bits") else None
    if bits is None:
        return dtype
    own, names = f"int{bits}", [f"int{one.bits}" for one in BLOCKS.values()]
    if own not in names:
        raise ExportError(f"{folder} holds integers of {bits} bits; of {' and '.join(names)} are read")
    if isinstance(dtype, Unsaid) or dtype == AUTO_DTYPE:
        return own
    if dtype in BLOCKS and dtype != own:
        raise ExportError(f"dtype={dtype!r}, but {folder} holds {own} already: leave dtype out, or give float32")
    return dtype


def export(
    folder: Path, target: Path, dtype: str, progress: Progress, copy: bool = False, graph_only: bool = False
) -> None:
    """Export a checkpoint into a new folder; `copy` gives it weight files of its own instead of links."""
    exporter = exporter_for(folder)
    if target.exists():
        raise ExportError(f"{target} exists already")
    dtype = dtype if graph_only else dtype_of(exporter, folder, dtype)
    remove_leftovers(target.parent, holding=MADE)
    with new_folder(target, ExportError) as partial:
        write(exporter, folder, partial, dtype, progress, "export_graph" if graph_only else "export")
        own = HookedModel.open(partial, check="none").metadata.weight_dtype
        if dtype not in (own, AUTO_DTYPE):  # a foreign ONNX file computes in its own
            raise ExportError(f"{folder} computes in {own}, and is not converted to {dtype}: give dtype {own} or auto")
        if copy:
            copy_links(partial, progress)


def write(
    exporter: ModuleType, folder: Path, target: Path, dtype: str, progress: Progress, function: str = "export"
) -> None:
    """Export a checkpoint into a folder; int4 and int8 are its own, or made from float32."""
    if dtype not in BLOCKS:
        _call(exporter, function, folder, target, dtype, progress)
        return
    if function != "export":
        raise ExportError(f"{folder}: a graph without weights has none to be {dtype}: leave out the dtype")
    floats = target / FLOATS_FOLDER
    floats.mkdir()
    try:
        foreign = exporter.__name__ == foreign_exporter().__name__  # such a file has a dtype of its own
        if hasattr(exporter, "export_packed"):
            blocks = _call(exporter, "export_packed", folder, floats, progress)
        else:
            blocks = {}
            _call(exporter, function, folder, floats, AUTO_DTYPE if foreign else "float32", progress)
        hooked = HookedModel.open(floats, check="none")
        quantise_into(hooked, target, _settings(exporter, folder, dtype, hooked, blocks), progress, blocks)
    finally:
        shutil.rmtree(floats, ignore_errors=True)


def _settings(
    exporter: ModuleType, folder: Path, dtype: str, hooked: HookedModel, blocks: Mapping[str, GivenBlocks]
) -> Quantisation:
    """Settings of the blocks of a checkpoint; one of integers is left as it is."""
    settings = BLOCKS[dtype]
    if hasattr(exporter, "packed_bits") and exporter.packed_bits(folder) is not None:
        for one in blocks.values():  # all have the form of the first
            settings = replace(settings, block_size=one.block_size, symmetric=not one.zero_points)
            break
        return replace(settings, keep=("*",), embedding=False, unembedding=False)
    if settings.bits == 4 and hasattr(exporter, "wide_weights"):
        uses = find_weights(hooked)  # a router that the file has in 8 bits is read by no product of blocks
        names = {one.weight for one in uses.products} | ({uses.table} if uses.table else set())
        names |= {name for one in uses.stacks for name in (one.weight, *one.experts)}
        return replace(settings, in_8_bits=tuple(sorted(names.intersection(exporter.wide_weights(folder)))))
    return settings


def _call(exporter: ModuleType, function: str, folder: Path, *arguments: Any) -> Any:
    """Call a function of an exporter, and say in one sentence why it fails."""
    export = getattr(exporter, function, None)
    if export is None:
        raise ExportError(f"{folder}: {exporter.__name__} makes no graph without weights")
    try:
        with boundary(ExportError, f"cannot export {folder}"):
            return export(folder, *arguments)
    except ImportError as error:
        # A checkpoint's exporter uses onnx_ir too, and torch comes with it.
        named = "" if export.__module__ != FOREIGN_MODULE and error.name == "onnx_ir" else str(error.name)
        raise ExportError(NEEDED.get(named, f"{EXPORT} ({error.name} is missing)")) from error


def copy_links(folder: Path, progress: Progress) -> None:
    """Replace hard links in a folder by copies of the files."""
    shared = [path for path in folder.iterdir() if path.stat().st_nlink > 1]
    for done, path in enumerate(shared):
        progress(f"copying {path.name}", done, len(shared))
        own = path.with_name(f"{path.name}.copy")
        shutil.copy2(path, own)  # with its time of change, by which its hash may still be recorded
        own.replace(path)


def export_in_place(folder: Path, dtype: str, progress: Progress) -> None:
    """Write `model.onnx` beside a checkpoint's weights, so that its folder is a hooked model."""
    if not folder.is_dir():
        raise ExportError(f"{folder} is a file: only a checkpoint in a folder of its own is exported in place")
    if (folder / GRAPH).exists() and not is_hooked(folder / GRAPH):
        raise ExportError(
            f"{folder / GRAPH} is another tool's file, which would be replaced: give a folder to write to"
        )
    partial = partial_path(folder / "export")
    export(folder, partial, dtype, progress)
    try:
        files = [path for path in partial.iterdir() if path.name == GRAPH or not (folder / path.name).exists()]
        for path in sorted(files, key=lambda path: path.name == GRAPH):  # the graph last: then all it reads is there
            path.replace(folder / path.name)
    except OSError as error:
        raise ExportError(f"cannot write into {folder}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
