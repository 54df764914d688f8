"""Adoption of foreign ONNX files by hand: which file, and how well the laws of a decoder hold in it.

`from_pretrained` adopts a folder by itself, into the store.
"""

from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from mionnx.errors import ExportError
from mionnx.machine.leftovers import new_folder, remove_leftovers
from mionnx.machine.progress import Progress
from mionnx.run.find_model import FOREIGN, MADE, NEEDED


def adopt(source: Path, target: Path, file: str | None, progress: Progress) -> Any:
    """Write a foreign ONNX file as a hooked model.

    Args:
        source: a folder with ONNX files, or one of them.
        target: the folder to make.
        file: the name of the file, where the folder has several.
        progress: called as (stage, done, total).

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
            return _exporter().adopt(source, partial, file, progress)
    except ImportError as error:
        raise ExportError(NEEDED.get(str(error.name), f"adopting needs {error.name}")) from error


def check_laws(folder: Path) -> Any:
    """Run a hooked model once and compare it with the laws of a decoder.

    Returns:
        a list of `exporters.adopt.self_check.LawResult`.

    Raises:
        ExportError: onnx_ir is not installed, or the model does not run.
    """
    try:
        return _exporter().check(folder)
    except ImportError as error:
        raise ExportError(NEEDED.get(str(error.name), f"checking needs {error.name}")) from error


def _exporter() -> ModuleType:
    for entry in entry_points(group="mionnx.exporters", name=FOREIGN):
        return entry.load()
    raise ExportError("no exporter of foreign ONNX files is installed")
