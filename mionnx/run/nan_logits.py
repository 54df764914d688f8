"""Refusal of NaN logits, with the name of the first hook point that is NaN.

The logits that `forward` returns are looked at once, under 1 % of the forward pass; captures are not:
`forward(..., logits=False)` gives them whatever they hold. Analyses that reduce captures to fewer numbers look at them
first (`numbers`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mionnx.errors import InputError, InterventionError, ModelError
from mionnx.inputs.layer_cache import Value
from mionnx.run.hook_cache import HookCache
from mionnx.spec.hook_spec import HookSpec

# The bits of infinity of dtypes that numpy compares slowly; all larger ones, the sign left out, are NaN.
INFINITY = {np.dtype(np.float16): 0x7C00, np.dtype(ml_dtypes.bfloat16): 0x7F80}
ON_NAN = "the weights are damaged (`mionnx check`), or values are too large for the dtype (`mionnx doctor` cures that)"
Again = Callable[[HookSpec], HookCache]


def has_nan(array: NDArray[Any]) -> bool:
    """Whether any element is NaN; without arrays of the same size where it can be."""
    if not array.size:
        return False
    if array.dtype in INFINITY:
        return bool((array.view(np.uint16) & 0x7FFF).max() > INFINITY[array.dtype])
    return bool(np.isnan(array.min()))


def checked(logits: Value | None, refuse: Callable[[NDArray[Any]], None]) -> Value | None:
    """The logits, once they are known to be numbers; on another device, when they are read."""
    if isinstance(logits, np.ndarray):
        refuse(logits)
        return logits
    return None if logits is None else CheckedOnDevice(logits, refuse)


@dataclass(frozen=True)
class CheckedOnDevice:
    """Logits on another device, looked at when they are copied to the CPU."""

    value: Value
    refuse: Callable[[NDArray[Any]], None]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.value.dtype

    @property
    def nbytes(self) -> int:
        return self.value.nbytes

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self.value)
        self.refuse(array)
        return array if dtype is None else array.astype(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (np.asarray(self),)


def refuse_nan(logits: NDArray[Any], spec: HookSpec, again: Again) -> None:
    """Refuse logits with NaN; whether the model or the spec makes it is found by running the tokens `again`."""
    if not has_nan(logits):
        return
    plain = _first(again, HookSpec())  # one more pass, which captures every hook point
    edits = [f"{edit.kind} at {hook}" for hook, edit in spec.interventions]
    edits += [state.title for state in (*spec.state_steerings, *spec.state_knockouts)]
    if plain is None and edits:
        where = _first(again, spec) or "the logits"
        raise InterventionError(f"logits are NaN with {', '.join(edits)}; first at {where}: use smaller values")
    where = plain or "the logits"
    raise ModelError(f"logits are NaN; first at {where}: {ON_NAN}; forward(..., logits=False) with captures shows them")


def numbers(cache: HookCache) -> HookCache:
    """The captures of a pass, once they are known to be numbers."""
    where = _first_of(cache)
    if where is not None:
        raise ModelError(f"{where} is NaN: {ON_NAN}; forward(..., logits=False) with captures shows it")
    return cache


def _first(again: Again, spec: HookSpec) -> str | None:
    """The first hook point with NaN, and where; None if no hook point has any."""
    try:
        cache = again(HookSpec().extend(spec).capture("*"))
    except InputError:  # they do not fit into memory together
        return "a hook point that cannot be named, as the captures of all do not fit into memory"
    return _first_of(cache)


def _first_of(cache: HookCache) -> str | None:
    for name, value in cache.items():
        if value.dtype.kind not in "iub" and has_nan(value):
            return f"{name} {np.argwhere(np.isnan(value))[0].tolist()}"
    return None
