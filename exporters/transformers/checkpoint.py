"""The tensors of a checkpoint: where each lies in its safetensors file, and which parameter it becomes."""

import json
import re
import struct
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mionnx.errors import ExportError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint: raw little-endian bytes at an offset of a safetensors file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    length: int

    def load(self) -> Tensor:
        """The tensor itself, read from the file."""
        with safe_open(self.file, framework="pt") as file:
            return file.get_tensor(self.name)


@dataclass
class Mapped:
    """Which checkpoint tensors become which parameters.

    Attributes:
        direct: parameter name -> the tensor that is the parameter as it is.
        converted: conversions, each with the checkpoint tensors it reads.
        unknown: checkpoint tensors that belong to no parameter of the model.
    """

    direct: dict[str, Stored] = field(default_factory=dict)
    converted: dict[str, "Conversion"] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


@dataclass
class Conversion:
    """Checkpoint tensors that transformers turns into parameters of another shape (experts stacked, say)."""

    target: str
    converter: WeightConverter
    sources: list[Stored] = field(default_factory=list)

    def run(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """The parameters, by name."""
        found = self.converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def read_tensors(folder: Path, staging: Path) -> list[Stored]:
    """All tensors of a checkpoint folder; a `pytorch_model.bin` is first rewritten as safetensors into `staging`.

    Raises:
        ExportError: no weights, a missing shard, or a damaged file.
    """
    for stem, convert in (("model.safetensors", None), ("pytorch_model.bin", _to_safetensors)):
        files = _shards(folder, stem)
        if files:
            files = [convert(file, staging) for file in files] if convert else files
            return [tensor for file in files for tensor in _read_header(file)]
    raise ExportError(f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, single or sharded")


def _shards(folder: Path, stem: str) -> list[Path]:
    index = folder / f"{stem}.index.json"
    if not index.is_file():
        return [folder / stem] if (folder / stem).is_file() else []
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError) as error:
        raise ExportError(f"{index} is damaged: {error}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ExportError(
            f"{folder} lacks {len(missing)} of the {len(names)} weight files of its index: {missing[0]} ..."
        )
    return [folder / name for name in names]


def _to_safetensors(file: Path, staging: Path) -> Path:
    tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    target = staging / f"{file.stem}.safetensors"
    # Tied tensors share storage in a .bin; a safetensors file holds each name once, on its own.
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target)
    return target


def _read_header(file: Path) -> list[Stored]:
    size = file.stat().st_size
    try:
        with safe_open(file, framework="np"):  # its own checks: offsets in order, no holes, the right file size
            pass
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(length, MAX_HEADER, size)))
    except (SafetensorError, ValueError, struct.error) as error:
        raise ExportError(f"{file} is no intact safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return [_stored(name, entry, file, 8 + length) for name, entry in header.items()]


def _stored(name: str, entry: dict[str, Any], file: Path, base: int) -> Stored:
    if entry["dtype"] not in DTYPES:
        raise ExportError(f"{file.name}: tensor {name} is {entry['dtype']}; quantised checkpoints are not supported")
    start, end = entry["data_offsets"]
    return Stored(name, file, DTYPES[entry["dtype"]], tuple(entry["shape"]), base + start, end - start)


def map_tensors(tensors: list[Stored], model: PreTrainedModel) -> Mapped:
    """Find each checkpoint tensor's parameter by the rules with which transformers itself loads the family."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    names = model.state_dict()
    mapped = Mapped()
    for tensor in sorted(tensors, key=lambda tensor: _natural(tensor.name)):
        target, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, names)
        if target not in names and tensor.name in names:
            target, pattern = tensor.name, None
        if target not in names:
            mapped.unknown.append(tensor.name)
        elif pattern is None:
            mapped.direct[target] = tensor
        else:
            conversion = mapped.converted.setdefault(target, Conversion(target, deepcopy(by_pattern[pattern])))
            conversion.sources.append(tensor)
            conversion.converter.add_tensor(target, tensor.name, pattern, tensor.load)
    ignored = [re.compile(pattern) for pattern in _ignored(model)]
    mapped.unknown = [name for name in mapped.unknown if not any(pattern.search(name) for pattern in ignored)]
    return mapped


def _natural(name: str) -> list[int | str]:
    """Sort key that puts expert 10 after expert 9: conversions stack tensors in this order."""
    return [f"{int(part):09d}" if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _ignored(model: PreTrainedModel) -> set[str]:
    """Leftovers of older checkpoints: buffers that were once saved and are now computed."""
    return {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"}


def aliases(model: PreTrainedModel) -> dict[str, set[str]]:
    """Parameter name -> all names of the same (tied) parameter, its own included."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return {name: group for group in groups.values() for name in group}


def same_bytes(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors hold the same numbers."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (np.memmap(t.file, np.uint8, "r", t.offset, t.length) for t in (one, other))
    return bool(np.array_equal(first, second))
