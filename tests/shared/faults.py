"""Faults as runtimes and exporters have them, planted into a copy of a hooked model's graph."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from families import WINDOW
from onnx import helper, numpy_helper

Planted = tuple[str, str]  # the node that is wrong, and the first hook point that reads what it makes
LAYER = "layers.1."


def plant(source: Path, folder: Path, fault: Callable[[onnx.ModelProto, Path], Planted]) -> Planted:
    """Copy a hooked model with a fault in it."""
    shutil.copytree(source, folder)
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    found = fault(proto, folder)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    return found


def perturbed_weight(proto: onnx.ModelProto, folder: Path) -> Planted:
    """One neuron of layer 1 reads half as much again."""
    tensor = next(t for t in proto.graph.initializer if LAYER in t.name and t.name.endswith("up_proj.weight"))
    entry = {item.key: item.value for item in tensor.external_data}
    data = np.memmap(folder / entry["location"], np.float32, "r+", int(entry["offset"]), tuple(tensor.dims))
    data[7] *= np.float32(1.5)
    data.flush()
    return _reader(proto, tensor.name).name, "blocks.1.mlp.hook_up"


def other_gelu(proto: onnx.ModelProto, folder: Path) -> Planted:
    """Layer 1's GELU in its tanh form instead of the exact one, or the other way round."""
    node = [node for node in proto.graph.node if node.op_type == "Gelu"][1]
    exact = not any(item.s == b"tanh" for item in node.attribute)
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("approximate", "tanh" if exact else "none"))
    return node.name, "blocks.1.mlp.hook_act"


def longer_window(proto: onnx.ModelProto, folder: Path) -> Planted:
    """A sliding window that lets one token more in."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        size = tensors.get(node.input[1]) if node.op_type == "Sub" else None
        if size is not None and size.data_type == onnx.TensorProto.INT64:
            assert numpy_helper.to_array(size) == WINDOW
            size.CopyFrom(numpy_helper.from_array(np.array(WINDOW + 1), size.name))
            return node.name, "blocks.0.attn.hook_scores"
    raise AssertionError("no window in this graph")


def other_rope(proto: onnx.ModelProto, folder: Path) -> Planted:
    """Rotary positions of base 500000 instead of 10000."""
    tensor = next(tensor for tensor in proto.graph.initializer if tensor.name.endswith("inv_freq"))
    before = numpy_helper.to_array(tensor)
    after = (1 / 5e5 ** (np.arange(before.size) / before.size)).astype(before.dtype).reshape(before.shape)
    tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))
    return _reader(proto, tensor.name).name, "blocks.0.attn.hook_rot_q"


def half_layer(proto: onnx.ModelProto, folder: Path) -> Planted:
    """Layer 1's MLP in float16 among float32 layers."""
    weights = [t.name for t in proto.graph.initializer if LAYER in t.name and ".mlp." in t.name]
    readers = {_reader(proto, name).name for name in weights}
    nodes: list[Any] = []
    first = ""
    for node in proto.graph.node:
        behind = {node.name, *(n.name for n in proto.graph.node if {*n.output} & {*node.input})}
        if node.op_type != "MatMul" or not behind & readers:
            nodes.append(node)
            continue
        first = first or node.name
        made = node.output[0]
        narrow = [helper.make_node("Cast", [name], [f"{name}.{made}.half"], to=10) for name in node.input]
        inner = helper.make_node("MatMul", [cast.output[0] for cast in narrow], [f"{made}.half"], name=node.name)
        nodes += [*narrow, inner, helper.make_node("Cast", [f"{made}.half"], [made], to=1, name=f"{node.name}.wide")]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return first, "blocks.1.mlp.hook_gate"


def _reader(proto: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in proto.graph.node if name in node.input)
