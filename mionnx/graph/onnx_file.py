"""Graphs on their way in and out: the one place that touches protobuf.

A graph is edited as an onnx-graphsurgeon graph, always without its weights: initializers stay references into the
weight files, so that editing a model of any size costs milliseconds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from mionnx.errors import ModelError


def read(path: Path) -> onnx.ModelProto:
    """Read `model.onnx` without its external data.

    Raises:
        ModelError: no such file, or no ONNX in it.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (DecodeError, ValueError) as error:
        raise ModelError(f"{path} is corrupt or truncated: {error}") from error
    if not proto.graph.node or not proto.graph.output:
        raise ModelError(f"{path} is corrupt or truncated: it holds no graph")
    return proto


def parse(model: bytes) -> onnx.ModelProto:
    """The model of `serialise`."""
    return onnx.ModelProto.FromString(model)


def properties(proto: onnx.ModelProto) -> dict[str, str]:
    """The model's `metadata_props`."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def locations(proto: onnx.ModelProto) -> dict[str, int]:
    """The weight files that a graph reads, and how many bytes of each."""
    found: dict[str, int] = {}
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            found[entry["location"]] = found.get(entry["location"], 0) + int(entry["length"])
    return found


def weight(proto: onnx.ModelProto, folder: Path, name: str) -> NDArray[Any]:
    """An initializer as a read-only array; one that is external data is mapped from its file.

    Raises:
        ModelError: no initializer of this name, or a file that is missing or too short.
    """
    tensor = next((tensor for tensor in proto.graph.initializer if tensor.name == name), None)
    if tensor is None:
        raise ModelError(f"the graph in {folder} has no initializer {name!r}")
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    entry = {item.key: item.value for item in tensor.external_data}
    dtype, offset = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), int(entry.get("offset", 0))
    try:
        return np.memmap(folder / entry["location"], dtype, "r", offset, tuple(tensor.dims)).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {name} in {folder / entry['location']}: {error}") from error


def embed(proto: onnx.ModelProto, folder: Path) -> None:
    """Put weights into the graph itself. onnx's own function refuses files that have several hard links."""
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            with (folder / entry["location"]).open("rb") as file:
                file.seek(int(entry.get("offset", 0)))
                tensor.raw_data = file.read(int(entry["length"]))
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT


def value_ranks(proto: onnx.ModelProto) -> dict[str, int | None]:
    """The values that nodes of the graph make, with their ranks where these are written down."""
    ranks: dict[str, int | None] = {output: None for node in proto.graph.node for output in node.output}
    for value in [*proto.graph.value_info, *proto.graph.output]:
        if value.name in ranks and value.type.tensor_type.HasField("shape"):
            ranks[value.name] = len(value.type.tensor_type.shape.dim)
    return ranks


def interface(proto: onnx.ModelProto) -> tuple[list[str], list[str]]:
    """The names of the graph's inputs and outputs."""
    return [value.name for value in proto.graph.input], [value.name for value in proto.graph.output]


def opset(proto: onnx.ModelProto) -> int:
    """The version of the standard operators that a model is written in."""
    return max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def edit(proto: onnx.ModelProto) -> gs.Graph:
    """A graph to edit; `proto` is left alone."""
    return gs.import_onnx(proto)


def serialise(graph: gs.Graph, origin: onnx.ModelProto) -> bytes:
    """An edited graph as the bytes of an ONNX model, with the metadata of the model that it was made from."""
    proto = to_proto(graph, origin, {})
    proto.metadata_props.extend(origin.metadata_props)
    return proto.SerializeToString()


def to_proto(graph: gs.Graph, origin: onnx.ModelProto, defaults: Mapping[str, Sequence[int | str]]) -> onnx.ModelProto:
    """An edited graph as an ONNX model without metadata.

    Args:
        graph, origin: the graph, and the model that it was made from.
        defaults: constants that are inputs too, which may be left out, with their shapes.
    """
    proto = gs.export_onnx(graph)
    _restore_defaults(proto, origin)
    for tensor in proto.graph.initializer:
        if tensor.name in defaults:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(defaults[tensor.name]))
            proto.graph.input.append(value)
    proto.producer_name, proto.producer_version = origin.producer_name, origin.producer_version
    return proto


def _restore_defaults(proto: onnx.ModelProto, origin: onnx.ModelProto) -> None:
    """graphsurgeon takes an input that has a default for a constant: make it an input again."""
    held = {tensor.name for tensor in proto.graph.initializer} - {value.name for value in proto.graph.input}
    proto.graph.input.extend(value for value in origin.graph.input if value.name in held)
