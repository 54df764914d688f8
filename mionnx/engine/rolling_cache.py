"""`RollingCache`: decoding in calls of one shape, so that all of its steps are replays of one CUDA graph.

1. The past has a fixed number of columns and is filled from the right: the columns to the left of the text are padding,
   which the attention mask hides. What is added at the right pushes the leftmost column out.
2. A step is two graphs: the model's reads the past and writes it, one column longer; the other moves all but the first
   column back to where the past is read.
3. Keys are rotated by their positions, not by their columns; causal and windowed masks count columns from the right.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from mionnx.engine.cuda_graphs import Replay
from mionnx.engine.device import CPU, Device, fetch, run_options

PAST_AXIS = 2  # the axis of keys and values, [batch, heads, columns, width]
FIRST = 1  # id of the only CUDA graph of the second session
Arrays = dict[str, NDArray[Any]]


class RollingCache:
    """A program with a past of a fixed number of columns.

    Args:
        outputs: names to fetch, those of the next past among them.
        feeds: arrays of one step, the past padded on the left.
        present: output -> the input that takes it in the next step.
        free: list of its program's caches of this shape that no generation uses.
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
        self.place, self.present, self.free = place, present, free
        self.replay = Replay(session, outputs, feeds, place, number)
        self.mover = _mover({self.replay.outputs[name].element_type() for name in present}, len(present), place)
        self.moves = self.mover.io_binding()
        for i, (output, name) in enumerate(present.items()):
            self.moves.bind_ortvalue_input(f"long.{i}", self.replay.outputs[output])
            self.moves.bind_ortvalue_output(f"short.{i}", self.replay.inputs[name])

    def step(self, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
        """Run one step.

        Returns:
            output -> array, without the past.
        """
        names = [name for name in self.replay.outputs if name not in self.present]
        results = self.replay.run(feeds, names)
        self.mover.run_with_iobinding(self.moves, run_options(str(FIRST)))
        return results

    def past(self, columns: int) -> Arrays:
        """The last columns of the past: input -> array."""
        arrays = {name: fetch(self.replay.inputs[name], self.place) for name in self.present.values()}
        return {name: array[:, :, array.shape[PAST_AXIS] - columns :].copy() for name, array in arrays.items()}


def padded(array: NDArray[Any], columns: int) -> NDArray[Any]:
    """Keys or values with zeros to the left of them.

    Args:
        array: [batch, heads, columns so far, width].
    """
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
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    provider: Any = "CPUExecutionProvider"
    if place != CPU:
        provider = ("CUDAExecutionProvider", {"device_id": str(place[1]), "enable_cuda_graph": "1"})
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=[provider], enable_fallback=0)
