"""`Options`: the engine that runs a model's graphs, and how it opens them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnxruntime

from mionnx.engine import device
from mionnx.errors import InputError, RuntimeMissingError, nearest
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
OPTIMISATION_LEVELS = ("none", "basic", "extended", "all")
ACCURACY_LEVELS = (None, 0, 4)
CUDA_GRAPH, TF32 = "enable_cuda_graph", "use_tf32"
MOST_THREADS = 1024
ONNX_RUNTIME = "onnxruntime"  # the engine that has all of these options
DEVICE_ID = "device_id"
# Names that a provider reads, as its source lists them; a provider that is not here is left to ONNX Runtime, which
# ignores unknown ones of some, and of others leaves the provider out and runs on the CPU.
KNOWN: dict[str, tuple[str, ...]] = {
    "CPUExecutionProvider": (),
    "CUDAExecutionProvider": (
        *(DEVICE_ID, "arena_extend_strategy", "cudnn_conv1d_pad_to_nc1d", "cudnn_conv_algo_search"),
        *("cudnn_conv_use_max_workspace", "do_copy_in_default_stream", CUDA_GRAPH),
        *("enable_skip_layer_norm_strict_mode", "fuse_conv_bias", "gpu_external_alloc", "gpu_external_empty_cache"),
        *("gpu_external_free", "gpu_mem_limit", "has_user_compute_stream", "prefer_nhwc", "sdpa_kernel"),
        *("tunable_op_enable", "tunable_op_max_tuning_duration_ms", "tunable_op_tuning_enable"),
        *("use_ep_level_unified_stream", TF32, "user_compute_stream"),
    ),
}


def installed_providers() -> list[str]:
    """Execution providers of the installed ONNX Runtime."""
    return list(onnxruntime.get_available_providers())


def known_providers() -> list[str]:
    """Execution providers that ONNX Runtime knows, installed or not."""
    return list(onnxruntime.get_all_providers())


def _meant(provider: str, available: Sequence[str]) -> str:
    """End of a message with the provider nearest to a name; "gpu" means "cuda"."""
    spoken = provider.lower().partition(":")[0]
    short = "cuda" if spoken in ("gpu", "nvidia", "onnxruntime-gpu") else spoken
    if short in PROVIDERS and short != provider:
        number = provider.partition(":")[2]
        device = f', with provider_options={{"device_id": {number}}}' if number.isdigit() else ""
        return f"; did you mean {short!r}{device}?"
    return "" if provider in (*PROVIDERS, *PROVIDERS.values()) else nearest(provider, [*PROVIDERS, *available])


def check_provider_options(provider: str, options: Mapping[str, str | int]) -> None:
    """Refuse options that a provider does not have."""
    names = KNOWN.get(provider)
    for name in options:
        if names is not None and name not in names:
            there = f"it has {', '.join(names)}" if names else "it has none"
            raise InputError(f"provider_options: {provider} has no option {name!r}; {there}{nearest(name, names)}")
    number = str(options.get(DEVICE_ID, 0))
    if not number.isdigit():
        raise InputError(f"provider_options: {DEVICE_ID} is the number of a device, got {options[DEVICE_ID]!r}")


@typed(InputError)
@dataclass(frozen=True)
class Options:
    """Settings with which a model's graphs are opened.

    All but `threads`, `fast`, `max_graphs` and `max_bytes` are for the engine "onnxruntime".

    Attributes:
        provider: "cpu", "cuda", or the name of any execution provider of the installed ONNX Runtime.
        threads: threads inside one operator; 0 lets the engine choose.
        fast: allow fusions that change the last bits of the logits when something inside them is captured.
        max_graphs: number of rewritten graphs that stay open; beyond, the least recently used one is closed.
        max_bytes: memory that open graphs may take together, counted as the bytes of their weights; half of the
            machine's memory if it is 0.
        prepack: let sessions pack their weights. Without, a graph opens several times faster and runs slower on fewer
            than some 500 tokens: for structures that run once each, and for large batches. None lets the first call
            decide: packed, unless it has 512 tokens or more. The last bits differ between the two, so one model object
            uses one of them for all. Blocks are always packed; False is refused for them.
        base: open graphs from a prepared base (see `mionnx.run.prepacked`), which models with 64 MiB of weights or more
            have: one that is in the store, else one that is made when a second rewritten graph is opened, unless
            `prepack=False`. `MIModel.prepare` makes one at once, of any model.
        provider_options: of the provider, as ONNX Runtime names them: `{"device_id": 1, "gpu_mem_limit": 2**34}`.
        level: graph optimisation level: "none", "basic", "extended" or "all".
        cuda_graphs: let every shape of `forward`'s calls be one CUDA graph, launched as a whole: faster where a small
            structure runs many times on other values; and the steps of a generation, on keys and values padded to a
            multiple of 64 columns, unless something with an axis of keys (scores, patterns) is captured or changed. For
            the provider "cuda", and graphs without control flow. Results are copied to the CPU when they are read, or
            before the next call of their shape.
        engine: "onnxruntime", "openvino", "onnxruntime-web" or "reference"; see `mionnx.engine.engines`.
        fused: run an adopted file's own fused operators where a spec touches nothing inside them, and its own graph,
            bit by bit, where nothing is touched at all (with `fast`, of files without fused operators too). That graph
            is tried beside the hooked one at the first call of a kind, once for all processes. Without, all specs
            compute in the same standard nodes, and a capture changes no bit of the logits.
        accuracy_level: of products with weights in blocks: 0, in floats, or 4, what they read rounded to 8 bits, which
            is faster; rows of a padded batch then differ by as much as the rounding costs. None: as the file says.
    """

    provider: str = "cpu"
    threads: int = 0
    fast: bool = False
    max_graphs: int = 64
    max_bytes: int = 0
    prepack: bool | None = None
    base: bool = True
    provider_options: Mapping[str, str | int] = field(default_factory=dict)
    level: str = "all"
    cuda_graphs: bool = False
    engine: str = ONNX_RUNTIME
    fused: bool = True
    accuracy_level: int | None = None

    def __post_init__(self) -> None:
        if self.level not in OPTIMISATION_LEVELS:
            raise InputError(f"no optimisation level {self.level!r}; there are {', '.join(OPTIMISATION_LEVELS)}")
        at_least("max_graphs", self.max_graphs, 1)
        at_least("max_bytes", self.max_bytes, 0)
        if not 0 <= self.threads <= MOST_THREADS:
            raise InputError(f"threads must be 0 (the engine chooses) to {MOST_THREADS}, got {self.threads}")
        if self.accuracy_level not in ACCURACY_LEVELS:
            raise InputError(f"accuracy_level={self.accuracy_level}; 0 (floats), 4 (8 bits), or None, the file's own")
        if CUDA_GRAPH in self.provider_options:
            raise InputError(f"{CUDA_GRAPH} replays what was computed before unless inputs are fixed: cuda_graphs=True")
        if self.cuda_graphs and self.full_provider != PROVIDERS["cuda"]:
            raise InputError(f"cuda_graphs=True is for the provider 'cuda', not {self.provider!r}")
        if self.engine == ONNX_RUNTIME:
            check_provider_options(self.full_provider, self.provider_options)

    @property
    def full_provider(self) -> str:
        """The provider's full name, installed or not."""
        return PROVIDERS.get(self.provider, self.provider)

    @property
    def place(self) -> device.Device:
        """The device that computes the results."""
        kind = device.DEVICES.get(self.full_provider)
        return device.CPU if kind is None else (kind, self.device_id)

    @property
    def of_provider(self) -> dict[str, str]:
        """The provider's options, as ONNX Runtime takes them; without `fast`, no TF32."""
        settings = {key: str(value) for key, value in self.provider_options.items()}
        if self.full_provider == PROVIDERS["cuda"] and not self.fast:
            settings = {TF32: "0", **settings}
        return {**settings, CUDA_GRAPH: "1"} if self.cuda_graphs else settings

    @property
    def device_id(self) -> int:
        """Number of the device, where there are several."""
        return int(self.provider_options.get(DEVICE_ID, 0))

    def provider_name(self) -> str:
        """The provider's full name."""
        name, available = self.full_provider, installed_providers()
        if name not in available:
            raise RuntimeMissingError(
                f"no {name} in this ONNX Runtime, which has {', '.join(available)}{_meant(self.provider, available)}"
            )
        return name

    def for_many_graphs(self, max_graphs: int) -> "Options":
        """Options for many structures that run once each: nothing is packed, no base is made."""
        prepack = False if self.engine == ONNX_RUNTIME else self.prepack
        return replace(self, prepack=prepack, max_graphs=max_graphs)
