"""Atomic writes: a file or folder appears complete, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mionnx.errors import SpecFileError
from mionnx.machine.progress import Progress, silent


@contextmanager
def atomic_path(path: Path, error: type[Exception] = SpecFileError) -> Iterator[Path]:
    """Yield a temporary path beside the target, renamed into place if the body succeeds and removed if it fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        _remove(partial)
        yield partial
        partial.replace(path)
    except OSError as cause:
        raise error(f"cannot write {path}: {cause}") from cause
    finally:
        _remove(partial)


def _remove(path: Path) -> None:
    with suppress(OSError):  # a name that no file can have
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_no_file(path: Path) -> bool:
    """Whether a path is a folder, a device or a pipe; a name that no file can have is none."""
    try:
        return path.exists() and not path.is_file()
    except (OSError, ValueError):
        return False


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: a temporary file is renamed into place."""
    try:
        with atomic_path(path) as partial:
            partial.write_bytes(data)
    except ValueError as error:  # a path that no file can have
        raise SpecFileError(f"cannot write {path}: {error}") from error


def link_or_copy(file: Path, target: Path, progress: Progress = silent) -> None:
    """Hard-link a file, or copy it to another file system, or where there are no hard links."""
    try:
        os.link(file.resolve(), target)  # what a link points to: some systems would link the link
    except OSError:
        size = file.stat().st_size
        progress(f"copying {file.name}", 0, size)
        shutil.copy2(file, target)  # with its times, as a link has them: they tell whether the two are still the same
        progress(f"copying {file.name}", size, size)


def make_folder(path: Path) -> None:
    """Make a folder, if there is none."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecFileError(f"cannot make the folder {path}: {error}") from error
