"""A foreign ONNX file: found in a folder as the Hub has them, and read with its weights left where they lie.

Weights beside the file are external data already. Those inside the file become external data too: the file itself is
their file, at the offset of their bytes.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from exporters.adopt.branches import inline_branch
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import check_regular, inside
from mionnx.graph.metadata import PREFIX
from mionnx.graph.onnx_file import properties, read

SUBFOLDER = "onnx"  # of the Hub's layout
PREFERRED = ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx", "decoder_model.onnx")
SMALL = 1024  # bytes up to which a weight stays inside the graph
GRAPH, INITIALIZER, NAME, RAW_DATA = (
    7,
    5,
    8,
    9,
)  # protobuf's numbers of the fields of ModelProto, GraphProto, TensorProto
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types


def onnx_files(folder: Path) -> list[Path]:
    """Foreign ONNX files of a folder and its subfolder `onnx`, preferred ones first.

    A hooked model is none.
    """
    if folder.is_file():
        return [folder] if folder.suffix == ".onnx" else []
    found = [*folder.glob("*.onnx"), *(folder / SUBFOLDER).glob("*.onnx")]
    places = {name: place for place, name in enumerate(PREFERRED)}
    ordered = sorted(found, key=lambda path: (places.get(path.name, len(places)), path.parent != folder, path.name))
    return [path for path in ordered if path.is_file() and not _is_hooked(path)]


def _is_hooked(path: Path) -> bool:
    try:
        return not properties(read(path)).keys().isdisjoint((f"{PREFIX}format", f"{PREFIX}hooks"))
    except ModelError:
        return False


def choose(folder: Path, file: str | None = None) -> Path:
    """The file of a folder to adopt.

    Args:
        folder: a model's folder, or the file itself.
        file: the name of one of its files, where it is not to be the first of `onnx_files`.

    Raises:
        ExportError: there is none, or none of that name.
    """
    found = onnx_files(folder)
    if file is not None:
        named = [path for path in found if file in (path.name, path.stem, str(path.relative_to(folder)))]
        if not named:
            names = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
            raise ExportError(f"{folder} has no ONNX file {file!r}; it has {names}")
        return named[0]
    if not found:
        raise ExportError(f"{folder} holds no ONNX file")
    return found[0]


def config_folder(file: Path) -> Path:
    """The folder of the config and the tokenizer of a file: its own, or the one above `onnx`."""
    own = file.parent
    above = own.name == SUBFOLDER and not (own / "config.json").is_file() and (own.parent / "config.json").is_file()
    return own.parent if above else own


@dataclass(frozen=True)
class Source:
    """A file that was read.

    Attributes:
        file: its path.
        model: the model, its larger weights external data.
        weight_files: name in the adopted folder -> path of the file that holds the weights.
        stock: the same, all of its branches still in it.
        flag: of a merged decoder, the input that chose between its branches; see `branches`.
    """

    file: Path
    model: ir.Model
    weight_files: dict[str, Path]
    stock: onnx.ModelProto
    flag: str | None = None


def open_source(file: Path) -> Source:
    """Read a file without its weights.

    Raises:
        ExportError: it is no ONNX, or its weights lie outside of its folder.
    """
    try:
        check_regular(file)
        model = ir.load(file)
        if not len(model.graph):
            raise ExportError(f"{file} holds no graph: it is empty or truncated")
        files: dict[str, Path] = {}
        held = {name: span for name, span in _embedded(file) if span[1] > SMALL}
        whole = [*model.graph.initializers.values()]
        for value in whole:
            _place(value, file, held, files)
        stock = ir.to_proto(model)
        flag = inline_branch(model)
        for value in [value for value in model.graph.initializers.values() if value not in whole]:
            _place(value, file, {}, files)
    except ModelError as error:
        raise ExportError(str(error)) from error
    except (DecodeError, ValueError, RuntimeError, OSError, KeyError, IndexError) as error:  # protobuf's and onnx_ir's
        raise ExportError(f"{file} cannot be read as an ONNX model: {error}") from error
    return Source(file, model, files, stock, flag)


def _place(value: ir.Value, file: Path, held: dict[str, tuple[int, int]], files: dict[str, Path]) -> None:
    """Point a weight at its file, by the file's name in the adopted folder."""
    tensor = value.const_value
    if isinstance(tensor, ir.ExternalTensor):
        path = inside(file.parent, str(tensor.location))
        start, length = tensor.offset or 0, tensor.length or tensor.nbytes
        name = path.name
    elif value.name in held and tensor is not None and tensor.dtype != ir.DataType.STRING:
        path, (start, length) = file, held[value.name]
        name = f"{file.stem}.weights"
    else:
        return
    files[name] = path
    value.const_value = ir.ExternalTensor(
        name, start, length, tensor.dtype, shape=tensor.shape, name=value.name, base_dir=path.parent
    )


def _embedded(file: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name, and offset and length, of each initializer whose bytes lie in the file."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for start, end in _fields(data, 0, len(data), GRAPH):
            for first, last in _fields(data, start, end, INITIALIZER):
                name = next((data[a:b].decode() for a, b in _fields(data, first, last, NAME)), "")
                for begin, stop in _fields(data, first, last, RAW_DATA):
                    yield name, (begin, stop - begin)


def _fields(data: mmap.mmap, at: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Start and end of the contents of a message's fields of one number that hold bytes."""
    while at < end:
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            _, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            at += struct.calcsize("<q" if kind == FIXED64 else "<i")
        elif kind == BYTES:
            length, at = _varint(data, at)
            if number == wanted:
                yield at, at + length
            at += length
        else:
            raise ExportError(f"the file is damaged at byte {at}: no protobuf")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number of variable length, and the place after it."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
