"""A foreign ONNX file: found in a folder as the Hub has them, and read with its weights left where they lie.

Weights beside the file are external data already. Those inside the file become external data too: the file itself is
their file, at the offset of their bytes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from exporters.adopt.branches import inline_branch
from mionnx.errors import ExportError, ModelError
from mionnx.graph.embedded_weights import read_light, read_properties
from mionnx.graph.folder_file import inside
from mionnx.graph.known_value import Dims
from mionnx.graph.metadata import PREFIX
from mionnx.graph.onnx_file import tensors_of
from mionnx.graph.stock_graph import checkable
from mionnx.graph.validate import check, check_counts

SUBFOLDER = "onnx"  # of the Hub's layout
PREFERRED = ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx", "decoder_model.onnx")


def onnx_files(folder: Path) -> list[Path]:
    """Foreign ONNX files of a folder and its subfolder `onnx`, preferred ones first.

    A hooked model is none.
    """
    if folder.is_file():
        return [folder] if folder.suffix == ".onnx" else []
    found = [*folder.glob("*.onnx"), *(folder / SUBFOLDER).glob("*.onnx")]
    paths = {str(path.relative_to(folder)): path for path in found}
    return [paths[name] for name in in_order([*paths]) if paths[name].is_file() and not _is_hooked(folder, name)]


def in_order(names: Sequence[str]) -> list[str]:
    """Paths of ONNX files in a folder or a repository, preferred ones first."""
    places = {name: place for place, name in enumerate(PREFERRED)}
    paths = [PurePosixPath(name) for name in names if str(PurePosixPath(name).parent) in (".", SUBFOLDER)]
    return [
        str(path)
        for path in sorted(paths, key=lambda path: (places.get(path.name, len(places)), len(path.parts), path.name))
    ]


def pick(names: Sequence[str], file: str | None, where: str) -> str:
    """The path of the file to adopt.

    Args:
        names: paths of ONNX files in a folder or a repository.
        file: the name of one of them, where it is not to be the first of `in_order`.
        where: the folder or the repository, for the refusal.

    Raises:
        ExportError: there is none, or none of that name.
    """
    found = in_order(names)
    named = [one for one in found if file in (None, PurePosixPath(one).name, PurePosixPath(one).stem, one)]
    if not found:
        raise ExportError(f"{where} holds no ONNX file")
    if not named:
        raise ExportError(f"{where} has no ONNX file {file!r}; it has {', '.join(found)}")
    return named[0]


def _is_hooked(folder: Path, name: str) -> bool:
    try:
        return not read_properties(inside(folder, name)).keys().isdisjoint((f"{PREFIX}format", f"{PREFIX}hooks"))
    except (ModelError, DecodeError):
        return False


def choose(folder: Path, file: str | None = None) -> Path:
    """The file of a folder to adopt.

    Args:
        folder: a model's folder, or the file itself.
        file: the name of one of its files, where it is not to be the first of `onnx_files`.

    Raises:
        ExportError: there is none, none of that name, or it lies outside the folder.
    """
    if folder.is_file():
        return folder / pick([folder.name], file, str(folder)) if folder.suffix != ".onnx" else folder
    name = pick([str(path.relative_to(folder)) for path in onnx_files(folder)], file, str(folder))
    try:
        inside(folder, name)
    except ModelError as error:
        raise ExportError(str(error)) from error
    return folder / name


def config_folder(file: Path) -> Path:
    """The folder of the config and the tokenizer of a file: its own, or the one above `onnx`."""
    own = file.parent
    held, other = (os.path.lexists(folder / "config.json") for folder in (own, own.parent))
    above = own.name == SUBFOLDER and other and not held
    return own.parent if above else own


@dataclass(frozen=True)
class Source:
    """A file that was read.

    Attributes:
        file: its path.
        model: the model, its larger weights external data.
        weight_files: name in the adopted folder -> path of the file that holds the weights.
        stock: the file as it came; its larger weights are external data by their names in the adopted folder.
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
        stock, files = read_light(file), dict[str, Path]()
        check_counts(stock)
        for tensor in tensors_of(stock.graph):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                _place(tensor, file, files)
        model = ir.from_proto(stock)
        if not len(model.graph):
            raise ExportError(f"{file} holds no graph: it is empty or truncated")
        flag = inline_branch(model)
    except ModelError as error:
        raise ExportError(str(error)) from error
    except (DecodeError, ValueError, RuntimeError, OSError, KeyError, IndexError) as error:  # protobuf's and onnx_ir's
        raise ExportError(f"{file} cannot be read as an ONNX model: {error}") from error
    return Source(file, model, files, stock, flag)


def check_source(source: Source, folder: Path, shapes: Mapping[str, Dims] | None = None) -> None:
    """Check a file as a hooked model is checked, before anything follows or runs its graph.

    Args:
        source: the file.
        folder: with its weights by the names that the graph has for them.
        shapes: of its inputs, for which every value must have a bound; if left out, what is made of constants alone.

    Raises:
        ExportError: a value has no bound, or the file is no valid ONNX.
    """
    model = ir.from_proto(source.stock)
    try:
        model.graph.sort()  # ONNX Runtime takes nodes in any order
        check(checkable(ir.to_proto(model)), folder, [] if shapes is None else [shapes])
    except (ModelError, ValueError) as error:  # the latter: nodes in a circle
        raise ExportError(f"{source.file} is refused: {error}") from error


def _place(tensor: onnx.TensorProto, file: Path, files: dict[str, Path]) -> None:
    """Point a weight at its file, by the file's name in the adopted folder."""
    entry = {item.key: item.value for item in tensor.external_data}
    location = entry["location"]
    path = inside(file.parent, location)
    name = f"{file.stem}.weights" if location == file.name else path.name
    files[name] = path
    held = ir.from_proto(tensor)
    placed = {"location": name, "offset": entry.get("offset", "0"), "length": entry.get("length", str(held.nbytes))}
    del tensor.external_data[:]
    for key, value in placed.items():
        tensor.external_data.add(key=key, value=value)


def tell_types(stock: onnx.ModelProto, known: Iterable[onnx.ValueInfoProto]) -> None:
    """Write down dtypes and shapes of a file's values, those that it does not say itself."""
    graph = stock.graph
    made = {name for node in graph.node for name in node.output}
    said = {entry.name for entry in (*graph.value_info, *graph.output)}
    graph.value_info.extend(entry for entry in known if entry.name in made and entry.name not in said)
