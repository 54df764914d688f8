"""A foreign ONNX file, read with its weights left where they lie.

Weights beside the file are external data already. Those inside the file become external data too: the file itself is
their file, at the offset of their bytes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from exporters.adopt.branches import inline_branch
from mionnx.errors import ExportError, ModelError
from mionnx.graph.embedded_weights import read_light
from mionnx.graph.folder_file import inside
from mionnx.graph.known_value import Dims
from mionnx.graph.onnx_file import tensors_of
from mionnx.graph.stock_graph import checkable
from mionnx.graph.validate import check, check_counts


@dataclass(frozen=True)
class SourceFile:
    """A file that was read.

    Attributes:
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


def open_source(file: Path) -> SourceFile:
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
    return SourceFile(file, model, files, stock, flag)


def check_source(source: SourceFile, folder: Path, shapes: Mapping[str, Dims] | None = None) -> None:
    """Check a file as a hooked model is checked, before anything follows or runs its graph.

    Args:
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
    length = entry.get("length", str(ir.serde.deserialize_tensor(tensor).nbytes))
    placed = {"location": name, "offset": entry.get("offset", "0"), "length": length}
    del tensor.external_data[:]
    for key, value in placed.items():
        tensor.external_data.add(key=key, value=value)


def tell_types(stock: onnx.ModelProto, types: Iterable[onnx.ValueInfoProto]) -> None:
    """Write down dtypes and shapes of a file's values, those that it does not say itself."""
    graph = stock.graph
    outputs = {name for node in graph.node for name in node.output}
    typed = {entry.name for entry in (*graph.value_info, *graph.output)}
    graph.value_info.extend(entry for entry in types if entry.name in outputs and entry.name not in typed)
