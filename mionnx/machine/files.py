"""Files that appear whole or not at all."""

import os
from pathlib import Path

from mionnx.errors import SpecFileError


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that nobody ever sees a part of it.

    Raises:
        SpecFileError: the folder is missing, read-only or full.
    """
    try:
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        raise SpecFileError(f"cannot write {path}: {error}") from error


def make_folder(path: Path) -> None:
    """Make a folder, if there is none.

    Raises:
        SpecFileError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecFileError(f"cannot make the folder {path}: {error}") from error
