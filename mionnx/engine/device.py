"""Arrays on a device: copied there, fed again uncopied, and fetched when they are read.

bfloat16, which ONNX Runtime does not translate from and to numpy, is translated here.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from threading import Lock
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


class LentArray(DeviceArray):
    """A result in a buffer that a later run writes: copied to the CPU when it is read, or before that run."""

    def __init__(self, value: onnxruntime.OrtValue, place: Device) -> None:
        super().__init__(value, place)
        self._alone = Lock()

    @property
    def array(self) -> NDArray[Any]:
        with self._alone:  # the run waits for a thread that reads
            if self._copy is None:
                array = fetch(self.value, self.place)
                self._copy = array.copy() if self.place == CPU else array
        return self._copy

    _copy: NDArray[Any] | None = None


Value = NDArray[Any] | DeviceArray


def put(value: Any, place: Device) -> onnxruntime.OrtValue:
    """Copy a value to a device as an `OrtValue`; on the CPU it shares the array's memory."""
    if isinstance(value, LentArray):
        value = value.array
    if isinstance(value, DeviceArray | onnxruntime.OrtValue):
        return value.value if isinstance(value, DeviceArray) else value
    array = np.asarray(value, order="C")
    if array.dtype != ml_dtypes.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array, *place)
    bits = array.view(np.uint16)
    if place == CPU:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, BFLOAT16)
    value = empty(array.shape, BFLOAT16, place)
    overwrite(value, array)
    return value


def overwrite(value: onnxruntime.OrtValue, array: NDArray[Any]) -> None:
    """Write an array of a value's dtype and shape into its memory."""
    array = np.asarray(array, order="C")
    # numpy has no bfloat16; the bytes are copied as they are
    value.update_inplace(array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array)


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


def copied(value: onnxruntime.OrtValue, place: Device) -> onnxruntime.OrtValue:
    """Copy a bfloat16 value to new memory on the CPU."""
    # ONNX Runtime has no other way than a graph of one Identity for this dtype in Python.
    binding = _copier(place).io_binding()
    binding.bind_ortvalue_input("from", value)
    binding.bind_output("to", *CPU)
    _copier(place).run_with_iobinding(binding)
    return binding.get_outputs()[0]


def provider_at(place: Device, **options: str) -> Any:
    """The provider of a device, as a session takes it."""
    if place == CPU:
        return "CPUExecutionProvider"
    # ONNX Runtime writes a warning for each session that names the first device, which it takes by itself
    return ("CUDAExecutionProvider", {**({"device_id": str(place[1])} if place[1] else {}), **options})


@cache
def _copier(place: Device) -> onnxruntime.InferenceSession:
    ends = [onnx.helper.make_tensor_value_info(name, BFLOAT16, None) for name in ("from", "to")]
    body = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["from"], ["to"])], "copy", ends[:1], ends[1:])
    return onnxruntime.InferenceSession(model_bytes(body), providers=[provider_at(place)])


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
