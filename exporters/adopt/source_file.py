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

from exporters.adopt.flow import KEEPING, climb
from mionnx.errors import ExportError, ModelError
from mionnx.graph.embedded_weights import read_light
from mionnx.graph.folder_file import inside
from mionnx.graph.known_value import Dims
from mionnx.graph.onnx_file import tensors_of
from mionnx.graph.stock_graph import checkable
from mionnx.graph.validate import check, check_counts

RESHAPING = KEEPING | {"Squeeze", "Reshape"}


@dataclass(frozen=True)
class SourceFile:
    """A file that was read."""

    file: Path
    model: ir.Model  # the model, its larger weights external data
    weight_files: dict[str, Path]  # name in the adopted folder -> path of the file that holds the weights
    # The file as it came; its larger weights are external data by their names in the adopted folder.
    stock: onnx.ModelProto
    flag: str | None = None  # of a merged decoder, the input that chose between its branches


def open_source(file: Path) -> SourceFile:
    """Read a file without its weights, which must lie in its folder."""
    try:
        stock, files = read_light(file), dict[str, Path]()
        check_counts(stock)
        for tensor in tensors_of(stock.graph):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                _place(tensor, file, files)
        model = ir.from_proto(stock)
        if not len(model.graph):
            raise ExportError(f"{file} holds no graph: it is empty or truncated")
        flag = _inline_branch(model)
    except ModelError as error:
        raise ExportError(str(error)) from error
    except (DecodeError, ValueError, RuntimeError, OSError, KeyError, IndexError) as error:  # protobuf's and onnx_ir's
        raise ExportError(f"{file} cannot be read as an ONNX model: {error}") from error
    return SourceFile(file, model, files, stock, flag)


def check_source(source: SourceFile, folder: Path, shapes: Mapping[str, Dims] | None = None) -> None:
    """Check a file as a hooked model is checked, before anything follows or runs its graph."""
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
    # weights inside the graph file: the adopted folder has a model.onnx of its own
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


def _inline_branch(model: ir.Model) -> str | None:
    """Inline the branch with a past of an `If` on a flag of the call; returns the flag, which is no input any more."""
    graph, flag = model.graph, None
    for node in [node for node in graph if node.op_type == "If"]:
        condition = None if node.inputs[0] is None else climb(node.inputs[0], RESHAPING)
        # an If on anything else chooses by what is computed, and stays
        if condition is None or not condition.is_graph_input() or condition.dtype != ir.DataType.BOOL:
            continue
        if flag is not None and flag is not condition:
            raise ExportError(f"two flags choose branches, {flag.name} and {condition.name}")
        flag = condition
        # the decoder stands in both branches; that with a past serves an empty one too, as the self-check shows
        _inline(graph, node, node.attributes["then_branch"].as_graph())
    return None if flag is None else _drop(graph, flag)


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
    """Move a branch's nodes and weights into the graph; its outputs get the names of the node's."""
    taken = {value.name for value in graph.inputs} | {*graph.initializers}
    taken |= {value.name for one in graph for value in one.outputs}
    ends, nodes = list(branch.outputs), list(branch)
    for value in [*branch.initializers.values()]:
        del branch.initializers[value.name]
        _rename(value, taken)
        graph.register_initializer(value)
    for one in nodes:
        for value in one.outputs:
            _rename(value, taken)
    branch.outputs.clear()
    branch.remove(nodes)
    graph.insert_before(node, nodes)
    for old, new in zip(node.outputs, ends, strict=True):
        name, old.name = old.name, None
        new.type, new.shape = new.type or old.type, new.shape or old.shape
        # a branch may hand an outer value on: that keeps its name, and the output needs a value of its own
        if new.producer() is None or new.is_graph_output():
            copy = ir.node("Identity", [new])
            copy.outputs[0].type, copy.outputs[0].shape = new.type, new.shape
            graph.insert_before(node, copy)
            new = copy.outputs[0]
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = name
    graph.remove(node, safe=True)


def _rename(value: ir.Value, taken: set[str | None]) -> None:
    name, number = value.name, 0
    while name and name in taken:
        number += 1
        name = f"{value.name}.{number}"
    value.name = name
    taken.add(name)


def _drop(graph: ir.Graph, flag: ir.Value) -> str:
    waiting = [node for node, _ in flag.uses()]
    while waiting:
        node = waiting.pop()
        if any(value.uses() for value in node.outputs):
            raise ExportError(f"the flag {flag.name} is read beside the choice of a branch")
        graph.remove(node, safe=True)
    graph.inputs.remove(flag)
    return str(flag.name)
