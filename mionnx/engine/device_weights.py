"""Weights on a device, once for all sessions; by itself each session would hold a copy of its own."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from mionnx.engine.device import Device, put

SMALL_WEIGHT = 2**14  # bytes of a weight, below which a copy costs nothing
SHARED_DTYPES = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
    onnx.TensorProto.UINT8,
)
# Operators with kernels on CUDA in all of these dtypes: a weight that a node on the CPU reads has to lie there.
READERS = {
    *("MatMul", "Gemm", "Transpose", "Gather", "Add", "Mul", "LayerNormalization", "RMSNormalization"),
    *("MatMulNBits", "GatherBlockQuantized"),
}
_held: "weakref.WeakValueDictionary[Any, onnxruntime.OrtValue]" = weakref.WeakValueDictionary()
_alone = Lock()


def weights_of(model: onnx.ModelProto, folder: Path, place: Device) -> dict[str, onnxruntime.OrtValue]:
    """The large weights of a graph on a device, copied there by whoever asks first.

    Returns:
        name -> value, for `SessionOptions.add_initializer`; they have to outlive the session. Empty where this ONNX
        Runtime has no DLPack.
    """
    if not hasattr(onnxruntime.OrtValue, "from_dlpack"):
        return {}
    readers = _readers(model.graph)
    weights = {}
    for tensor in model.graph.initializer:
        entry = {item.key: item.value for item in tensor.external_data}
        large = tensor.data_location == onnx.TensorProto.EXTERNAL and int(entry.get("length", 0)) >= SMALL_WEIGHT
        if large and tensor.data_type in SHARED_DTYPES and readers.get(tensor.name, {""}) <= READERS:
            weights[tensor.name] = _weight(tensor, entry, folder, place)
    return weights


def _readers(graph: onnx.GraphProto) -> dict[str, set[str]]:
    """Value -> the operators that read it; "" for one inside of a subgraph."""
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                for name in _readers(attribute.g):
                    readers.setdefault(name, set()).add("")
    return readers


def _weight(tensor: onnx.TensorProto, entry: Mapping[str, str], folder: Path, place: Device) -> onnxruntime.OrtValue:
    file = (folder / entry["location"]).resolve()
    stat, where = file.stat(), (int(entry.get("offset", 0)), int(entry["length"]))
    key = (str(file), stat.st_size, stat.st_mtime_ns, where, tensor.data_type, tuple(tensor.dims), place)
    with _alone:
        weight = _held.get(key)
        if weight is None:
            weight = _held[key] = _borrowed(_read(file, where, tensor), place)
        return weight


def _read(file: Path, where: tuple[int, int], tensor: onnx.TensorProto) -> NDArray[Any]:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
    data = np.memmap(file, np.uint8, "r", where[0], where[1])
    return np.asarray(data).view(dtype).reshape(tuple(tensor.dims))


def _borrowed(array: NDArray[Any], place: Device) -> onnxruntime.OrtValue:
    """An array on a device, as a value without memory of its own; it keeps the owner."""
    # ONNX Runtime takes an initializer from its user if the user owns the memory. The memory of an `OrtValue` is its
    # own, and of one that came through DLPack it is the other's: so each weight goes there and back.
    owner = put(array, place)
    value = onnxruntime.OrtValue.from_dlpack(owner)
    value.owner = owner
    return value
