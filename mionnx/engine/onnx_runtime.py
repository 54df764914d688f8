"""ONNX Runtime sessions: the only place that opens one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine import device
from mionnx.engine.ort import onnxruntime
from mionnx.errors import InputError, ModelError, RuntimeMissingError, nearest
from mionnx.machine import memory

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
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
# Threads spin while they wait for work, and by default go on for some 50 ms after a run: the next graph then runs twice
# as long on the processors that they hold (25 -> 57 ms for one token of GPT-2 124M, two graphs by turns).
STOP_SPINNING = "session.force_spinning_stop"
CUDA_GRAPH = "enable_cuda_graph"
BFLOAT16 = "tensor(bfloat16)"
LEVELS = {
    "none": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


@dataclass(frozen=True)
class Options:
    """How sessions of a model are opened.

    Attributes:
        provider: "cpu", "cuda", or the name of any execution provider of the installed ONNX Runtime.
        threads: threads inside one operator; 0 lets ONNX Runtime choose.
        fast: allow fusions that change the last bits of the logits when something inside them is captured.
        max_graphs: how many rewritten graphs stay open; beyond, the one used longest ago is closed.
        max_bytes: how much memory open graphs may take together, by what their weights take; half of the machine's if
            it is 0.
        prepack: let sessions pack their weights. Without, a graph opens several times faster and runs slower on fewer
            than some 500 tokens: for structures that run once each, and for large batches. None lets the first call
            decide: packed, unless it has 512 tokens or more. The last bits differ between the two, so one model object
            uses one of them for all.
        base: open graphs from a prepared base (see `mionnx.run.prepacked`): "auto" uses one that is there, and makes
            one for the
            second rewritten graph of a model with more than 64 MiB of weights; "always"; "ready" makes none, and uses
            one that is there; "never".
        provider_options: of the provider, as ONNX Runtime names them: `{"device_id": 1, "gpu_mem_limit": 2**34}`.
        level: how far graphs are optimised: "none", "basic", "extended" or "all".
        cuda_graphs: let every shape of `forward`'s calls be one CUDA graph, launched as a whole: faster where a small
            structure runs many times on other values. For the provider "cuda", and graphs without control flow. What
            is captured is then copied to the CPU at once.
    """

    provider: str = "cpu"
    threads: int = 0
    fast: bool = False
    max_graphs: int = 64
    max_bytes: int = 0
    prepack: bool | None = None
    base: str = "auto"
    provider_options: Mapping[str, str | int] = field(default_factory=dict)
    level: str = "all"
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        """Refuse what no session can be opened with.

        Raises:
            InputError: a level that is not one of `LEVELS`, or CUDA graphs where there are none.
        """
        if self.level not in LEVELS:
            raise InputError(f"no optimisation level {self.level!r}; there are {', '.join(LEVELS)}")
        if CUDA_GRAPH in self.provider_options:
            raise InputError(f"{CUDA_GRAPH} replays what was computed before unless inputs are fixed: cuda_graphs=True")
        if self.cuda_graphs and PROVIDERS.get(self.provider, self.provider) != PROVIDERS["cuda"]:
            raise InputError(f"cuda_graphs=True is for the provider 'cuda', not {self.provider!r}")

    @property
    def place(self) -> device.Device:
        """Where results are computed."""
        return device.place_of(PROVIDERS.get(self.provider, self.provider), self.device_id)

    @property
    def of_provider(self) -> dict[str, str]:
        """The provider's options, as ONNX Runtime takes them."""
        given = {key: str(value) for key, value in self.provider_options.items()}
        return {**given, CUDA_GRAPH: "1"} if self.cuda_graphs else given

    @property
    def device_id(self) -> int:
        """Which of several devices."""
        return int(self.provider_options.get("device_id", 0))

    def provider_name(self) -> str:
        """The provider's full name.

        Raises:
            RuntimeMissingError: the installed ONNX Runtime does not have it.
        """
        name = PROVIDERS.get(self.provider, self.provider)
        available = onnxruntime.get_available_providers()
        if name not in available:
            raise RuntimeMissingError(
                f"no {name} in this ONNX Runtime, which has {', '.join(available)}{nearest(name, available)}"
            )
        return name


def version() -> str:
    """ONNX Runtime's version."""
    return str(onnxruntime.__version__)


def open_session(
    model: Path | bytes,
    folder: Path,
    options: Options,
    optimised: bool = False,
    assigned: bool = False,
    spinning: bool = True,
) -> "onnxruntime.InferenceSession":
    """Open a session.

    Args:
        model: a file, or the bytes of a model whose external data lie in `folder`.
        folder: the hooked model's folder, or the base's.
        options: provider, threads, fusions, packing.
        optimised: whether the graph is one that ONNX Runtime has optimised already.
        assigned: whether it remembers which provider has which nodes, for `assigned`.
        spinning: whether its threads keep the processor while they wait during a run.

    Raises:
        ModelError: ONNX Runtime refuses the model.
        RuntimeMissingError: the provider is not there.
    """
    settings = _settings(folder, options)
    if assigned:
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if not spinning:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if optimised:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        settings.add_session_config_entry("session.prepack.enable_parallel", "1")
    if options.prepack is False:
        settings.add_session_config_entry("session.disable_prepacking", "1")
    unpacked = options.prepack is False and not optimised
    opened = _open(model, folder, settings, options, [FOLDING] if unpacked else [])
    if options.prepack is not False:
        memory.release()  # the buffers in which weights were packed, tens of megabytes for each session
    return opened


