"""Shards in safetensors' format, written piece by piece and under a temporary name until they are whole."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import SpecFileError
from mionnx.machine.streamed_file import TYPE_NAMES, Kind, StreamedFile, streamed

NUMPY_NAMES = {short: name for name, short in TYPE_NAMES.items()}


def new_shard(path: Path, kinds: Mapping[str, Kind]) -> AbstractContextManager[StreamedFile]:
    """Write a shard under a temporary path, which stays when the body is done."""
    return streamed(path, kinds, SpecFileError)


def open_shard(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a shard, mapped from the disk and not read yet.

    Raises:
        SpecFileError: the file is missing, or is no whole shard.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= path.stat().st_size:
                raise ValueError("its header does not fit into it")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        return {name: _mapped(path, 8 + length, entry) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecFileError(f"{path} is no whole shard of activations: {error}") from error


def _mapped(path: Path, start: int, entry: Mapping[str, Any]) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    dtype, shape = np.dtype(NUMPY_NAMES[entry["dtype"]]), tuple(entry["shape"])
    if end - begin != prod(shape) * dtype.itemsize or start + end > path.stat().st_size:
        raise ValueError("its arrays do not fit into it")
    if not prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start + begin, shape)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SpecFileError(f"cannot read {path}: {error}") from error
