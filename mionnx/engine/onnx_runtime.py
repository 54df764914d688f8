"""The engine ONNX Runtime: the one place that opens its sessions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from mionnx.engine import device
from mionnx.engine.cuda_graphs import CudaGraphs, RollingCache, shapes_of
from mionnx.engine.engine import Arrays, Engine, Input, Operator, Program
from mionnx.engine.options import ONNX_RUNTIME, PROVIDERS, Options, known_providers
from mionnx.engine.placement import RECORD_ASSIGNMENT, providers_of, without_kernel
from mionnx.engine.session import FOLDING, UNSTABLE_FUSIONS, open_session
from mionnx.errors import ModelError, RuntimeMissingError
from mionnx.machine import memory
from mionnx.machine.once import Once, once_property

# Threads spin while they wait for work, and by default go on for some 50 ms after a run: the next graph then runs twice
# as long on the processors that they hold (25 -> 57 ms for one token of GPT-2 124M, two graphs by turns).
WORTH_RETURNING = 2**24  # bytes that a process has grown by while a session was opened
STOP_SPINNING = "session.force_spinning_stop"
OPTIMISATION = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
NUMPY = {"float": np.float32, "double": np.float64, "bfloat16": ml_dtypes.bfloat16, "string": np.object_}
INSTALL = {"cuda": "pip install onnxruntime-gpu, on a machine with an NVIDIA GPU"}

SOURCE = """import onnxruntime

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = {threads}
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.{level}
session = onnxruntime.InferenceSession(path, options, providers={providers}, disabled_optimizers={disabled})
return session.run(None, feeds)[0]"""


class OrtProgram(Program):
    """A session."""

    def __init__(self, session: onnxruntime.InferenceSession, options: Options) -> None:
        self.native, self.options, self.place = session, options, options.place
        inputs = [(entry, False) for entry in session.get_inputs()]
        inputs += [(entry, True) for entry in session.get_overridable_initializers()]
        self.inputs = {one.name: Input(_dtype(one.type), len(one.shape), optional) for one, optional in inputs}
        dtypes = [_dtype(entry.type) for entry in (*(one for one, _ in inputs), *session.get_outputs())]
        self._bfloat16 = ml_dtypes.bfloat16 in dtypes
        self.rolls = options.cuda_graphs
        self._rolling: dict[Any, list[RollingCache]] = {}
        self.shares_weights = bool(getattr(session, "weights", None))

    def __del__(self, mapped: Any = memory.mapped) -> None:  # a default is there at the end of the program too
        with mapped:  # the end of a session unmaps its files
            self.__dict__.clear()

    def _read(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in feeds.items() if name in self.inputs}

    def run(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Arrays:
        arrays = {name: np.asarray(value) for name, value in self._read(feeds).items()}
        if self._bfloat16:
            results = device.run_at(self.native, outputs, arrays, device.CPU)
            return {name: result.array for name, result in results.items()}
        try:
            values = self.native.run(list(outputs), arrays, device.run_options())
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise ModelError(f"ONNX Runtime failed while running the model: {error}") from error
        return dict(zip(outputs, values, strict=True))

    def run_on_device(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, device.DeviceArray]:
        return device.run_at(self.native, outputs, self._read(feeds), self.place)

    @once_property
    def cuda_graphs(self) -> CudaGraphs:
        return CudaGraphs(self.native, self.place)

    def compute(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        if self.options.cuda_graphs:
            return dict(self.cuda_graphs.run(outputs, self._read(feeds)))
        return dict(self.run(outputs, feeds) if self.place == device.CPU else self.run_on_device(outputs, feeds))

    def rolling(
        self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]], present: Mapping[str, str]
    ) -> RollingCache:
        arrays = self._read(feeds)
        free = self._rolling.setdefault(shapes_of(outputs, arrays), [])
        try:
            with suppress(IndexError):
                cache = free.pop()  # of a generation that is over: its CUDA graph is there
                cache.replay.write(arrays)
                return cache
            number = self.cuda_graphs.next_id()
            return RollingCache(self.native, outputs, arrays, present, self.place, number, free)
        except Exception as error:  # ONNX Runtime's errors share no base class
            raise ModelError(f"ONNX Runtime failed while decoding with CUDA graphs: {error}") from error

    def resident(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        return {name: device.DeviceArray(device.put(array, self.place), self.place) for name, array in arrays.items()}


def _dtype(kind: str) -> "np.dtype[Any]":
    """The dtype of "tensor(float)"; an object for what is no tensor of numbers."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    try:
        return np.dtype(NUMPY.get(name, name))
    except TypeError:
        return np.dtype(np.object_)


