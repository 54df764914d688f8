"""The engine ort-webgpu: ONNX Runtime's WebGPU plug-in, on a graphics processor or, by Mesa's lavapipe, without one.

1. It computes a file of float16 in float16, products included, as shaders do: a witness that the CPU provider is not.
2. A node of numbers that the plug-in leaves to the CPU would make another verdict: such a graph is refused, the node
   named. Masks, positions and shapes may lie there.
3. A weight beyond `BUFFER` is larger than a storage buffer of many adapters: lookups in it and products behind it run
   on the CPU, the rest between them here.
4. One driver that computes on the processor is allowed where it is the only one.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from mionnx.engine.device_graph import shape_values
from mionnx.engine.engine import Arrays, Engine, Program, graph_of, inputs_of
from mionnx.engine.options import Options
from mionnx.engine.placement import CPU_PROVIDER, RECORD_ASSIGNMENT, named, providers_of
from mionnx.errors import ModelError
from mionnx.graph.dataflow import Dataflow, extract

PLUGIN, DISTRIBUTION = "onnxruntime_ep_webgpu", "onnxruntime-ep-webgpu"
SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"  # an environment variable of the plug-in
BUFFER = 2**27  # bytes of a storage buffer that every adapter has
INSTALL = f"pip install {DISTRIBUTION}"
DRIVER = (
    "a Vulkan driver with shaderFloat16: without a graphics processor apt-get install -t bookworm-backports "
    "mesa-vulkan-drivers (25 or later)"
)
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
ON_CPU = "CPU"


class WebGpuProgram(Program):
    """Up to three sessions, one behind the other: lookups in large tables, the body, products with large weights."""

    def __init__(self, proto: onnx.ModelProto, folder: Path) -> None:
        self.inputs = inputs_of(proto)
        self.native = [(_session(part, folder, device), part) for part, device in parts_of(proto)]

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Arrays:
        values: Arrays = {name: np.asarray(value) for name, value in feeds.items() if name in self.inputs}
        last = len(self.native) - 1
        for number, (session, part) in enumerate(self.native):
            inputs = {one.name for one in part.graph.input}
            names = [one.name for one in part.graph.output if one.name in outputs or number < last]
            if not names:
                continue
            try:
                results = session.run(names, {name: value for name, value in values.items() if name in inputs})
            except Exception as error:  # ONNX Runtime's errors share no base class
                raise ModelError(f"ONNX Runtime failed while running the model on WebGPU: {error}") from error
            values |= dict(zip(names, results, strict=True))
        return {name: values[name] for name in outputs}


class WebGpu(Engine):
    """ONNX Runtime's WebGPU plug-in."""

    name = "ort-webgpu"
    packages = (DISTRIBUTION,)

    def missing(self, options: Options) -> str | None:
        if find_spec(PLUGIN) is None:
            return f"ONNX Runtime's WebGPU plug-in is not installed: {INSTALL}; and {DRIVER}"
        why = trouble()
        return f"WebGPU does not start here: {why}. It needs {DRIVER}" if why else None

    def lacks(self, options: Options) -> tuple[str, ...]:
        return ("bfloat16",)

    def facts(self, options: Options) -> dict[str, str]:
        driver = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES") or "the system's"
        own = {"onnxruntime": str(onnxruntime.__version__), DISTRIBUTION: version(DISTRIBUTION)}
        return {**own, "driver": driver, "weights beyond": f"{BUFFER} bytes on the CPU"}

    def open(
        self, model: Path | bytes, folder: Path, options: Options, *, optimised: bool = False, spinning: bool = True
    ) -> WebGpuProgram:
        if why := self.missing(options):
            raise ModelError(why)
        return WebGpuProgram(graph_of(model), folder)


@cache
def trouble() -> str | None:
    """Why the plug-in cannot run a float16 sum here; None if it can."""
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [4]) for name in ("from", "to")]
    body = helper.make_graph([helper.make_node("Add", ["from", "from"], ["to"], "sum")], "trial", info[:1], info[1:])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    try:
        session = _session(model, Path(), "webgpu")
        result = session.run(["to"], {"from": np.ones(4, np.float16)})[0]
    except Exception as error:  # ONNX Runtime's errors share no base class
        return str(error).strip().splitlines()[0]
    return None if np.array_equal(result, np.full(4, 2, np.float16)) else "it adds wrongly"


