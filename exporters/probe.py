"""Graphs run once in ONNX Runtime, without optimisations, so that they can be checked before anybody uses them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from mionnx.errors import ExportError, ModelError
from mionnx.graph import validate
from mionnx.graph.dataflow import Dataflow, extract

Array = NDArray[Any]
PROBE_ROWS, PROBE_TOKENS = 2, 6
MOMENT = 0.5  # seconds
ROUNDINGS = 64  # of the dtype, at the size of the compared numbers, by which two sides of a law may differ
ONNX_FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


@dataclass(frozen=True)
class Probe:
    """One run of an adopted graph."""

    values: Mapping[str, Array]  # hook points, logits and present keys and values by name
    dtypes: Mapping[str, str]  # ONNX Runtime's name of the dtype of every value of the graph
    feeds: Mapping[str, Array]  # the inputs

    @property
    def rounding(self) -> float:
        """The relative difference that rounding to the model's dtype explains."""
        fractions = (value.dtype for value in self.values.values() if value.dtype.kind not in "iu")
        return ROUNDINGS * max(float(np.finfo(dtype).eps) for dtype in fractions)


def probe(proto: onnx.ModelProto, folder: Path, names: Sequence[str]) -> Probe:
    """Run a graph with the inputs of a hooked model once, some of its values beside its outputs."""
    session = open_session(proto, folder, [name for node in proto.graph.node for name in node.output if name])
    feeds = {entry.name: feed_of(entry) for entry in session.get_inputs()}
    outputs = [*names, *(entry.name for entry in proto.graph.output)]
    dtypes = {entry.name: entry.type for entry in session.get_outputs()}
    return Probe(dict(zip(outputs, run(session, outputs, feeds), strict=True)), dtypes, feeds)


def check_bounded(proto: onnx.ModelProto, folder: Path) -> None:
    """Refuse a graph with a value without a bound or a loop without an end, before it is run."""
    try:
        validate.check(proto, folder, [validate.input_shapes(proto, PROBE_ROWS, PROBE_TOKENS, 0)])
    except ModelError as error:
        raise ExportError(f"the graph is refused: {error}") from error


def open_session(proto: onnx.ModelProto, folder: Path, values: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """A session without optimisations, in which values of the graph may be outputs too."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    outputs = {entry.name for entry in shown.graph.output}
    # without a dtype: ONNX Runtime infers it, and tells it
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values if name not in outputs)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # fatal ones alone: what fails is said by the error
    options.add_session_config_entry("session.disable_prepacking", "1")  # longer than the one run that follows
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        return onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors share no base class
        raise ExportError(f"ONNX Runtime does not open the graph: {error}") from error


def open_part(
    flow: Dataflow, folder: Path, sources: Sequence[str], ends: Sequence[str]
) -> onnxruntime.InferenceSession:
    """A session of the part of a graph that computes some values from others."""
    return open_session(extract(flow, [*sources], [*ends]), folder)


def run(session: onnxruntime.InferenceSession, names: list[str], values: Mapping[str, Array]) -> list[Array]:
    """Run a session on those of some values that it takes."""
    try:
        return interruptible(session, names, {entry.name: values[entry.name] for entry in session.get_inputs()})
    except Exception as error:  # its errors share no base class
        raise ExportError(f"ONNX Runtime does not run the graph: {error}") from error


def interruptible(session: onnxruntime.InferenceSession, names: list[str], feeds: Mapping[str, Array]) -> list[Array]:
    """Run a session in another thread: ONNX Runtime does not hear Ctrl-C."""
    options, outcome = onnxruntime.RunOptions(), Future[list[Array]]()

    def work() -> None:
        try:
            outcome.set_result(session.run(names, dict(feeds), options))
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        return outcome.result()
    except BaseException:
        options.terminate = True
        thread.join(MOMENT)
        raise


def feed_of(entry: Any, batch: int = PROBE_ROWS, seq: int = PROBE_TOKENS, past: int = 0) -> Array:
    """An input of a probe, of a session's: texts without padding, after a past of zeros."""
    if entry.name == "input_ids":
        # ids that differ within a row and between rows, small enough for any vocabulary, and not the first special ones
        return (np.arange(batch * seq, dtype=np.int64).reshape(batch, seq) * 7) % 97 + 3
    if entry.name == "attention_mask":
        return np.ones((batch, past + seq), np.int64)
    if entry.name == "token_type_ids":
        return np.zeros((batch, seq), np.int64)
    if entry.name == "position_ids":
        return np.tile(np.arange(past, past + seq, dtype=np.int64), (batch, 1))
    if entry.type in ONNX_FLOATS and len(entry.shape) in (3, 4):  # keys, values, or a state: that has no open axis
        sizes = (size if isinstance(size, int) else past for size in entry.shape[1:])
        return np.zeros((batch, *sizes), ONNX_FLOATS[entry.type])
    raise ExportError(f"input {entry.name}, {entry.type} {entry.shape}, is none of a decoder's: it cannot be adopted")
