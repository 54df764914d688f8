"""ONNX files that hold their weights: read without them, whatever their size.

Protobuf reads a message whole; these functions walk over the fields of the mapped file and touch no bytes of weights.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import onnx

from mionnx.errors import ModelError
from mionnx.graph.folder_file import check_regular
from mionnx.graph.onnx_file import KEPT_INSIDE, check_texts

LONGEST = 10  # bytes of a number of variable length
FIELDS = 2**19  # of one message; a graph's are its nodes, weights and notes on values
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types
GRAPH_FIELD = onnx.ModelProto.GRAPH_FIELD_NUMBER
METADATA = onnx.ModelProto.METADATA_PROPS_FIELD_NUMBER
INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER

Field = tuple[int, int, int, int]  # its number, where it begins, where its contents begin and end


def read_light(path: Path) -> onnx.ModelProto:
    """Read a model; its larger initializers become external data, in the model's own file."""
    with _mapped(path) as data:
        parts = [
            _message(GRAPH_FIELD, _graph(data, begin, end, path.name)) if number == GRAPH_FIELD else data[first:end]
            for number, first, begin, end in _fields(data, 0, len(data))
        ]
    proto = onnx.ModelProto.FromString(b"".join(parts))
    check_texts(proto, str(path))
    return proto


def read_properties(path: Path) -> dict[str, str]:
    """The `metadata_props` of a file, of which nothing else is read."""
    with _mapped(path) as data:
        texts = [data[begin:end] for number, _, begin, end in _fields(data, 0, len(data)) if number == METADATA]
    entries = [onnx.StringStringEntryProto.FromString(entry) for entry in texts]
    for entry in entries:
        check_texts(entry, str(path))
    return {entry.key: entry.value for entry in entries}


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    check_regular(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, IndexError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} cannot be read as an ONNX model: {error}") from error


def _graph(data: mmap.mmap, start: int, stop: int, location: str) -> bytes:
    """The message of a graph without the bytes of its larger initializers."""
    return b"".join(
        _message(INITIALIZER, _tensor(data, begin, end, location))
        if number == INITIALIZER and end - begin > KEPT_INSIDE
        else data[first:end]
        for number, first, begin, end in _fields(data, start, stop)
    )


def _tensor(data: mmap.mmap, start: int, stop: int, location: str) -> bytes:
    """The message of a tensor, its bytes external data if there are many."""
    fields = [*_fields(data, start, stop)]
    spans = [(begin, end) for number, _, begin, end in fields if number == RAW_DATA and end - begin > KEPT_INSIDE]
    if not spans:
        return data[start:stop]
    ((begin, end),) = spans[-1:]  # of a field that is there twice, the last counts
    rest = (data[first:last] for number, first, _, last in fields if number != RAW_DATA)
    tensor = onnx.TensorProto.FromString(b"".join(rest))
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", begin), ("length", end - begin)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor.SerializeToString()


def _message(number: int, contents: bytes) -> bytes:
    """A field of bytes: its number, its length, its contents."""
    # a field begins with its number, and in the lowest three bits the kind of what follows
    return _written(number << 3 | BYTES) + _written(len(contents)) + contents


def _written(number: int) -> bytes:
    text = bytearray()
    # seven bits a byte, the lowest first; the eighth says that another follows
    while number > 0x7F:
        text.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*text, number])


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[Field]:
    for number in count():
        if at >= end:
            return
        if number > FIELDS:  # in a damaged file every two bytes may be a field
            raise ValueError(f"it has more than {FIELDS:,} fields")
        first = at
        key, at = _varint(data, at)
        begin, kind = at, key & 7
        if kind == VARINT:
            _, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            at += struct.calcsize("<q" if kind == FIXED64 else "<i")
        elif kind == BYTES:
            length, begin = _varint(data, at)
            at = begin + length
        else:
            raise ValueError(f"no protobuf at byte {first}")
        if at > end:
            raise ValueError(f"the field at byte {first} ends at {at}, beyond {end}")
        yield key >> 3, first, begin, at


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    number = 0
    for place in range(LONGEST):
        byte = data[at + place]
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, at + place + 1
    raise ValueError(f"the number at byte {at} does not end after {LONGEST} bytes")
