"""ONNX files and models in memory: reading, metadata, weight files, the names and ranks of values.

A graph is always held without its weights: initializers stay references into the weight files.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.shape_inference
import onnx.version_converter
from google.protobuf.message import DecodeError, Message
from numpy.typing import DTypeLike, NDArray

from mionnx.errors import ModelError
from mionnx.graph.folder_file import check_regular

ModelProto: TypeAlias = onnx.ModelProto
ValueInfoProto: TypeAlias = onnx.ValueInfoProto
WEIGHTLESS = "no-weights"  # the file that all weights of a graph without weights point to: it does not exist
LARGEST_FILE = 2**31  # bytes of an ONNX file
KEPT_INSIDE = 1024  # bytes up to which a weight stays inside the graph
PACKED = frozenset((onnx.TensorProto.INT4, onnx.TensorProto.UINT4))  # two numbers in a byte


def read(path: Path, largest: int = LARGEST_FILE) -> onnx.ModelProto:
    """Read `model.onnx` without its external data."""
    check_regular(path, largest)
    try:
        proto = onnx.load(path, load_external_data=False)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (DecodeError, ValueError) as error:
        raise ModelError(f"{path} is corrupt or truncated: {error}") from error
    check_texts(proto, str(path))
    if not proto.graph.node or not proto.graph.output:
        raise ModelError(f"{path} is corrupt or truncated: it holds no graph")
    return proto


def with_types(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model, with the types of values that it does not say."""
    typed = {value.name for value in (*proto.graph.value_info, *proto.graph.output)}
    if all(name in typed for node in proto.graph.node for name in node.output if name):
        return proto
    return onnx.shape_inference.infer_shapes(proto)


def check_texts(message: Message, where: str) -> None:
    """Check that names and notes are text in UTF-8; protobuf gives others as bytes."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            for text in [value] if isinstance(value, str | bytes) else value:
                if isinstance(text, bytes):
                    raise ModelError(f"{where} is damaged: its {field.name} {text[:60]!r} is no text in UTF-8")
        elif field.type == field.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                check_texts(inner, where)


def parse(model: bytes) -> onnx.ModelProto:
    """The model of `serialise`."""
    return onnx.ModelProto.FromString(model)


def properties(proto: onnx.ModelProto) -> dict[str, str]:
    """The model's `metadata_props`."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def locations(proto: onnx.ModelProto) -> dict[str, int]:
    """Bytes of each weight file that a graph reads, shared ones counted once."""
    sizes: dict[str, int] = {}
    for location, _, length in _parts(proto):
        sizes[location] = sizes.get(location, 0) + length
    return sizes


def external_parts(proto: onnx.ModelProto, folder: Path) -> set[tuple[Path, int, int]]:
    """File, begin and length of each weight of a graph."""
    return {(folder / location, begin, length) for location, begin, length in _parts(proto)}


def _parts(proto: onnx.ModelProto) -> set[tuple[str, int, int]]:
    """The same with the location; tied weights, two initializers at the same bytes, once."""
    external = [one for one in proto.graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL]
    entries = [{item.key: item.value for item in one.external_data} for one in external]
    return {(entry["location"], int(entry.get("offset", "0")), int(entry["length"])) for entry in entries}


