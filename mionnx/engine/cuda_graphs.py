"""CUDA graphs: a call is recorded once for each shape, and launched as a whole from then on; decoding in such calls."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from mionnx.engine.device import (
    CPU,
    Device,
    LentArray,
    empty,
    fetch,
    model_bytes,
    overwrite,
    provider_at,
    put,
    run_at,
    run_options,
)
from mionnx.errors import ModelError

PAST_AXIS = 2  # the axis of keys and values, [batch, heads, columns, width]
FIRST = 1  # id of the only CUDA graph of the session that moves columns


def shapes_of(outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> tuple[Any, ...]:
    """What calls of one CUDA graph have in common: names, shapes and dtypes."""
    return (tuple(outputs), *sorted((name, array.shape, array.dtype.str) for name, array in feeds.items()))


class CudaGraphs:
    """Calls of one session by their shapes: one CUDA graph and one set of buffers a shape, one thread at a time."""

    LIMIT = 8  # shapes; beyond, the buffers of the one used longest ago are given up

    def __init__(self, session: onnxruntime.InferenceSession, place: Device) -> None:
        self.session, self.place = session, place
        self._calls: dict[Any, Replay] = {}
        self._number = 0
        self._alone = Lock()

    def next_id(self) -> int:
        with self._alone:
            self._number += 1
            return self._number

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, LentArray]:
        """Replay a call, or record it first; results stay on the device until the next call of their shape."""
        arrays = {name: np.asarray(value) for name, value in feeds.items()}
        with self._alone:
            return self._replayed(shapes_of(outputs, arrays), outputs, arrays)

    def _replayed(self, key: Any, outputs: Sequence[str], arrays: Mapping[str, NDArray[Any]]) -> dict[str, LentArray]:
        call = self._calls.pop(key, None)
        try:
            if call is None:
                self._number += 1
                call = Replay(self.session, outputs, arrays, self.place, self._number)
            self._calls[key] = call  # last in the order of the dictionary: the one used most recently
            while len(self._calls) > self.LIMIT:
                del self._calls[next(iter(self._calls))]
            return call.lend(arrays)
        except ModelError:
            raise
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise ModelError(f"ONNX Runtime failed while replaying a CUDA graph: {error}") from error


class Replay:
    """All calls of one shape: a CUDA graph reads and writes the same addresses every time."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        outputs: Sequence[str],
        arrays: Mapping[str, NDArray[Any]],
        place: Device,
        number: int,
    ) -> None:
        self.session, self.place, self.options = session, place, run_options(str(number))
        self.inputs = {name: put(array.copy(), place) for name, array in arrays.items()}
        first = run_at(session, outputs, self.inputs, place)
        self._lent: WeakSet[LentArray] = WeakSet()
        self.outputs = {name: empty(result.shape, result.value.element_type(), place) for name, result in first.items()}
        self.binding = session.io_binding()
        for name, value in self.inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        for name, value in self.outputs.items():
            self.binding.bind_ortvalue_output(name, value)

    def lend(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, LentArray]:
        """Write into the input buffers and run; what an earlier run lent and is still there is copied before."""
        for one in [*self._lent]:
            _ = one.array
        self._lent.clear()
        self._run(arrays)
        lent = {name: LentArray(value, self.place) for name, value in self.outputs.items()}
        self._lent.update(lent.values())
        return lent

    def run(self, arrays: Mapping[str, NDArray[Any]], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Write into the input buffers, run, and copy some outputs to the CPU."""
        self._run(arrays)
        results = {name: fetch(self.outputs[name], self.place) for name in outputs}
        return {name: array.copy() for name, array in results.items()} if self.place == CPU else results

    def _run(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.write(arrays)
        self.session.run_with_iobinding(self.binding, self.options)

    def write(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write into the input buffers."""
        for name, array in arrays.items():
            overwrite(self.inputs[name], array)


class RollingCache:
    """A program with a past of a fixed number of columns, filled from the right; see `Program.rolling`.

    What is added at the right pushes the leftmost column out: padding, which the attention mask hides. Keys are rotated
    by their positions, not by their columns; causal and windowed masks count columns from the right.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        outputs: Sequence[str],
        feeds: Mapping[str, NDArray[Any]],
        present: Mapping[str, str],
        place: Device,
        number: int,
        free: list["RollingCache"],
    ) -> None:
        self.place, self.present = place, present
        self.free = free  # its program's caches of this shape that no generation uses
        # A step is two graphs: the model's reads the past and writes it, one column longer; the other moves all but the
        # first column back to where the past is read.
        self.replay = Replay(session, outputs, feeds, place, number)
        self.mover = _mover({self.replay.outputs[name].element_type() for name in present}, len(present), place)
        self.moves = self.mover.io_binding()
        for i, (output, name) in enumerate(present.items()):
            self.moves.bind_ortvalue_input(f"long.{i}", self.replay.outputs[output])
            self.moves.bind_ortvalue_output(f"short.{i}", self.replay.inputs[name])

    def step(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Run one step: output -> array, without the past."""
        names = [name for name in self.replay.outputs if name not in self.present]
        results = self.replay.run(feeds, names)
        self.mover.run_with_iobinding(self.moves, run_options(str(FIRST)))
        return results

    def past(self, columns: int) -> dict[str, NDArray[Any]]:
        """The last columns of the past: input -> array."""
        arrays = {name: fetch(self.replay.inputs[name], self.place) for name in self.present.values()}
        return {name: array[:, :, array.shape[PAST_AXIS] - columns :].copy() for name, array in arrays.items()}


def padded(array: NDArray[Any], columns: int) -> NDArray[Any]:
    """Keys or values [batch, heads, columns so far, width] with zeros to the left of them."""
    shape = list(array.shape)
    shape[PAST_AXIS] = columns
    wide = np.zeros(shape, array.dtype)
    wide[:, :, columns - array.shape[PAST_AXIS] :] = array
    return wide


def _mover(kinds: set[int], count: int, place: Device) -> onnxruntime.InferenceSession:
    """A session that gives each of its inputs without the first column."""
    (kind,) = kinds
    long, short = (
        [helper.make_tensor_value_info(f"{name}.{i}", kind, [None] * 4) for i in range(count)]
        for name in ("long", "short")
    )
    nodes = [helper.make_node("Slice", [f"long.{i}", "one", "end", "axis"], [f"short.{i}"]) for i in range(count)]
    numbers = {"one": 1, "end": np.iinfo(np.int64).max, "axis": PAST_AXIS}
    constants = [helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value]) for name, value in numbers.items()]
    graph = helper.make_graph(nodes, "move", long, short, constants)
    provider = provider_at(place, enable_cuda_graph="1")
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(model_bytes(graph), settings, providers=[provider], enable_fallback=0)
