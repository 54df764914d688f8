"""`.safetensors` files that are written piece by piece: an array of any size needs no memory.

1. All sizes are known before: the header is written first, and room for the whole file is reserved, so that a full disk
   is noticed at once.
2. Pieces go to their places in any order.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import ModelError

TYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
TYPE_NAMES |= {"int32": "I32", "int64": "I64", "bool": "BOOL", "uint8": "U8", "int8": "I8"}
ALIGNMENT = 8
Kind = tuple["np.dtype[Any]", tuple[int, ...]]  # dtype and shape


def header_of(kinds: Mapping[str, Kind]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these arrays, and the place of each."""
    # Wide numbers come first, for their alignment; arrays of one width are in the order in which they are given.
    entries, places, at = {}, {}, 0
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda one: -one[1][0].itemsize):
        if dtype.name not in TYPE_NAMES:
            raise ModelError(f"{name} is {dtype.name}, which a .safetensors file cannot hold: {', '.join(TYPE_NAMES)}")
        size = prod(shape) * dtype.itemsize
        entries[name] = {"dtype": TYPE_NAMES[dtype.name], "shape": [*shape], "data_offsets": [at, at + size]}
        places[name], at = at, at + size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)  # so that the values begin aligned, and can be mapped
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + place for name, place in places.items()}


class StreamedFile:
    """A file that is being written."""

    def __init__(self, file: BinaryIO, kinds: Mapping[str, Kind]) -> None:
        head, self.places = header_of(kinds)  # places: name -> its first byte
        self._file, self.kinds = file, dict(kinds)
        size = len(head) + sum(prod(shape) * dtype.itemsize for dtype, shape in kinds.values())
        if hasattr(os, "posix_fallocate"):  # which macOS lacks: there a disk fills up while pieces are written
            os.posix_fallocate(file.fileno(), 0, size)
        os.pwrite(file.fileno(), head, 0)

    def put(self, name: str, at: int, values: NDArray[Any]) -> None:
        """Write entries of an array, from index `at` of its first axis on."""
        dtype, shape = self.kinds[name]
        begin = self.places[name] + at * prod(shape[1:]) * dtype.itemsize
        data = np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8)
        while len(data):  # a write may take a part only
            written = os.pwrite(self._file.fileno(), data.data, begin)
            data, begin = data[written:], begin + written


@contextmanager
def streamed(path: Path, kinds: Mapping[str, Kind], error: type[Exception]) -> Iterator[StreamedFile]:
    """Open a file of arrays (name -> dtype and shape) to write; it is removed if the body fails."""
    try:
        with path.open("w+b") as file:
            yield StreamedFile(file, kinds)
            file.flush()
            os.fsync(file.fileno())
    except OSError as cause:
        path.unlink(missing_ok=True)
        raise error(f"cannot write {path}: {cause}") from cause
    except BaseException:
        path.unlink(missing_ok=True)
        raise
