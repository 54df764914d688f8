"""Progress of a sweep in a file, from which an interrupted sweep continues.

It is a safetensors file: `values` [pairs, cells] float64 with NaN for cells that are not computed yet, and in its
metadata `mionnx_sweep`, the hash of everything that the values depend on. It has a checksum
(`mionnx.machine.tensor_file`): a damaged file is refused, and never changes a result.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.cache_entry import SWEEP_MARK as MARK
from mionnx.machine.tensor_file import read_tensors, write_tensors

EVERY = 5.0  # seconds between two writes


def key_of(facts: Mapping[str, Any]) -> str:
    """Hash the facts that the values of a sweep depend on, SHA-256."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class ProgressFile:
    """Computed cells in memory, and in a file if a path is given.

    Attributes:
        values: [pairs, cells], NaN for cells that are not computed yet.

    Raises:
        InputError: the file exists and is damaged, or belongs to another sweep.
    """

    def __init__(self, shape: tuple[int, int], key: str = "", path: Path | None = None) -> None:
        self.values = np.full(shape, np.nan)
        self.key, self.path, self._written = key, path, time.monotonic()
        if path is not None and path.exists():
            self.values = self._read(path)

    def _read(self, path: Path) -> NDArray[np.float64]:
        why = f"cannot resume from {path}: it is no file of a sweep"
        try:
            metadata, tensors = read_tensors(path, why, InputError)
        except InputError as error:
            raise InputError(f"{error}; delete it, and the sweep begins anew") from error
        values = tensors.get("values")
        if metadata.get(MARK) != self.key or values is None or values.shape != self.values.shape:
            raise InputError(
                f"cannot resume from {path}: it belongs to another sweep (other prompts, model, hook, metric or cells)"
            )
        return values

    def store(self, pair: int, cells: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Store computed cells; write the file at most every 5 s."""
        self.values[pair, cells] = values
        if time.monotonic() - self._written > EVERY:
            self.write()

    def write(self) -> None:
        """Write the file, if a path was given."""
        if self.path is not None:
            write_tensors(self.path, {"values": self.values}, {MARK: self.key})
            self._written = time.monotonic()

    def missing(self, pair: int) -> NDArray[np.int64]:
        """The cells of a pair that are not computed yet."""
        return np.flatnonzero(np.isnan(self.values[pair]))
