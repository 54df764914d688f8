"""Files beside a hooked model: the checkpoint's config and tokenizer files."""

from collections.abc import Iterable
from pathlib import Path

from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import copy_beside, files_beside
from mionnx.graph.hooked_model import KEPT


def find_files(folder: Path) -> list[Path]:
    """The small regular files of a checkpoint that are kept beside its graph."""
    try:
        return files_beside(folder, KEPT)
    except ModelError as error:
        raise ExportError(str(error)) from error


def keep_files(files: Iterable[Path], folder: Path, target: Path) -> None:
    """Copy small files of a checkpoint's folder into the hooked model's, unless they lie there."""
    if folder.resolve() != target.resolve():
        copy_beside(files, folder, target)
