"""An `onnxruntime.InferenceSession` on the requested provider, or an error.

ONNX Runtime goes on with the CPU where a provider does not start, and leaves it the nodes that a provider has no kernel
for. The first is an error here, the second a `FallbackWarning`. On another device all sessions share the weights; by
itself each would hold a copy of its own.
"""

import ctypes
import io
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from mionnx.engine.device import Device, put
from mionnx.engine.device_graph import keep_transposed, move_positions
from mionnx.engine.engine import graph_of
from mionnx.engine.halved_products import FOLDED_PREFIX
from mionnx.engine.merged_products import with_merged
from mionnx.engine.options import CUDA_GRAPH, PROVIDERS, Options
from mionnx.engine.placement import warn_of_fallback, why_no_cuda_graph
from mionnx.errors import ModelError, RuntimeMissingError
from mionnx.machine import memory

# These fusions move the last bits when a tensor inside them becomes an output: an observation would change the result.
UNSTABLE_FUSIONS = (
    "SkipLayerNormFusion",
    "GeluApproximation",
    "FastGeluFusion",
    "BiasGeluFusion",
    "GeluFusionL2",
    "MatMulScaleFusion",
)

# Folding would store weights as [in, out], which unpacked products read more slowly than [out, in]: 1.2 to 1.6 times at
# 16 and 64 tokens. Unfolded, the transposition becomes a part of the product, with the same bits.
FOLDING = "ConstantFolding"

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
_on_devices: "weakref.WeakValueDictionary[Any, onnxruntime.OrtValue]" = weakref.WeakValueDictionary()
_alone = Lock()

CUDA_PROVIDER = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
CUDA_NEEDS = 'an NVIDIA driver, CUDA 13 and cuDNN 9: pip install "onnxruntime-gpu[cuda,cudnn]" nvidia-cublas'


def open_session(
    model: Path | bytes,
    folder: Path,
    settings: onnxruntime.SessionOptions,
    options: Options,
    without: Sequence[str] = (),
) -> onnxruntime.InferenceSession:
    """Open a session."""
    if options.provider_name() == PROVIDERS["cpu"]:
        merged = model if options.level == "none" else with_merged(model)
        if isinstance(merged, bytes) and FOLDED_PREFIX.encode() in merged:  # computed once
            without = [one for one in without if one != FOLDING]
        return _session(merged if isinstance(merged, bytes) else str(merged), folder, settings, options, without)
    proto = graph_of(model)
    if options.provider_name() == PROVIDERS["cuda"]:
        load_cuda()
        move_positions(proto)
        if not settings.optimized_model_filepath:  # a file for others has no inputs but the model's
            keep_transposed(proto)
    session = _elsewhere(proto, folder, settings, options, [one for one in without if one != FOLDING])
    warn_of_fallback(session, proto, folder, options.provider_name())
    return session


def _elsewhere(
    proto: onnx.ModelProto,
    folder: Path,
    settings: onnxruntime.SessionOptions,
    options: Options,
    without: Sequence[str],
) -> onnxruntime.InferenceSession:
    """Open a session on another provider than the CPU, and on no other."""
    name = options.provider_name()
    cuda = name == PROVIDERS["cuda"] and not settings.optimized_model_filepath
    weights = _weights(proto, folder, options) if cuda else {}
    for weight, value in weights.items():
        settings.add_initializer(weight, value)
    try:
        session = _session(proto.SerializeToString(), folder, settings, options, without)
    except ModelError as error:
        if not options.cuda_graphs or "graph capture" not in str(error):
            raise
        plain = _session(proto.SerializeToString(), folder, settings, options, without, cuda_graphs=False)
        why = why_no_cuda_graph(plain, proto, name)
        raise ModelError(f"cuda_graphs=True: {folder.name} cannot be one CUDA graph: {why}; leave it out") from error
    if name not in session.get_providers():
        raise RuntimeMissingError(f"{name} does not start here; ONNX Runtime printed why")
    session.weights = weights  # which it reads, and does not keep
    return session


def _weights(proto: onnx.ModelProto, folder: Path, options: Options) -> dict[str, onnxruntime.OrtValue]:
    """The large weights, on the device."""
    try:
        return weights_of(proto, folder, options.place)
    except Exception as error:  # ONNX Runtime's errors share no base class
        if why := cuda_trouble():
            why = f"{options.provider_name()} does not start here: {why}. It needs {CUDA_NEEDS}"
            raise RuntimeMissingError(why) from error
        raise ModelError(f"ONNX Runtime cannot open the model in {folder}: {error}") from error


def _session(
    model: str | bytes,
    folder: Path,
    settings: onnxruntime.SessionOptions,
    options: Options,
    without: Sequence[str],
    cuda_graphs: bool = True,
) -> onnxruntime.InferenceSession:
    provider = {key: value for key, value in options.of_provider.items() if cuda_graphs or key != CUDA_GRAPH}
    try:
        with memory.mapping():
            return onnxruntime.InferenceSession(
                model,
                settings,
                providers=[(options.provider_name(), provider)],
                disabled_optimizers=[*without, *(() if options.fast else UNSTABLE_FUSIONS)],
                enable_fallback=0,
            )
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise ModelError(f"ONNX Runtime cannot open the model in {folder}: {error}") from error


@cache
def load_cuda() -> None:
    """Load the libraries of CUDA and cuDNN that pip installs, torch's included."""
    package = find_spec("nvidia")
    roots = [Path(root) for root in package.submodule_search_locations or ()] if package else []
    with redirect_stdout(io.StringIO()):  # it prints what is not in a folder
        # By itself it looks beside onnxruntime, where torch's libraries need not lie.
        for folder in sorted({path.parent for root in roots for path in root.glob("*/lib/lib*.so*")}):
            onnxruntime.preload_dlls(directory=str(folder))
    state = onnxruntime.capi.onnxruntime_pybind11_state
    if hasattr(state, "set_arena_extend_strategy"):  # by default an arena takes up to twice as much
        with _without_stderr():  # that this call is an old one; nothing newer is for memory outside of sessions
            state.set_arena_extend_strategy(state.ArenaExtendStrategy.kSameAsRequested)


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Let nothing that a library writes by itself come to the terminal."""
    try:
        kept = os.dup(2)
    except OSError:  # a process without one
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def cuda_trouble() -> str | None:
    """Why the provider's library cannot be loaded; None if it can, or is not there."""
    try:
        ctypes.CDLL(str(CUDA_PROVIDER.with_name("libonnxruntime_providers_shared.so")), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(CUDA_PROVIDER))
    except OSError as error:
        return str(error)
    return None


def weights_of(model: onnx.ModelProto, folder: Path, place: Device) -> dict[str, onnxruntime.OrtValue]:
    """The large weights of a graph on a device, copied there by the first caller; they must outlive the session."""
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
        weight = _on_devices.get(key)
        if weight is None:
            weight = _on_devices[key] = _borrowed(_read(file, where, tensor), place)
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
