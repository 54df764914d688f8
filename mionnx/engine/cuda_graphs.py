"""CUDA graphs: a call is recorded once for each shape, and launched as a whole from then on."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from mionnx.engine.device import CPU, Device, copied, empty, fetch, put, run_at, run_options
from mionnx.errors import ModelError


class CudaGraphs:
    """Calls of one session by their shapes: one CUDA graph and one set of buffers a shape.

    A CUDA graph reads and writes the same addresses every time: inputs are written into the buffers of the first call
    of that shape, and results are copied out of them: one thread at a time. On other providers the same is an ordinary
    run.
    """

    LIMIT = 8  # shapes; beyond, the buffers of the one used longest ago are given up

    def __init__(self, session: onnxruntime.InferenceSession, place: Device) -> None:
        self.session, self.place = session, place
        self._calls: dict[Any, Replay] = {}
        self._number = 0
        self._alone = Lock()

    def next_id(self) -> int:
        """An id for a CUDA graph of this session."""
        with self._alone:
            self._number += 1
            return self._number

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Replay a call, or record it first; results are arrays."""
        arrays = {name: np.asarray(value) for name, value in feeds.items()}
        key = (tuple(outputs), *sorted((name, array.shape, array.dtype.str) for name, array in arrays.items()))
        with self._alone:
            return self._replayed(key, outputs, arrays)

    def _replayed(
        self, key: Any, outputs: Sequence[str], arrays: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        call = self._calls.pop(key, None)
        try:
            if call is None:
                self._number += 1
                call = Replay(self.session, outputs, arrays, self.place, self._number)
            self._calls[key] = call  # last in the order of the dictionary: the one used most recently
            while len(self._calls) > self.LIMIT:
                del self._calls[next(iter(self._calls))]
            return call.run(arrays)
        except ModelError:
            raise
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise ModelError(f"ONNX Runtime failed while replaying a CUDA graph: {error}") from error


class Replay:
    """All calls of one shape: fixed buffers, and the graph that reads and writes them."""

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
        self.outputs = {name: empty(result.shape, result.value.element_type(), place) for name, result in first.items()}
        self.binding = session.io_binding()
        for name, value in self.inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        for name, value in self.outputs.items():
            self.binding.bind_ortvalue_output(name, value)

    def run(self, arrays: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        """Write into the input buffers and run.

        Args:
            outputs: names of those to copy to the CPU; all if left out.
        """
        self.write(arrays)
        self.session.run_with_iobinding(self.binding, self.options)
        names = self.outputs if outputs is None else outputs
        return {name: fetch(self.outputs[name], self.place).copy() for name in names}

    def write(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write into the input buffers."""
        for name, array in arrays.items():
            if array.dtype == ml_dtypes.bfloat16:
                copied(put(array, CPU), self.place, self.inputs[name])
            else:
                self.inputs[name].update_inplace(np.asarray(array, order="C"))
