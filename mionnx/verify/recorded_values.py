"""Values recorded on disk: written one after the other, read one at a time, saved as one safetensors file.

The format of a saved file:

1. An ordinary safetensors file. The tensor `{prompt}.{hook point}` is that value, bfloat16 as float32.
2. Its `__metadata__` has `mionnx_run` = "1", `facts`, a JSON text: the prompts' ids (of pairs, token types), the
   hook points, the positions kept, the dtype, hashes of graph, weights and spec, the greedy continuations, and the
   environment; and the checksum of `mionnx.machine.tensor_file`.
3. Refused: another version, a damaged file.
"""

import json
import shutil
from collections.abc import Mapping
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import SpecFileError
from mionnx.machine.files import atomic_path
from mionnx.machine.tensor_file import open_tensors, read_header, sealed, told_of, whose

RUN_KEY, RUN_VERSION = "mionnx_run", "1"
CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "bool": "BOOL"}
CODE_DTYPES = {code: name for name, code in CODES.items()}
FACTS = ("title", "texts", "prompts", "names", "positions", "count", "greedy", "dtype", "hashes", "environment")


class RecordedValues:
    """Values by prompt and hook point, in one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: dict[str, Any] = {}  # those of the run, `FACTS`; empty until it is kept
        self._places: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self._end = 0
        self._hash = sha256()

    def add(self, prompt: int, name: str, value: NDArray[Any]) -> None:
        """Write a value at the end."""
        data = np.ascontiguousarray(value)
        self._places[f"{prompt}.{name}"] = (str(data.dtype), value.shape, self._end)
        if data.size:  # a file cannot be mapped from nothing
            try:
                with self.path.open("ab") as file:
                    file.write(data.data)
            except OSError as error:
                raise SpecFileError(
                    f"cannot keep {name} in {self.path.parent}: {error}; TMPDIR names a folder with more room"
                ) from error
            # Hashed as it is written: `keep` reads the file once, to copy it.
            self._hash.update(data.data)
        self._end += data.nbytes

    def get(self, prompt: int, name: str) -> NDArray[Any]:
        """A value, mapped from the file."""
        dtype, shape, start = self._places[f"{prompt}.{name}"]
        if prod(shape) == 0:
            return np.empty(shape, dtype)
        return np.memmap(self.path, dtype, "r", start, shape)

    def keep(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write everything as one safetensors file."""
        header: dict[str, Any] = {"__metadata__": {RUN_KEY: RUN_VERSION, "facts": json.dumps(facts)}}
        for key, (dtype, shape, start) in self._places.items():
            end = start + prod(shape) * np.dtype(dtype).itemsize
            header[key] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        with atomic_path(path) as partial, partial.open("wb") as file, self.path.open("rb") as values:
            # The header has the checksum, of itself and the values.
            file.write(sealed(header, self._hash.copy()))
            shutil.copyfileobj(values, file)

    @classmethod
    def open(cls, path: Path) -> "RecordedValues":
        """Open what `keep` wrote, every byte of it checked."""
        with open_tensors(path, f"{path} is no recorded run") as file:
            metadata = file.metadata() or {}
        if metadata.get(RUN_KEY) != RUN_VERSION:
            raise SpecFileError(f"{path} is no recorded run of version {RUN_VERSION}: {whose(metadata)}")
        recording = cls(path)
        header, first = read_header(path)
        del header["__metadata__"]
        with told_of(path):
            recording.facts = json.loads(metadata["facts"])
            recording._places = {
                key: (CODE_DTYPES[entry["dtype"]], tuple(entry["shape"]), first + entry["data_offsets"][0])
                for key, entry in header.items()
            }
            missing = [key for key in FACTS if key not in recording.facts]
        if missing:
            raise SpecFileError(f"{path} is damaged: it does not say its {missing[0]}")
        return recording
