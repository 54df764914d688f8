"""The tensors of a checkpoint: where each lies in its file."""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mionnx.errors import ExportError, ModelError, nearest
from mionnx.graph.blocks import GivenBlocks
from mionnx.graph.folder_file import inside, read_json

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "BOOL": torch.bool,
}
BYTES = {"U8": torch.uint8}  # of packed numbers, which are no weights before they are unpacked
# What a model can be exported as.
EXPORTED = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_HEADER = 100_000_000


class Packed(Protocol):
    """A weight that a checkpoint holds as integers, or a stack of them, see `exporters.packed`."""

    def numbers(self) -> NDArray[np.float32]:
        """The numbers of the integers: [outputs, inputs], or a stack as its parameter is."""

    def named_blocks(self, weight: str) -> dict[str, GivenBlocks]:
        """The same as blocks, by the name of the weight, or by those of a stack's matrices."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: raw little-endian bytes at an offset of a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    length: int
    # The integers of which its numbers are made, which lie there instead; None for a tensor as it is.
    packed: Packed | None = None
    turned: bool = False  # whether the numbers are [inputs, outputs]

    def load(self) -> Tensor:
        """The tensor itself, read from the file."""
        if self.packed is not None:
            numbers = torch.from_numpy(self.packed.numbers())
            return numbers.T if self.turned else numbers
        data = np.fromfile(self.file, np.uint8, self.length, offset=self.offset)
        return torch.from_numpy(data).view(self.dtype).reshape(self.shape)

    def entry(self, index: int) -> "StoredTensor":
        """One entry along the first axis of a tensor as it is."""
        length = self.length // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * length, length=length)


def read_tensors(folder: Path, staging: Path, with_bytes: bool = False) -> list[StoredTensor]:
    """Read a checkpoint's tensors; a `pytorch_model.bin` is first rewritten as safetensors into `staging`."""
    for stem, convert in (("model.safetensors", None), ("pytorch_model.bin", to_safetensors)):
        files = _shards(folder, stem)
        if files:
            files = [convert(file, staging) for file in files] if convert else files
            return [tensor for file in files for tensor in _read_header(file, with_bytes)]
    raise ExportError(f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, single or sharded")


def _shards(folder: Path, stem: str) -> list[Path]:
    index = folder / f"{stem}.index.json"
    if (folder / stem).exists():  # before shards, as in transformers
        return _in_folder(folder, [stem])
    if not index.exists():
        return []
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (ModelError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{index} is damaged: {error}") from error
    missing = [name for name in names if _is_plain(name) and not (folder / name).exists()]
    if missing:
        raise ExportError(
            f"{folder} lacks {len(missing)} of the {len(names)} weight files of its index: {missing[0]} ..."
        )
    return _in_folder(folder, names)


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and len(name) < 256 and "\0" not in name and Path(name).name == name


def _in_folder(folder: Path, names: Iterable[str]) -> list[Path]:
    """Files of a checkpoint, none of them outside its folder or in a folder of its own."""
    try:
        for name in names:
            if not _is_plain(name):
                raise ModelError(f"{name!r} is no name of a weight file in {folder}: refused, shards lie in one folder")
            inside(folder, name)
    except ModelError as error:
        raise ExportError(str(error)) from error
    return [folder / name for name in names]


def to_safetensors(file: Path, staging: Path) -> Path:
    """Rewrite a `.bin` of tensors as safetensors; nothing else is unpickled, and nothing is executed."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, UnpicklingError, BadZipFile, EOFError, ValueError) as error:
        raise ExportError(f"{file} is no intact file of tensors, and nothing else in it is read: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ExportError(f"{file} holds something else than a table of tensors")
    target = staging / f"{file.stem}.safetensors"
    # Tied tensors share storage in a .bin; a safetensors file holds each name once, on its own.
    try:
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target)
    except SafetensorError as error:  # the disk is full
        raise ExportError(f"cannot write {target}: {error}") from error
    return target


def _read_header(file: Path, with_bytes: bool) -> list[StoredTensor]:
    size = file.stat().st_size
    try:
        with safe_open(file, framework="np"):  # its own checks: offsets in order, no holes, the right file size
            pass
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            # safe_open does not tell offsets in the file, so the header is read once more
            header = json.loads(stream.read(min(length, MAX_HEADER, size)))
    except (SafetensorError, ValueError, struct.error) as error:
        raise ExportError(f"{file} is no intact safetensors file: {error}") from error
    header.pop("__metadata__", None)
    dtypes = TORCH_DTYPES | BYTES if with_bytes else TORCH_DTYPES
    return [_stored(name, entry, file, 8 + length, dtypes) for name, entry in header.items()]


def _stored(name: str, entry: dict[str, Any], file: Path, base: int, dtypes: dict[str, torch.dtype]) -> StoredTensor:
    if entry["dtype"] not in dtypes:
        raise ExportError(
            f"{file.name}: tensor {name} is {entry['dtype']}; of quantised checkpoints those of GPTQ, AWQ, "
            "compressed-tensors and MXFP4 are read, and GGUF files"
        )
    start, end = entry["data_offsets"]
    return StoredTensor(name, file, dtypes[entry["dtype"]], tuple(entry["shape"]), base + start, end - start)


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors hold the same numbers."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (np.memmap(t.file, np.uint8, "r", t.offset, t.length) for t in (one, other))
    return bool(np.array_equal(first, second))


def export_dtype(name: str, tensors: list[StoredTensor]) -> torch.dtype:
    """Parse a dtype's name; "auto" is the dtype of most of the checkpoint's tensors."""
    if name == "auto":
        floating = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
        if not floating:
            raise ExportError("dtype 'auto': the checkpoint has no tensor of floating numbers")
        name = str(max(set(floating), key=floating.count)).removeprefix("torch.")
    if name not in EXPORTED:
        raise ExportError(f"dtype {name!r} is none of {', '.join(EXPORTED)}, auto" + nearest(name, [*EXPORTED, "auto"]))
    return EXPORTED[name]
