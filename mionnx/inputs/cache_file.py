"""Caches and states as `.safetensors` files: `{layer}.{part}` each, `attention_mask`, the kind in the metadata."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, SpecFileError
from mionnx.machine.tensor_file import read_tensors, whose, write_tensors

CACHE_KEY = "mionnx_cache"


def write_cache(path: str | Path, kind: str, tensors: Mapping[str, NDArray[Any]]) -> None:
    """Write a cache; the file appears when it is whole.

    Raises:
        InputError: it cannot be written, or in a dtype that safetensors does not have.
    """
    try:
        write_tensors(path, tensors, {CACHE_KEY: kind})
    except SpecFileError as error:
        raise InputError(f"the cache cannot be saved: {error}") from error


def read_cache(path: str | Path, kind: str, parts: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read a cache: every part of layers 0 to n, and the mask.

    Raises:
        InputError: the file is missing, damaged, of another kind, lacks a part, or holds NaN.
    """
    metadata, tensors = read_tensors(path, f"{path} is no saved cache", InputError)
    kind_of_file = metadata.get(CACHE_KEY)
    if kind_of_file != kind:
        raise InputError(f"{path} is no saved cache of kind {kind!r}: {whose(metadata)}")
    layers = {int(match[1]) for name in tensors if (match := re.fullmatch(r"(\d+)\.\w+", name))}
    names = {"attention_mask", *(f"{i}.{part}" for i in range(len(layers)) for part in parts)}
    if tensors.keys() != names or not layers:
        raise InputError(f"{path} is damaged: it lacks or has too many of its parts ({len(tensors)} tensors)")
    bad = [name for name, value in tensors.items() if np.isnan(value.astype(np.float32)).any()]
    if bad:
        raise InputError(f"{path}: {bad[0]} has NaN")
    mask = tensors["attention_mask"]
    if mask.ndim != 2 or mask.dtype != np.int64 or not np.isin(mask, (0, 1)).all():
        raise InputError(f"{path}: the attention_mask must be int64 [batch, seq] of 0 and 1")
    return tensors
