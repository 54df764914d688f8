"""Checks on files of an untrusted folder: inside it, regular, of a bounded size.

A link may lead to another file of the folder, or, in the Hugging Face Hub's cache (`snapshots/{revision}/{name}`), into
the `blobs` beside `snapshots`. Devices, pipes and sockets are refused before a byte is read.
"""

import json
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mionnx.errors import ModelError

LARGEST_JSON = 64 * 2**20  # bytes
LARGEST_BESIDE = 2**30  # bytes of a file beside a graph: a vocabulary, a config


def inside(folder: Path, name: str) -> Path:
    """Resolve a file name that a checkpoint or a graph gives, links followed."""
    path = resolve(folder, name)
    check_regular(path)
    return path


def files_beside(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Small files of a folder by patterns of their names."""
    files = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    for file in files:
        check_regular(inside(folder, str(file.relative_to(folder))), LARGEST_BESIDE)
    return files


def copy_beside(files: Iterable[Path], folder: Path, target: Path) -> None:
    """Copy files of a folder, those of its inner folders into such, to another folder."""
    for file in files:
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def resolve(folder: Path, name: str) -> Path:
    """Resolve a file name inside a folder; the file need not be there."""
    if not isinstance(name, str) or not name or "\0" in name or Path(name).is_absolute():
        raise ModelError(f"{name!r} names no file inside {folder}: refused")
    root = folder.resolve()
    named = Path(name)
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError) as error:  # a name too long, links in a circle
        raise ModelError(f"{name!r} names no file inside {folder}: {error}") from error
    # ".." is refused even where it leads back, as "../model/file" does until the folder has another name
    outside = ".." in named.parts or not any(path.is_relative_to(base) for base in _roots(root)) or path == root
    if outside:
        leads = f", and leads to {path}" if ".." not in named.parts else ""
        raise ModelError(f"{name!r} points outside {folder}{leads}: refused; files of a model lie in its folder")
    return path


def _roots(root: Path) -> list[Path]:
    """The folder, and the Hub's blobs if it is a snapshot in the Hub's cache."""
    # the Hub's cache: snapshots/COMMIT/file is a link to ../../blobs/SHA256
    snapshots = [parent for parent in root.parents if parent.name == "snapshots"][:1]
    return [root, *(parent.parent / "blobs" for parent in snapshots)]


def check_regular(path: Path, largest: int | None = None) -> None:
    """Refuse anything but a regular file of at most `largest` bytes."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # a name that no file can have is a ValueError
        reason = error.strerror if isinstance(error, OSError) else None
        raise ModelError(f"cannot read {path}: {reason or error}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, a pipe or a socket"
        raise ModelError(f"{path} is {kind}, no file: refused")
    if largest is not None and status.st_size > largest:
        raise ModelError(f"{path} has {status.st_size:,} bytes, more than the {largest:,} that are read of such a file")


def read_json(path: Path, largest: int = LARGEST_JSON) -> Any:
    """Read a JSON file."""
    check_regular(path, largest)
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except ModelError as error:
        raise ModelError(f"{path} is damaged: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; what is none, or nested deeper than Python's parser follows, is refused."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ModelError("it is nested too deep") from error
    except ValueError as error:
        raise ModelError(str(error)) from error
