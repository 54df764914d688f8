"""Weights of two names, stored once in a compiled folder: a table of tokens, tied to the unembedding.

A hooked model's files hold such bytes once. Embedding would write them for each name, and ONNX Runtime, as it optimises
a graph, writes the turned table besides the table.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.graph.operator_table import DOMAIN

ALIGNMENT = 64  # bytes, of the place of a weight
SMALLEST = 1024  # bytes of a weight that is looked for
Place = tuple[str, int, int]  # file, offset, bytes


def reshape_shared(proto: onnx.ModelProto) -> None:
    """Make weights that lie at one place of a file one weight; under other names it is reshaped."""
    first: dict[tuple[Place, int], onnx.TensorProto] = {}
    nodes: list[onnx.NodeProto] = []
    for tensor in [*_external(proto)]:  # a list: weights are removed on the way
        original = first.setdefault((_place(tensor), tensor.data_type), tensor)
        if original is tensor or _place(tensor)[2] < SMALLEST:
            continue
        shape = onnx.numpy_helper.from_array(np.array(tensor.dims, np.int64), f"{tensor.name}.shape")
        nodes.append(
            onnx.helper.make_node("Reshape", [original.name, shape.name], [tensor.name], f"{tensor.name}.reshaped")
        )
        proto.graph.initializer.remove(tensor)
        proto.graph.initializer.append(shape)
    # In front of all other nodes, in their own order.
    for node in reversed(nodes):
        proto.graph.node.insert(0, node)


def store_once(proto: onnx.ModelProto, file: Path) -> None:
    """Write equal weights of an optimised graph once, and a turned table not at all."""
    turned = _read_turned(proto, file)
    places: dict[tuple[bytes, int], Place] = {}
    same = False
    for tensor in _external(proto):
        place = _place(tensor)
        digest = hashlib.sha256(_bytes(file, place).data).digest()
        original = places.setdefault((digest, place[2]), place)
        if original != place:
            same = True
            _point(tensor, original)
    if same or turned:
        _compact(proto, file)


def _read_turned(proto: onnx.ModelProto, file: Path) -> bool:
    """Let products with a turned table read the table itself; whether there are any."""
    weights = {tensor.name: tensor for tensor in _external(proto)}
    tables = {node.input[0] for node in proto.graph.node if node.op_type == "Gather"} & weights.keys()
    turned = False
    for node in proto.graph.node:
        if node.op_type != "MatMul" or node.domain or node.input[1] not in weights:
            continue
        factor = weights[node.input[1]]
        table = next((name for name in sorted(tables) if _is_turned(weights[name], factor, file)), None)
        if table is not None:
            # These files are ONNX Runtime's already, so its own product may read the table turned.
            node.op_type, node.domain, node.input[1] = "FusedMatMul", DOMAIN, table
            node.attribute.append(onnx.helper.make_attribute("transB", 1))
            turned = True
    if turned:
        read = {name for node in proto.graph.node for name in node.input}
        for tensor in [tensor for tensor in weights.values() if tensor.name not in read]:
            proto.graph.initializer.remove(tensor)
        if all(entry.domain != DOMAIN for entry in proto.opset_import):
            proto.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return turned


def _is_turned(table: onnx.TensorProto, factor: onnx.TensorProto, file: Path) -> bool:
    if [*table.dims] != [*factor.dims][::-1] or len(table.dims) != 2 or table.data_type != factor.data_type:
        return False
    size = _place(table)[2] // max(1, int(np.prod(table.dims)))
    one, other = (
        _bytes(file, _place(tensor)).view(f"u{size}").reshape(tuple(tensor.dims)) for tensor in (table, factor)
    )
    # By bits, one row first: most pairs differ there.
    return bool(np.array_equal(one[0], other[:, 0]) and np.array_equal(one, other.T))


def _compact(proto: onnx.ModelProto, file: Path) -> None:
    """Write the places that a graph still reads one after another."""
    moved: dict[Place, Place] = {}
    complete = file.with_name(f"{file.name}.whole")
    file.rename(complete)
    with file.open("wb") as stream:
        for tensor in _external(proto):
            place = _place(tensor)
            if place not in moved:
                # ONNX Runtime maps the file: weights lie at multiples of `ALIGNMENT`.
                stream.seek(-(-stream.tell() // ALIGNMENT) * ALIGNMENT)
                moved[place] = (place[0], stream.tell(), place[2])
                stream.write(_bytes(complete, place).data)
            _point(tensor, moved[place])
    complete.unlink()


def _external(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    return (one for one in proto.graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL)


def _place(tensor: onnx.TensorProto) -> Place:
    entry = {item.key: item.value for item in tensor.external_data}
    return entry["location"], int(entry.get("offset", 0)), int(entry["length"])


def _point(tensor: onnx.TensorProto, place: Place) -> None:
    del tensor.external_data[:]
    for key, value in zip(("location", "offset", "length"), place, strict=True):
        tensor.external_data.add(key=key, value=str(value))


def _bytes(file: Path, place: Place) -> NDArray[Any]:
    # Nothing cannot be mapped.
    return np.memmap(file, np.uint8, "r", place[1], (place[2],)) if place[2] else np.empty(0, np.uint8)
