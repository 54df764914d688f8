"""The names of a checkpoint's tensors, read without torch and without unpickling anything."""

import json
import pickletools
import struct
import zipfile
from pathlib import Path

MAX_HEADER = 100_000_000
MAX_PICKLE = 16_000_000


def tensor_names(folder: Path) -> set[str]:
    """Names of a checkpoint's tensors, read without torch; empty if there is no checkpoint.

    Args:
        folder: of the checkpoint, or a `.pth` file.
    """
    names: set[str] = set()
    if folder.is_file():
        return _pickled_names(folder)
    for file in _files(folder, "*.safetensors"):
        names |= _safetensors_names(file)
    if not names:
        for file in _files(folder, "*.pth"):
            names |= _pickled_names(file)
    return names


def _files(folder: Path, pattern: str) -> list[Path]:
    """Regular files only: a device or a pipe has no end."""
    return [file for file in folder.glob(pattern) if file.is_file()]


def _safetensors_names(file: Path) -> set[str]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            return set(json.loads(stream.read(min(length, MAX_HEADER)))) - {"__metadata__"}
    except (OSError, ValueError, struct.error, TypeError, RecursionError):
        return set()


def _pickled_names(file: Path) -> set[str]:
    """Strings of a `.pth`, its tensors' names among them; the pickle is never executed."""
    try:
        with zipfile.ZipFile(file) as archive:
            entry = next(info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            if entry.file_size > MAX_PICKLE:
                return set()
            operations = pickletools.genops(archive.read(entry))
            return {argument for _, argument, _ in operations if isinstance(argument, str)}
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError, RuntimeError, NotImplementedError):
        return set()
