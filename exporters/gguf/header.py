"""A GGUF file: its metadata, where each tensor lies, and the tensors in numbers.

Little-endian files of versions 2 and 3, which is what llama.cpp writes; numbers by the `gguf` package's own rules for
each type.
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import check_regular

MAGIC = b"GGUF"
OLDER = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt"}  # llama.cpp's formats before GGUF
VERSIONS = (2, 3)
ALIGNMENT = 32  # where the file states none
MAX_DIMS = 4  # ggml's own
PIECE = 2**24  # numbers that are in memory at a time
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a GGUF file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # outermost axis first, as in torch; GGUF itself has the innermost first
    offset: int
    length: int


@dataclass(frozen=True)
class Header:
    """Everything in front of a GGUF file's tensors."""

    file: Path
    metadata: dict[str, Any]  # keys and values; arrays of strings are lists, arrays of numbers numpy arrays
    tensors: dict[str, TensorInfo]  # by llama.cpp's names, in the file's order


def read_header(file: Path) -> Header:
    """Read the metadata and the table of tensors of a GGUF file."""
    try:
        check_regular(file)
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(file, data).header()
    except ModelError as error:
        raise ExportError(str(error)) from error
    except (OSError, ValueError, RecursionError) as error:  # an empty file is a ValueError; so is a text of no UTF-8
        raise ExportError(f"{file} is no intact GGUF file: {error}") from error


class _Reader:
    """A place in a mapped file, moved by what is read."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def header(self) -> Header:
        self._check_start()
        tensors, keys = self._number("Q"), self._number("Q")
        metadata = self._table(keys, "metadata key", lambda: self._value(self._number("I")))
        entries = self._table(tensors, "tensor", self._entry)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}, no power of two")
        start = -(-self.at // alignment) * alignment
        infos = {name: self._info(name, start, *entries[name]) for name in entries}
        for one, other in pairwise(sorted(infos.values(), key=lambda info: info.offset)):
            if one.offset + one.length > other.offset:
                raise self._damaged(f"its tensors {one.name} and {other.name} lie on each other")
        return Header(self.file, metadata, infos)

    def _check_start(self) -> None:
        magic = self._take(4)
        if magic in OLDER:
            raise ExportError(f"{self.file} is {OLDER[magic]}, older than GGUF: convert its checkpoint again")
        if magic != MAGIC:
            raise ExportError(f"{self.file} is no GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
        version = self._number("I")
        # a small number read in the wrong order of bytes has its bits in the upper half
        if version & 0xFFFF == 0:
            raise ExportError(f"{self.file} is a GGUF file of big-endian machines; gguf-convert-endian turns it round")
        if version not in VERSIONS:
            versions = " and ".join(map(str, VERSIONS))
            raise ExportError(f"{self.file} is GGUF version {version}; versions {versions} are read")

    def _table(self, count: int, what: str, read: Callable[[], Any]) -> dict[str, Any]:
        table: dict[str, Any] = {}
        for _ in range(count):
            name = self._text()
            if name in table:
                raise self._damaged(f"{what} {name!r} stands in it twice")
            table[name] = read()
        return table

    def _value(self, kind: int, nested: bool = False) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == STRING:
            return self._text()
        if kind != ARRAY or nested:
            raise self._damaged(f"a value of type {kind} at byte {self.at}")
        inner, count = self._number("I"), self._number("Q")
        if inner in SCALARS:
            dtype = np.dtype("<" + SCALARS[inner])
            return np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return [self._value(inner, nested=True) for _ in range(count)]

    def _entry(self) -> tuple[tuple[int, ...], int, int]:
        dims = self._number("I")
        if dims > MAX_DIMS:
            raise self._damaged(f"a tensor of {dims} axes")
        shape = tuple(self._number("Q") for _ in range(dims))
        return shape[::-1], self._number("I"), self._number("Q")  # innermost first in the file

    def _info(self, name: str, start: int, shape: tuple[int, ...], number: int, offset: int) -> TensorInfo:
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise ExportError(f"{self.file}: tensor {name} has type {number}, which gguf does not know") from error
        block, size = GGML_QUANT_SIZES[kind]
        if 0 in shape:
            raise self._damaged(f"tensor {name} is {list(shape)}, no numbers")
        if not shape or shape[-1] % block:
            raise self._damaged(f"tensor {name} is {list(shape)}, no whole blocks of {kind.name}")
        length = prod(shape) // block * size
        if start + offset + length > len(self.data):
            raise ExportError(
                f"{self.file} is truncated: tensor {name} ends at byte {start + offset + length:,}, the file at "
                f"{len(self.data):,}"
            )
        return TensorInfo(name, kind, shape, start + offset, length)

    def _text(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        return value

    def _take(self, count: int) -> bytes:
        # A count is believed only as far as the file has bytes for it: a damaged or hostile header allocates nothing.
        if count > len(self.data) - self.at:
            raise ExportError(
                f"{self.file} is truncated or damaged: {count:,} bytes are announced at byte {self.at:,}, and the file "
                f"has {len(self.data):,}"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def _damaged(self, what: str) -> ExportError:
        return ExportError(f"{self.file} is damaged: {what}")


def read_tensor(header: Header, info: TensorInfo) -> NDArray[np.float32]:
    """A whole tensor in float32; see `read_pieces`."""
    return np.concatenate([*read_pieces(header, info)]).reshape(info.shape)


def read_pieces(header: Header, info: TensorInfo) -> Iterator[NDArray[np.float32]]:
    """A tensor in float32, [rows, length of its last axis], some rows at a time."""
    width = info.shape[-1]
    block, size = GGML_QUANT_SIZES[info.kind]
    row = width // block * size
    # whole rows: blocks of a type never go over the end of one
    rows, most = info.length // row if row else 0, max(1, PIECE // max(1, width))
    with header.file.open("rb") as file:
        file.seek(info.offset)
        for first in range(0, rows, most):
            count = min(most, rows - first)
            data = np.frombuffer(file.read(count * row), np.uint8)
            try:
                numbers = dequantize(data.reshape(count, row), info.kind)
            except NotImplementedError as error:
                raise ExportError(
                    f"{header.file}: tensor {info.name} is stored as {info.kind.name}, which gguf does not dequantise"
                ) from error
            yield numbers.astype(np.float32, copy=False)
