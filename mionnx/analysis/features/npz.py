"""Arrays of an `.npz` file, in memory that is in proportion to the file.

A member is a `.npy` file in a zip archive: magic, header, numbers. Its header is compared with the bytes that the
archive says it has before memory is asked for, the sum of these with the size of the file, and the numbers are read
piece by piece: neither a header nor a few bytes that unpack to gigabytes take more than `ROOM`.
"""

import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph.folder_file import check_regular

ROOM, UNPACKED_SHARE = 2**26, 32  # bytes that all members may unpack to, and sizes of the file besides
MEMBERS = 100
PIECE_BYTES = 2**20
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
THROWN = (  # what zipfile, its codecs and numpy's reader of headers throw of a damaged file
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    EOFError,
    SyntaxError,
    TokenError,
    RuntimeError,  # encrypted, or a method of compression that zipfile does not have
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
)


def read_npz(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """The arrays of a file, one after the other: name, array of floating-point numbers."""
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            unpacked = sum(member.file_size for member in members)
            if len(members) > MEMBERS or unpacked > ROOM + UNPACKED_SHARE * path.stat().st_size:
                size = f"{len(members)} members of {unpacked:,} bytes in a file of {path.stat().st_size:,}"
                raise ModelError(f"{path} has {size}: refused")
            for member in members:
                if not member.filename.endswith(".npy"):
                    raise ModelError(f"{path}: the member {member.filename!r} is no array")
                with archive.open(member) as file:
                    yield member.filename.removesuffix(".npy"), _array(path, member, file)
    except THROWN as error:
        raise ModelError(f"{path} is no archive of arrays, or a damaged one: {error}") from error


def _array(path: Path, member: zipfile.ZipInfo, file: IO[bytes]) -> NDArray[Any]:
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ModelError(f"{path}: {member.filename} is of the version {version} of the format, which no weights are")
    shape, by_columns, dtype = HEADERS[version](file)
    if dtype.kind != "f":
        raise ModelError(f"{path}: {member.filename} has numbers of the dtype {dtype}; weights are floating-point")
    length = prod(shape) * dtype.itemsize
    if length != member.file_size - file.tell() or any(size < 0 for size in shape):
        rest = member.file_size - file.tell()
        raise ModelError(f"{path}: {member.filename} of shape {list(shape)} takes {length:,} bytes, and has {rest:,}")
    data = bytearray()
    while len(data) < length:
        piece = file.read(min(PIECE_BYTES, length - len(data)))
        if not piece:
            raise ModelError(f"{path}: {member.filename} is truncated: {len(data):,} of {length:,} bytes")
        data += piece
    return np.frombuffer(data, dtype).reshape(shape, order="F" if by_columns else "C")