def assigned(session: "onnxruntime.InferenceSession") -> set[str]:
    """The providers that have nodes of a session opened to remember it; none where ONNX Runtime cannot tell."""
    told: list[Any] = getattr(session, "get_provider_graph_assignment_info", list)()  # since 1.24
    return {part.ep_name for part in told}


def _settings(folder: Path, options: Options) -> "onnxruntime.SessionOptions":
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads
    settings.log_severity_level = 3
    settings.graph_optimization_level = LEVELS[options.level]
    settings.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    settings.add_session_config_entry(STOP_SPINNING, "1")
    return settings


def _open(
    model: Path | bytes,
    folder: Path,
    settings: "onnxruntime.SessionOptions",
    options: Options,
    without: Sequence[str] = (),
) -> "onnxruntime.InferenceSession":
    try:
        return onnxruntime.InferenceSession(
            model if isinstance(model, bytes) else str(model),
            settings,
            providers=[(options.provider_name(), options.of_provider)],
            disabled_optimizers=[*without, *(() if options.fast else UNSTABLE_FUSIONS)],
        )
    except RuntimeMissingError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise ModelError(f"ONNX Runtime cannot open the model in {folder}: {error}") from error


def optimise(model: bytes, folder: Path, path: Path, data: str, options: Options) -> None:
    """Write a model as ONNX Runtime optimises it for a provider; it then holds operators of this runtime's own.

    Args:
        model: the bytes of a model whose external data lie in `folder`.
        folder: of the hooked model.
        path: of the optimised model.
        data: name of a file beside it for the weights.
        options: provider, fusions.

    Raises:
        ModelError: ONNX Runtime refuses the model.
        RuntimeMissingError: the provider is not there.
    """
    settings = _settings(folder, options)
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    _write_to(settings, path, data)
    settings.add_session_config_entry("session.disable_prepacking", "1")
    _open(model, folder, settings, options)


def _write_to(settings: "onnxruntime.SessionOptions", path: Path, data: str) -> None:
    """Have the optimised model written while it is opened."""
    settings.optimized_model_filepath = str(path)
    settings.add_session_config_entry("session.optimized_model_external_initializers_file_name", data)
    settings.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")


def prepare(model: bytes, folder: Path, path: Path, data: str, options: Options) -> None:
    """Write a model as this machine runs it, its weights packed: see `mionnx.run.prepacked`.

    Args:
        model: the bytes of a model whose external data lie in `folder`.
        folder: of the hooked model.
        path: of the prepared graph.
        data: name of a file beside it for the weights.
        options: provider, fusions.

    Raises:
        ModelError: ONNX Runtime refuses the model.
    """
    settings = _settings(folder, options)
    _write_to(settings, path, data)
    settings.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    _open(model, folder, settings, options, [FOLDING])


def run(
    session: "onnxruntime.InferenceSession", outputs: Sequence[str], feeds: Mapping[str, Any]
) -> dict[str, NDArray[Any]]:
    """Run a session on those of the feeds that its graph reads.

    Raises:
        ModelError: ONNX Runtime failed while running.
    """
    entries = read_by(session)
    given = {name: np.asarray(value) for name, value in feeds.items() if name in entries}
    if any(entry.type == BFLOAT16 for entry in (*entries.values(), *session.get_outputs())):
        return {name: held.array for name, held in device.run_at(session, outputs, given, device.CPU).items()}
    try:
        found = session.run(list(outputs), given, device.run_options())
    except Exception as error:  # ONNX Runtime's errors share no base class
        raise ModelError(f"ONNX Runtime failed while running the model: {error}") from error
    return dict(zip(outputs, found, strict=True))


def run_in_place(
    session: "onnxruntime.InferenceSession", outputs: Sequence[str], feeds: Mapping[str, Any], options: Options
) -> dict[str, device.DeviceArray]:
    """As `run`, but the results stay where the provider computes them, so that they can be fed again uncopied.

    Args:
        session: a session of these options.
        outputs: names.
        feeds: arrays, or results of an earlier call.
        options: what the session was opened with.

    Raises:
        ModelError: ONNX Runtime failed while running.
    """
    entries = read_by(session)
    return device.run_at(session, outputs, {k: v for k, v in feeds.items() if k in entries}, options.place)


def compute(
    session: "onnxruntime.InferenceSession", outputs: Sequence[str], feeds: Mapping[str, Any], options: Options
) -> dict[str, Any]:
    """Run a session: results on the CPU are arrays, those on another device stay there until they are looked at."""
    if options.place == device.CPU:
        return dict(run(session, outputs, feeds))
    return dict(run_in_place(session, outputs, feeds, options))


def resident(arrays: Mapping[str, NDArray[Any]], options: Options) -> dict[str, device.DeviceArray]:
    """Arrays put where the provider computes, once for many calls of `run_in_place`."""
    place = options.place
    return {name: device.DeviceArray(device.put(array, place), place) for name, array in arrays.items()}


def read_by(session: "onnxruntime.InferenceSession") -> dict[str, Any]:
    """What a session can be fed, by name."""
    return {entry.name: entry for entry in (*session.get_inputs(), *session.get_overridable_initializers())}
