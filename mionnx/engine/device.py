"""Arrays on a device: copied there, fed again uncopied, and fetched when they are read.

bfloat16, which ONNX Runtime does not translate from and to numpy, is translated here.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import DTypeLike, NDArray

from mionnx.errors import ModelError

BFLOAT16 = onnx.TensorProto.BFLOAT16
DEVICES = {"CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "cuda"}  # others: on the CPU
GRAPH_ID, NO_GRAPH = "gpu_graph_id", "-1"  # of a run: which CUDA graph it is, or that it is none
Device = tuple[str, int]  # kind of device, and which of them
CPU: Device = ("cpu", 0)


class DeviceArray:
    """An array on the device that computed it. `np.asarray` copies it to the CPU, once."""

    def __init__(self, value: onnxruntime.OrtValue, place: Device = CPU) -> None:
        self.value, self.place = value, place

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape())

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.value.element_type()))

    @property
    def nbytes(self) -> int:
        return int(self.value.tensor_size_in_bytes())

    @cached_property
    def array(self) -> NDArray[Any]:
        """The value on the CPU."""
        return fetch(self.value, self.place)

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (self.array,)  # pickled and copied as what it is read as

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype, copy=copy)


Value = NDArray[Any] | DeviceArray


def put(value: Any, place: Device) -> onnxruntime.OrtValue:
    """Copy a value to a device as an `OrtValue`; on the CPU it shares the array's memory."""
    if isinstance(value, DeviceArray | onnxruntime.OrtValue):
        return value.value if isinstance(value, DeviceArray) else value
    array = np.asarray(value, order="C")
    if array.dtype != ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, *place)
    here = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16)
    return here if place == CPU else copied(here, place, empty(array.shape, BFLOAT16, place))


def fetch(value: onnxruntime.OrtValue, place: Device = CPU) -> NDArray[Any]:
    """Copy an `OrtValue` to an array on the CPU."""
    if value.element_type() != BFLOAT16:
        return np.asarray(value.numpy())
    here = value if place == CPU else copied(value, place)
    bits = np.empty(tuple(value.shape()), np.uint16)
    ctypes.memmove(bits.ctypes.data, here.data_ptr(), bits.nbytes)
    return bits.view(ml_dtypes.bfloat16)


def empty(shape: Sequence[int], element_type: int, place: Device) -> onnxruntime.OrtValue:
    """Allocate an `OrtValue`."""
    return onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(shape), element_type, *place)


def copied(
    value: onnxruntime.OrtValue, place: Device, target: onnxruntime.OrtValue | None = None
) -> onnxruntime.OrtValue:
    """Copy a bfloat16 value into another, or to new memory on the CPU."""
    # ONNX Runtime has no other way than a graph of one Identity for this dtype in Python.
    binding = _copier(place).io_binding()
    binding.bind_ortvalue_input("from", value)
    if target is None:
        binding.bind_output("to", *CPU)
    else:
        binding.bind_ortvalue_output("to", target)
    _copier(place).run_with_iobinding(binding)
    return binding.get_outputs()[0]


@cache
def _copier(place: Device) -> onnxruntime.InferenceSession:
    ends = [onnx.helper.make_tensor_value_info(name, BFLOAT16, None) for name in ("from", "to")]
    body = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["from"], ["to"])], "copy", ends[:1], ends[1:])
    provider: Any = "CPUExecutionProvider" if place == CPU else ("CUDAExecutionProvider", {"device_id": str(place[1])})
    return onnxruntime.InferenceSession(model_bytes(body), providers=[provider])


def model_bytes(graph: onnx.GraphProto) -> bytes:
    """A graph of a few standard operators as a model."""
    opset = onnx.helper.make_opsetid("", 21)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10).SerializeToString()


def run_at(
    session: onnxruntime.InferenceSession, outputs: Sequence[str], feeds: Mapping[str, Any], place: Device
) -> dict[str, DeviceArray]:
    """Run a session; results stay on the device."""
    try:
        values = {name: put(value, place) for name, value in feeds.items()}
        if place == CPU:  # one call, instead of a binding for each name
            results = session.run_with_ort_values(list(outputs), values, run_options())
        else:
            binding = session.io_binding()
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in outputs:
                binding.bind_output(name, *place)
            session.run_with_iobinding(binding, run_options())
            results = binding.get_outputs()
        return {name: DeviceArray(value, place) for name, value in zip(outputs, results, strict=True)}
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise ModelError(f"ONNX Runtime failed while running the model: {error}") from error


@cache
def run_options(graph: str = NO_GRAPH) -> onnxruntime.RunOptions:
    """`RunOptions` that select a CUDA graph by id; "-1" turns capture off."""
    options = onnxruntime.RunOptions()
    options.add_run_config_entry(GRAPH_ID, graph)
    return options