@cache
def _device() -> Any:
    """The plug-in's device, registered once a process."""
    import onnxruntime_ep_webgpu as plugin

    os.environ.setdefault(SOFTWARE, "1")
    onnxruntime.set_default_logger_severity(3)  # the plug-in warns that it may be the processor
    onnxruntime.register_execution_provider_library("webgpu", plugin.get_library_path())
    devices = [one for one in onnxruntime.get_ep_devices() if one.ep_name == plugin.get_ep_name()]
    if not devices:
        raise ModelError("the plug-in finds no device")
    return devices[0]


def _session(proto: onnx.ModelProto, folder: Path, device: str) -> onnxruntime.InferenceSession:
    """A session of one part, refused where its numbers would be computed elsewhere."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    settings.add_session_config_entry(RECORD_ASSIGNMENT, "1")
    if device != ON_CPU:
        settings.add_provider_for_devices([_device()], {})
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), settings)
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise ModelError(f"ONNX Runtime cannot open the model in {folder} on WebGPU: {error}") from error
    if device != ON_CPU and (nodes := numbers_on_cpu(session, proto)):
        raise ModelError(f"WebGPU leaves {named(nodes)} to the CPU: its numbers would be no verdict on WebGPU")
    return session


def numbers_on_cpu(session: onnxruntime.InferenceSession, proto: onnx.ModelProto) -> list[tuple[str, str]]:
    """Nodes on the CPU that compute floats of the model's: not shapes, masks, positions."""
    return numbers_among([(one.op_type, one.name) for one in providers_of(session).get(CPU_PROVIDER, [])], proto)


def numbers_among(pairs: Sequence[tuple[str, str]], proto: onnx.ModelProto) -> list[tuple[str, str]]:
    """Of nodes by operator and name, those that compute floats of the model's."""
    flow = Dataflow(onnx.shape_inference.infer_shapes(proto))
    types = flow.facts.types
    nodes = {node.name: node for node in flow.nodes if node.name}
    shapes = shape_values(proto.graph)
    sources = [one.name for one in proto.graph.input if types.get(one.name) in FLOATS]
    carrying = flow.descendants([*sources, *(node.output[0] for node in flow.nodes if node.op_type == "Gather")])
    computing = []
    for operator, name in pairs:
        node = nodes.get(name)
        floats = [one for one in node.output if types.get(one) in FLOATS] if node is not None else []
        if floats and not shapes.issuperset(floats) and {*floats} & carrying and operator != "Gather":
            computing.append((operator, name))
    return computing


def parts_of(proto: onnx.ModelProto) -> list[tuple[onnx.ModelProto, str]]:
    """A graph in parts, each with its device: what reads a weight beyond `BUFFER` is on the CPU."""
    large = [tensor.name for tensor in proto.graph.initializer if _bytes(tensor) > BUFFER]
    if not large:
        return [(proto, "webgpu")]
    flow = Dataflow(onnx.shape_inference.infer_shapes(proto))
    constants = flow.descendants(large) - flow.varying
    readers = [node for node in flow.nodes if constants & {*node.input} and node.output[0] in flow.varying]
    lookups = [name for node in readers if node.op_type.startswith("Gather") for name in node.output]
    heads = [name for node in readers if not node.op_type.startswith("Gather") for name in node.output]
    behind = flow.descendants(heads)
    outputs = [one.name for one in proto.graph.output]
    last = [name for name in outputs if name in behind]
    tail_nodes = [flow.nodes[at] for at in flow.ancestors(last) if {*flow.nodes[at].output} & behind]
    types = flow.facts.types
    reads = dict.fromkeys(name for node in tail_nodes for name in node.input)
    ends = [name for name in reads if name in flow.varying - behind and types.get(name) in FLOATS]
    first = [*dict.fromkeys(lookups)]
    inner = [*dict.fromkeys([*ends, *(name for name in outputs if name not in behind)])]
    parts = [(extract(flow, [], first), ON_CPU)] if first else []
    parts += [(_typed(extract(flow, first, [name for name in inner if name not in first]), types), "webgpu")]
    parts += [(_typed(extract(flow, ends, last), types), ON_CPU)] if last else []
    return parts


def _typed(part: onnx.ModelProto, types: Mapping[str, int]) -> onnx.ModelProto:
    """Inputs and outputs of a part with their own types."""
    for value in (*part.graph.input, *part.graph.output):
        value.type.tensor_type.elem_type = types.get(value.name, value.type.tensor_type.elem_type)
    return part


def _bytes(tensor: TensorProto) -> int:
    return int(prod(tensor.dims) * np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize)
