"""Shards in safetensors' format, written piece by piece: a value of any size needs no memory.

1. All sizes are known before: the header is written first, and room for the whole file is reserved, so that a full disk
   is noticed at once.
2. Pieces go to their places in any order.
3. The file has a temporary name until it is whole.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import SpecFileError

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
NAMES |= {"int32": "I32", "int64": "I64", "bool": "BOOL", "uint8": "U8", "int8": "I8"}
DTYPES = {short: name for name, short in NAMES.items()}
ALIGNMENT = 8
Kind = tuple["np.dtype[Any]", tuple[int, ...]]  # dtype and shape


def header_of(kinds: Mapping[str, Kind]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these arrays, and the place of each; wide numbers come first."""
    entries, places, at = {}, {}, 0
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda one: (-one[1][0].itemsize, one[0])):
        size = prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype.name], "shape": [*shape], "data_offsets": [at, at + size]}
        places[name], at = at, at + size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + place for name, place in places.items()}


class ShardFile:
    """A file that is being written.

    Attributes:
        kinds: name -> dtype and shape of each array.
    """

    def __init__(self, file: BinaryIO, kinds: Mapping[str, Kind]) -> None:
        head, self._places = header_of(kinds)
        self._file, self.kinds = file, dict(kinds)
        size = len(head) + sum(prod(shape) * dtype.itemsize for dtype, shape in kinds.values())
        os.posix_fallocate(file.fileno(), 0, size)
        os.pwrite(file.fileno(), head, 0)

    def put(self, name: str, at: int, values: NDArray[Any]) -> None:
        """Write entries of an array, from index `at` of its first axis on."""
        dtype, shape = self.kinds[name]
        begin = self._places[name] + at * prod(shape[1:]) * dtype.itemsize
        data = np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8)
        while len(data):
            written = os.pwrite(self._file.fileno(), data.data, begin)
            data, begin = data[written:], begin + written


@contextmanager
def new_shard(path: Path, kinds: Mapping[str, Kind]) -> Iterator[ShardFile]:
    """Write a shard under a temporary path, which stays when the body is done.

    Raises:
        SpecFileError: no room, or a folder that cannot be written to.
    """
    try:
        with path.open("w+b") as file:
            yield ShardFile(file, kinds)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise SpecFileError(f"cannot write {path}: {error}") from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise


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
    dtype, shape = np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"])
    if end - begin != prod(shape) * dtype.itemsize or start + end > path.stat().st_size:
        raise ValueError("its arrays do not fit into it")
    if not prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start + begin, shape)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal.

    Raises:
        SpecFileError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise SpecFileError(f"cannot read {path}: {error}") from error
