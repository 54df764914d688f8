"""Adoption of foreign ONNX files by hand: which file, and how well the laws of a decoder hold in it.

`from_pretrained` adopts a folder by itself, into the store.
"""

from pathlib import Path
from typing import Any

from mionnx.errors import ExportError
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.progress import Progress
from mionnx.run import stock_calls
from mionnx.run.exporting import MADE, NEEDED, copy_links, foreign_exporter
from mionnx.run.find_model import hub_folder, part_of
from mionnx.run.repository import MAIN, Version


def adopt(
    source: Path, target: Path, file: str | None, progress: Progress, copy: bool = False, version: Version = MAIN
) -> Any:
    """Write a foreign ONNX file as a hooked model.

    Args:
        source: a folder with ONNX files, one of them, or a Hub id, of which the chosen file alone is downloaded.
        copy: give the folder weight files of its own, where otherwise they are the source's under another name.

    Returns:
        `exporters.adopt.assemble.Adopted`: the file, hook points, expanded operators, laws and notes.

    Raises:
        ExportError: the target exists, onnx_ir is not installed, or the file is no decoder that is understood.
    """
    if target.exists():
        raise ExportError(f"{target} exists already")
    remove_leftovers(target.parent, holding=MADE)
    try:
        with new_folder(target, ExportError) as partial:
            at = part_of(source, version) if source.exists() else hub_folder(str(source), file, version, progress)
            adopted = foreign_exporter().adopt(at, partial, file, progress)
            if copy:
                copy_links(partial, progress)
            return adopted
    except ImportError as error:
        raise ExportError(NEEDED.get(str(error.name), f"adopting needs {error.name}")) from error


def check_laws(folder: Path) -> Any:
    """Run a hooked model once and compare it with the laws of a decoder.

    Returns:
        a list of `exporters.adopt.self_check.LawResult`.
    """
    try:
        return foreign_exporter().check(folder)
    except ImportError as error:
        raise ExportError(NEEDED.get(str(error.name), f"checking needs {error.name}")) from error


def try_calls(folder: Path) -> dict[str, str]:
    """Try all kinds of calls in an adopted file's own graph, before the first call of a kind.

    Returns:
        a kind in words -> what speaks against it, "" if nothing does; empty if the model has no such graph.
    """
    return stock_calls.try_all(HookedModel.open(folder))