def rename_files(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Read weights from files of other names."""
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = names.get(entry.value, entry.value)


def tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The initializers of a graph and of those inside of it."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from tensors_of(attribute.g)


def external_files(graph: onnx.GraphProto) -> set[str]:
    """The files of its weights, as the graph names them."""
    external = [one for one in tensors_of(graph) if one.data_location == onnx.TensorProto.EXTERNAL]
    return {item.value for tensor in external for item in tensor.external_data if item.key == "location"}


def weight(proto: onnx.ModelProto, folder: Path, name: str) -> NDArray[Any]:
    """An initializer, or the value of a Constant, as a read-only array."""
    # External data is mapped from its file; numbers of 4 bits, two in a byte, are read into memory.
    tensor = next((tensor for tensor in proto.graph.initializer if tensor.name == name), None)
    if tensor is None:
        return _constant(proto, folder, name)
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    entry = {item.key: item.value for item in tensor.external_data}
    if entry["location"] == WEIGHTLESS:
        refuse_weightless(folder, f"reading {name}")
    dtype, offset = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type), int(entry.get("offset", 0))
    try:
        if tensor.data_type in PACKED:
            # numpy cannot map numbers of half a byte
            size = -(-int(np.prod(tensor.dims)) // 2)
            tensor_copy = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims)
            tensor_copy.raw_data = np.memmap(folder / entry["location"], np.uint8, "r", offset, (size,)).tobytes()
            return onnx.numpy_helper.to_array(tensor_copy)
        # a plain array: memmap's own type would spread
        return np.memmap(folder / entry["location"], dtype, "r", offset, tuple(tensor.dims)).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {name} in {folder / entry['location']}: {error}") from error


def _constant(proto: onnx.ModelProto, folder: Path, name: str) -> NDArray[Any]:
    for node in proto.graph.node:
        if node.op_type == "Constant" and node.output[0] == name:
            value = onnx.helper.get_attribute_value(node.attribute[0])
            return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.array(value)
    raise ModelError(f"the graph in {folder} has no initializer {name!r}")


def lacks_weights(proto: onnx.ModelProto) -> bool:
    """Whether a graph was exported from a config alone, to be rewritten, compiled and estimated."""
    return any(entry.value == WEIGHTLESS for tensor in proto.graph.initializer for entry in tensor.external_data)


def refuse_weightless(folder: Path, what: str) -> None:
    """Refuse a use of weights that a graph does not have."""
    raise ModelError(
        f"{folder} has no weights: it was exported from a config alone (--graph-only). Its graph can be rewritten, "
        f"compiled and estimated; {what} needs the weights: export the checkpoint itself"
    )


def embed(proto: onnx.ModelProto, folder: Path) -> None:
    """Put weights into the graph; onnx's own function refuses files with several hard links."""
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            with (folder / entry["location"]).open("rb") as file:
                file.seek(int(entry.get("offset", 0)))
                tensor.raw_data = file.read(int(entry["length"]))
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT


def set_apart(proto: onnx.ModelProto, prefix: str, location: str) -> bytes:
    """Make external data of the larger initializers of a prefix; the bytes of that file."""
    data = bytearray()
    for tensor in proto.graph.initializer:
        if tensor.name.startswith(prefix) and len(tensor.raw_data) > KEPT_INSIDE:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", location), ("offset", len(data)), ("length", len(tensor.raw_data))):
                tensor.external_data.add(key=key, value=str(value))
            data += tensor.raw_data
            tensor.ClearField("raw_data")
    return bytes(data)


def interface(proto: onnx.ModelProto) -> tuple[list[str], list[str]]:
    """The names of the graph's inputs and outputs."""
    return [value.name for value in proto.graph.input], [value.name for value in proto.graph.output]


def rename(proto: onnx.ModelProto, name: str, by: str) -> None:
    """Give a value another name, where it is made and read."""
    if name == by:
        return
    for node in proto.graph.node:
        for names in (node.input, node.output):
            for i, one in enumerate(names):
                if one == name:
                    names[i] = by
    for entry in (*proto.graph.output, *proto.graph.value_info):
        if entry.name == name:
            entry.name = by


def opset(proto: onnx.ModelProto) -> int:
    """The version of the standard operators that a model is written in."""
    return max((entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")), default=0)


def dtype_of(value: onnx.ValueInfoProto) -> np.dtype[Any]:
    """numpy's dtype of an input, an output or an annotated value."""
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))


def with_outputs(proto: onnx.ModelProto, dtypes: Mapping[str, DTypeLike | None]) -> bytes:
    """Serialise a model with more of its values as outputs; None leaves a dtype open."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    for name, dtype in dtypes.items():
        value = onnx.ValueInfoProto(name=name)
        if dtype is not None:
            value = onnx.helper.make_tensor_value_info(
                name, onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None
            )
        shown.graph.output.append(value)
    return shown.SerializeToString()


def in_opset(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Convert a model to another opset; the converter's errors share no base class."""
    return proto if opset(proto) == version else onnx.version_converter.convert_version(proto, version)
