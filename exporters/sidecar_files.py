"""Files beside a hooked model: the checkpoint's config and tokenizer files."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import files_beside
from mionnx.graph.hooked_model import KEPT


def find_files(folder: Path) -> list[Path]:
    """The small regular files of a checkpoint that are kept beside its graph."""
    try:
        return files_beside(folder, KEPT)
    except ModelError as error:
        raise ExportError(str(error)) from error


def keep_files(files: Iterable[Path], target: Path) -> None:
    """Copy small files into the hooked model's folder, unless they lie there."""
    for file in files:
        if file.parent.resolve() != target.resolve():
            shutil.copyfile(file, target / file.name)
