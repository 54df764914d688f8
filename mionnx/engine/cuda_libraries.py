"""The libraries of CUDA and cuDNN that pip installs, torch's included, loaded before ONNX Runtime needs them.

`onnxruntime.preload_dlls` looks for them beside onnxruntime itself and where the system does; here all folders of
Python's path are looked through, so that torch's serve an onnxruntime-gpu that lies elsewhere.
"""

import ctypes
import io
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import onnxruntime

PROVIDER = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
NEEDED = 'an NVIDIA driver, CUDA 13 and cuDNN 9: pip install "onnxruntime-gpu[cuda,cudnn]" nvidia-cublas'


def folders() -> list[Path]:
    """Folders of the packages `nvidia-*` that hold libraries."""
    found = find_spec("nvidia")
    roots = [Path(root) for root in found.submodule_search_locations or ()] if found else []
    return sorted({path.parent for root in roots for path in root.glob("*/lib/lib*.so*")})


@cache
def load() -> None:
    """Load the libraries of all folders, and let weights take no more memory than they need."""
    with redirect_stdout(io.StringIO()):  # it prints what is not in a folder
        for folder in folders():
            onnxruntime.preload_dlls(directory=str(folder))
    state = onnxruntime.capi.onnxruntime_pybind11_state
    if hasattr(state, "set_arena_extend_strategy"):  # by default an arena takes up to twice as much
        state.set_arena_extend_strategy(state.ArenaExtendStrategy.kSameAsRequested)


def trouble() -> str | None:
    """Why the provider's library cannot be loaded; None if it can, or is not there."""
    try:
        ctypes.CDLL(str(PROVIDER.with_name("libonnxruntime_providers_shared.so")), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(PROVIDER))
    except OSError as error:
        return str(error)
    return None
