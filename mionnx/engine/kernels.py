"""The operators that an execution provider of the installed ONNX Runtime has kernels for."""

from collections.abc import Iterable
from functools import cache

import onnxruntime

Operator = tuple[str, str]  # domain, name


def without_kernel(operators: Iterable[Operator], provider: str, dtype: str) -> list[Operator]:
    """Those of some operators that a provider does not compute in a dtype.

    Args:
        operators: domain and name of each.
        provider: its full name.
        dtype: numpy's name of one.
    """
    known = _kernels(provider)
    wanted = f"tensor({'float' if dtype == 'float32' else dtype})"
    return [one for one in operators if not any(wanted in kinds or not kinds for kinds in known.get(one, ()))]


@cache
def _kernels(provider: str) -> dict[Operator, list[frozenset[str]]]:
    """Operator -> for each kernel of a provider, the types of its first parameter, if any."""
    state = onnxruntime.capi.onnxruntime_pybind11_state
    found: dict[Operator, list[frozenset[str]]] = {}
    for one in getattr(state, "get_all_opkernel_def", list)():  # not in every build: nothing is known then
        if one.provider == provider:
            kinds = one.type_constraints.get("T", ())
            found.setdefault((one.domain, one.op_name), []).append(frozenset(kinds))
    return found
