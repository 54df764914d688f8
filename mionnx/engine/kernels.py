"""The operators that an execution provider of the installed ONNX Runtime has kernels for."""

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

import onnxruntime

from mionnx.engine.engine import Operator

TENSORRT = "TensorrtExecutionProvider"


def without_kernel(operators: Iterable[Operator], provider: str, dtype: str) -> list[Operator]:
    """Those of some operators that a provider does not compute in a dtype."""
    kernels = _kernels(provider)
    kind = f"tensor({'float' if dtype == 'float32' else dtype})"
    return [one for one in operators if not any(kind in kinds or not kinds for kinds in kernels.get(one, ()))]


def has_kernel(operator: Operator, provider: str) -> bool:
    """Whether a provider computes an operator in some dtype; True if nobody knows."""
    kernels = _kernels(provider)
    return not kernels or operator in kernels


@cache
def _kernels(provider: str) -> dict[Operator, list[frozenset[str]]]:
    """Operator -> for each kernel of a provider, the types of its first parameter, if any."""
    kernels: dict[Operator, list[frozenset[str]]] = {}
    for one in _definitions():
        if one.provider == provider:
            kinds = one.type_constraints.get("T", ())
            kernels.setdefault((one.domain, one.op_name), []).append(frozenset(kinds))
    return kernels


def _definitions() -> list[Any]:
    """The kernels of all providers; empty where this build does not tell.

    The call ends the process in a build with TensorRT's provider on a machine without TensorRT: onnxruntime-gpu.
    """
    state = onnxruntime.capi.onnxruntime_pybind11_state
    if TENSORRT in onnxruntime.get_available_providers() and not _loads("libnvinfer.so.10"):
        return []
    return list(getattr(state, "get_all_opkernel_def", list)())


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