class OnnxRuntime(Engine):
    """ONNX Runtime, on any of its execution providers."""

    name = ONNX_RUNTIME
    packages = ("onnxruntime", "onnxruntime-gpu")
    casts = True
    settings = (
        *("provider", "threads", "fast", "prepack", "base", "provider_options", "level", "cuda_graphs", "fused"),
        "accuracy_level",
    )

    def missing(self, options: Options) -> str | None:
        try:
            options.provider_name()
        except RuntimeMissingError as error:
            if options.full_provider not in known_providers():
                return str(error)
            install = INSTALL.get(options.provider, "a build of ONNX Runtime that has this provider")
            return f"{error}; what would install it: {install}"
        return None

    def lacks(self, options: Options) -> tuple[str, ...]:
        # It has no product of two matrices in bfloat16 on the CPU.
        return ("bfloat16",) if options.full_provider == PROVIDERS["cpu"] else ()

    def packs(self, options: Options) -> bool:
        return options.full_provider == PROVIDERS["cpu"]

    def computes(self, operators: Iterable[Operator], dtype: str, options: Options) -> bool:
        provider = options.full_provider
        return provider == PROVIDERS["cpu"] or not without_kernel(operators, provider, dtype)

    def facts(self, options: Options) -> dict[str, str]:
        return {
            "onnxruntime": str(onnxruntime.__version__),
            "provider": options.provider_name(),
            "level": options.level,
            "threads": str(options.threads or "all"),
        }

    def source(self, options: Options) -> str:
        providers = [(options.provider_name(), {key: str(value) for key, value in options.provider_options.items()})]
        level, disabled = OPTIMISATION[options.level].name, list(UNSTABLE_FUSIONS)
        return SOURCE.format(threads=options.threads, level=level, providers=providers, disabled=disabled)

    def open(
        self,
        model: Path | bytes,
        folder: Path,
        options: Options,
        *,
        optimised: bool = False,
        spinning: bool = True,
        in_order: bool = False,
    ) -> OrtProgram:
        settings = _settings(folder, options)
        if in_order:
            settings.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        if not spinning:
            settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if optimised:
            settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            settings.add_session_config_entry("session.prepack.enable_parallel", "1")
        return _program(model, folder, settings, options, optimised)

    def open_to_try(self, model: Path | bytes, folder: Path) -> OrtProgram:
        options = Options(level="none", prepack=False)
        settings = _settings(folder, options)
        settings.log_severity_level = 4
        return _program(model, folder, settings, options)

    def write_optimised(
        self, model: bytes, folder: Path, path: Path, data: str, options: Options, *, packed: bool = False
    ) -> None:
        settings = _settings(folder, options)
        settings.optimized_model_filepath = str(path)
        settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", data)
        settings.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        if packed:
            settings.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
            with memory.mapping():  # it ends at once
                open_session(model, folder, settings, options, [FOLDING])
            return
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        settings.add_session_config_entry("session.disable_prepacking", "1")
        with memory.mapping():
            open_session(model, folder, settings, options)

    def release(self) -> None:
        options = onnxruntime.RunOptions()
        options.add_run_config_entry(SHRINK, "cpu:0")
        _arenas.get("shrinker", _shrinker).run(["to"], {"from": [0.0]}, options)
        memory.release()

    @contextmanager
    def opened_alone(
        self, model: Path | bytes, folder: Path, options: Options, *, in_order: bool = False
    ) -> Iterator[Program]:
        program = self.open(model, folder, options, in_order=in_order)
        name, providers = options.provider_name(), providers_of(program.native)
        if providers and name not in providers:  # ONNX Runtime gives the CPU what a provider does not take
            others = ", ".join(sorted(providers))
            raise ModelError(f"{name} takes no part of this model: ONNX Runtime gave it to {others}")
        yield program


def _program(
    model: Path | bytes,
    folder: Path,
    settings: onnxruntime.SessionOptions,
    options: Options,
    optimised: bool = False,
) -> OrtProgram:
    unpacked = options.prepack is False
    if unpacked:
        settings.add_session_config_entry("session.disable_prepacking", "1")
    before = memory.resident()[0]
    session = open_session(model, folder, settings, options, [FOLDING] if unpacked and not optimised else [])
    # The buffers in which weights were packed, tens of megabytes; of small sessions there is little
    if not unpacked and memory.resident()[0] > before + WORTH_RETURNING:
        memory.release()
    return OrtProgram(session, options)


def _settings(folder: Path, options: Options) -> onnxruntime.SessionOptions:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.log_severity_level = 3
    settings.graph_optimization_level = OPTIMISATION[options.level]
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    settings.add_session_config_entry(STOP_SPINNING, "1")
    settings.add_session_config_entry(RECORD_ASSIGNMENT, "1")
    if options.provider_name() == PROVIDERS["cpu"]:
        share_arena(settings)
    return settings


# A session with an arena of its own keeps what its largest run took, and a sweep opens a session a layer: together many
# times what is in use at any moment. The shared arena grows to what the largest run takes. Packed weights are no part
# of it, so that they are returned when their session ends.
SHRINK = "memory.enable_memory_arena_shrinkage"  # of a run: return free regions of these arenas after it
AS_REQUESTED = 1  # regions have the size that is asked for, not the next power of two


def share_arena(settings: onnxruntime.SessionOptions) -> None:
    """Let a session on the CPU take its activations from the arena of all."""
    _arenas.get("arena", _register_arena)
    settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


_arenas: Once[str, Any] = Once()  # one of each a process, whichever thread asks first


def _register_arena() -> None:
    kind, use = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    where = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, use)
    onnxruntime.create_and_register_allocator(where, onnxruntime.OrtArenaCfg({"arena_extend_strategy": AS_REQUESTED}))


def _shrinker() -> onnxruntime.InferenceSession:
    """A session of one node, run only to shrink the arena at its end."""
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("from", "to")]
    body = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["from"], ["to"])], "shrink", ends[:1], ends[1:])
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    share_arena(settings)
    return onnxruntime.InferenceSession(device.model_bytes(body), settings, providers=["CPUExecutionProvider"])
