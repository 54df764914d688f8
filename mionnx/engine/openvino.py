"""The engine OpenVINO: its CPU plugin, in float32.

1. It would compute in bfloat16 where the processor can: it is told not to.
2. Its snippets join the nodes of an attention in one kernel, unless a value between them is an output: captured scores
   or patterns would move the last bits of the logits. They are turned off, unless `fast` allows them.
3. It takes an input that has a default for a constant: defaults are taken out of the graph, and fed.
4. Its TopK needs a `k` whose shape is known: it is declared.
5. It follows no symbolic link out of the graph's own folder: the weight files are linked into a temporary one.
"""

import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnx

from mionnx.engine.engine import Arrays, Engine, Input, Program, graph_of, inputs_of
from mionnx.engine.options import Options
from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.machine.files import link_or_copy

BFLOAT16 = onnx.TensorProto.BFLOAT16
SNIPPETS = "SNIPPETS_MODE"


class OpenVinoProgram(Program):
    """A compiled model."""

    def __init__(self, compiled: Any, inputs: Mapping[str, Input], defaults: Mapping[str, Any]) -> None:
        self.native, self.defaults = compiled, defaults
        self._idle: deque[Any] = deque()  # infer requests: each serves one thread at a time
        read = {name for port in compiled.inputs for name in port.names}
        self.inputs = {name: entry for name, entry in inputs.items() if name in read}
        self._outputs = {name: port for port in compiled.outputs for name in port.names}

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Arrays:
        arrays = {name: np.asarray(value) for name, value in feeds.items() if name in self.inputs}
        arrays |= {name: value for name, value in self.defaults.items() if name not in arrays and name in self.inputs}
        try:
            try:
                request = self._idle.pop()
            except IndexError:  # all are running, in other threads
                request = self.native.create_infer_request()
            results = request.infer(arrays, share_inputs=True, share_outputs=True)
            values = {name: np.array(results[self._outputs[name]]) for name in outputs}
            self._idle.append(request)
            return values
        except (RuntimeError, TypeError) as error:
            raise ModelError(f"OpenVINO failed while running the model: {error}") from error


class OpenVino(Engine):
    """OpenVINO's CPU plugin."""

    name = "openvino"
    settings = ("threads", "fast")
    packages = ("openvino",)

    def __init__(self) -> None:
        self._folders: dict[Path, tempfile.TemporaryDirectory[str]] = {}
        self._numbers = count()
        self._linking = Lock()

    def missing(self, options: Options) -> str | None:
        return None if find_spec("openvino") else "OpenVINO is not installed: pip install openvino"

    def lacks(self, options: Options) -> tuple[str, ...]:
        return ("bfloat16",)  # it neither takes nor gives it in Python

    def facts(self, options: Options) -> dict[str, str]:
        return {"openvino": version("openvino"), **{key: str(value) for key, value in _settings(options).items()}}

    def source(self, options: Options) -> str:
        compiled = f'openvino.Core().compile_model(path, "CPU", {_settings(options)!r})'
        return f"import openvino\n\nmodel = {compiled}\nreturn model(feeds)[model.output(0)]"

    def open(
        self, model: Path | bytes, folder: Path, options: Options, *, optimised: bool = False, spinning: bool = True
    ) -> OpenVinoProgram:
        import openvino

        proto = graph_of(model)
        if any(value.type.tensor_type.elem_type == BFLOAT16 for value in (*proto.graph.input, *proto.graph.output)):
            raise ModelError("OpenVINO takes and gives no bfloat16 in Python: use engine='onnxruntime', or float32")
        inputs, defaults = inputs_of(proto), _take_defaults(proto)
        _declare_counts(proto)
        with self._linking:
            weights = self._weights(folder, proto)
        file = weights / f"{next(self._numbers)}.onnx"
        try:
            file.write_bytes(proto.SerializeToString())
            compiled = openvino.Core().compile_model(str(file), "CPU", _settings(options))
        except (OSError, RuntimeError) as error:
            raise ModelError(f"OpenVINO cannot open this part of the model: {error}") from error
        finally:
            file.unlink(missing_ok=True)
        return OpenVinoProgram(compiled, inputs, defaults)

    def _weights(self, folder: Path, proto: onnx.ModelProto) -> Path:
        """A folder of this process that holds a model's weight files."""
        key = folder.resolve()
        scratch = self._folders[key] = self._folders.get(key) or tempfile.TemporaryDirectory()
        for name in onnx_file.locations(proto):
            source, target = (folder / name).resolve(), Path(scratch.name) / name
            try:
                if not (target.exists() and _state(source) == _state(target)):
                    target.unlink(missing_ok=True)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    link_or_copy(source, target)
            except OSError as error:
                target.unlink(missing_ok=True)
                raise ModelError(f"cannot copy {source} for OpenVINO: {error}") from error
        return Path(scratch.name)


def _settings(options: Options) -> dict[str, Any]:
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
    if options.threads:
        settings["INFERENCE_NUM_THREADS"] = options.threads
    return settings if options.fast else {**settings, SNIPPETS: "DISABLE"}


def _take_defaults(proto: onnx.ModelProto) -> Arrays:
    """Remove the defaults of inputs from a graph, and give them."""
    names = {value.name for value in proto.graph.input}
    tensors = list(proto.graph.initializer)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(tensor for tensor in tensors if tensor.name not in names)
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors if tensor.name in names}


def _declare_counts(proto: onnx.ModelProto) -> None:
    """Write down that the `k` of every TopK is one number, as the standard says."""
    counts = {node.input[1] for node in proto.graph.node if node.op_type == "TopK"}
    for value in proto.graph.input:
        if value.name in counts:
            value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, [1]))


def _state(file: Path) -> tuple[int, int]:
    return file.stat().st_size, file.stat().st_mtime_ns
