"""An `onnxruntime.InferenceSession` on the requested provider, or an error.

ONNX Runtime goes on with the CPU where a provider does not start, and leaves it the nodes that a provider has no kernel
for. The first is an error here, the second a `FallbackWarning`.
"""

import ctypes
import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import onnx
import onnxruntime

from mionnx.engine.device_graph import keep_transposed, move_positions
from mionnx.engine.device_weights import weights_of
from mionnx.engine.engine import graph_of
from mionnx.engine.halved_products import HALVES_PREFIX
from mionnx.engine.merged_products import with_merged
from mionnx.engine.options import CUDA_GRAPH, PROVIDERS, Options
from mionnx.engine.placement import warn_of_fallback, why_no_cuda_graph
from mionnx.errors import ModelError, RuntimeMissingError

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
        if isinstance(merged, bytes) and HALVES_PREFIX.encode() in merged:  # which folding computes once
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
        state.set_arena_extend_strategy(state.ArenaExtendStrategy.kSameAsRequested)


def cuda_trouble() -> str | None:
    """Why the provider's library cannot be loaded; None if it can, or is not there."""
    try:
        ctypes.CDLL(str(CUDA_PROVIDER.with_name("libonnxruntime_providers_shared.so")), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(CUDA_PROVIDER))
    except OSError as error:
        return str(error)
    return None
