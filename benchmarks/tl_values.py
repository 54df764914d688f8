"""The numbers and texts that a namespace holds, and how far two such are apart."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformer_lens import ActivationCache, FactoredMatrix

Array = NDArray[Any]
SAMPLE = 100_000  # of a longer array, this many values are compared, evenly spaced
DEEPEST = 4
ENTRIES = 3000  # of a list
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
# What differs from run to run: addresses, elements of pages, folders, what took how long; and torch's way back.
OF_A_RUN = re.compile(
    r"0x[0-9a-f]+|circuits-vis-[0-9a-f-]+|/tmp/[^\s'\"]+|'runtime_ms': [\d.]+|\d+(?:\.\d+)? ms\b|, grad_fn=<\w+>"
)
TIMES = re.compile(r"runtime_ms|^(timings|started)\b| ms\b")
# Values of heads whose circuits are refactored have the signs of singular vectors, which are nobody's.
SIGNED = re.compile(r"attn\.(hook_[qkvz]|[qkv]\.hook_out|o\.hook_in)\]?$")
MASKED = 1e37  # scores of masked keys are the lowest number, or -inf
SMALLEST = 1e-3  # differences are relative to the largest number of a value, or to this


def leaves(value: Any, path: str, deep: int = 0) -> Iterator[tuple[str, Array]]:
    """Arrays of numbers or of text inside a value, with where they lie."""
    if isinstance(value, torch.nn.Module | type | ModuleType) or deep > DEEPEST:
        return
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and not value.is_sparse:
            value = value.detach()
            yield path, (value.float() if value.dtype == torch.bfloat16 else value).resolve_conj().numpy()
    elif isinstance(value, np.ndarray | bool | int | float | complex | np.generic | str):
        array = np.asarray(value)
        if array.dtype.kind in "biufcU":
            yield path, array
    else:
        for key, inner in _inside(value):
            yield from leaves(inner, f"{path}[{key}]", deep + 1)


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, ActivationCache):
        yield from value.cache_dict.items()
    elif isinstance(value, FactoredMatrix):
        yield from (("A", value.A), ("B", value.B))
    elif isinstance(value, pd.DataFrame):
        yield from ((name, value[name].tolist()) for name in value.columns)
    elif isinstance(value, pd.Series):
        yield "values", value.tolist()
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, list | tuple) and len(value) <= ENTRIES:
        if value and all(type(one) in (int, float, bool, str) for one in value):
            yield "all", np.asarray(value)
        else:
            yield from enumerate(value)
    elif dataclasses.is_dataclass(value) or type(value).__module__ in ("__main__", "transformer_lens.patching"):
        yield from getattr(value, "__dict__", {}).items()


def sampled(array: Array) -> Array:
    """An array, or values of it that are evenly spaced."""
    return array if array.size <= SAMPLE else array.reshape(-1)[:: -(-array.size // SAMPLE)]


class Apart(NamedTuple):
    """What a comparison found: numbers compared, the largest difference, and what is too far apart, by name."""

    compared: int
    largest: float
    names: list[tuple[str, float]]


def compare(theirs: Path, ours: Path, tolerance: float, signs: bool = True) -> Apart:
    """Compare two files of arrays by name; one that is missing in ours is apart.

    Args:
        signs: whether values of heads have signs that mean something.
    """
    compared, largest, names = 0, 0.0, []
    with np.load(theirs) as expected, np.load(ours) as found:
        labels = [dict(zip(file["names"].tolist(), file.files[1:], strict=True)) for file in (expected, found)]
        for name, key in labels[0].items():
            want = expected[key]
            got = found[labels[1][name]] if name in labels[1] else None
            if TIMES.search(name):
                continue
            if not signs and got is not None and SIGNED.search(name):
                want, got = np.abs(want), np.abs(got)
            apart = difference(want, got)
            compared += want.size
            if apart > tolerance:
                names.append((name, apart))
            elif apart > largest:
                largest = apart
    return Apart(compared, largest, names)


def difference(want: Array, got: Array | None) -> float:
    """The largest difference, relative to the largest number; infinite where shapes, kinds or texts differ."""
    if got is None or want.shape != got.shape or (want.dtype.kind == "U") != (got.dtype.kind == "U"):
        return np.inf
    if want.size == 0 or want.dtype.kind in "Ub" or got.dtype.kind in "Ub":
        return 0.0 if np.array_equal(want, got) else np.inf
    wide = np.complex128 if "c" in (want.dtype.kind, got.dtype.kind) else np.float64
    a, b = (_ordered(array.astype(wide)) for array in (want, got))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    if not np.isfinite(a[~same]).all() or not np.isfinite(b[~same]).all():
        return np.inf
    scale = np.abs(a[np.isfinite(a)]).max(initial=0)
    return float(np.abs(a[~same] - b[~same]).max() / max(scale, SMALLEST))


def _ordered(array: Array) -> Array:
    """Masked scores as one number; eigenvalues, of which none is first, by size: real parts, then imaginary ones."""
    if array.dtype.kind == "c":
        return np.concatenate([np.sort(array.real, axis=-1), np.sort(array.imag, axis=-1)], axis=-1)
    return np.where(np.abs(array) > MASKED, np.copysign(np.inf, array), array)


def texts_apart(want: str, got: str, tolerance: float) -> str:
    """The first line of a text that says something else; numbers may differ as far as their last digit tells."""
    lines = [OF_A_RUN.sub("", text).splitlines() for text in (want, got)]
    for number in range(max(map(len, lines))):
        one, other = (text[number] if number < len(text) else "" for text in lines)
        if one != other and not _alike(one, other, tolerance):
            return f"{one[:60]!r} is {other[:60]!r}"
    return ""


def _alike(want: str, got: str, tolerance: float) -> bool:
    if NUMBER.sub("#", want) != NUMBER.sub("#", got):
        return False
    for one, other in zip(NUMBER.findall(want), NUMBER.findall(got), strict=True):
        digits = len(one.split("e")[0].partition(".")[2])
        exponent = int(one.lower().partition("e")[2] or 0)
        apart = abs(float(one) - float(other))
        if apart > 1.01 * 10.0 ** (exponent - digits) * ("." in one) + tolerance * max(abs(float(one)), SMALLEST):
            return False
    return True
