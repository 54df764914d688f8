"""Weights of a hooked model, referenced in place in the checkpoint's safetensors wherever they can be.

1. A parameter whose stored bytes are what the graph reads points into the checkpoint's own file, which is hard-linked
   (or copied, across file systems) into the folder.
2. Every other parameter (another dtype, stacked experts, unaligned bytes) is written to `converted.safetensors`, one
   conversion in memory at a time.
"""

import json
import struct
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import onnx_ir as ir
import torch
from torch import Tensor

from exporters.checkpoint_tensors import TORCH_DTYPES, StoredTensor
from mionnx.errors import ExportError
from mionnx.graph.onnx_file import WEIGHTLESS
from mionnx.machine.files import link_or_copy
from mionnx.machine.progress import Progress

CONVERTED = "converted.safetensors"
_SAFETENSORS_NAME = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_IR_DTYPE = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.float64: ir.DataType.DOUBLE,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
    torch.bool: ir.DataType.BOOL,
}
_TORCH_DTYPE = {number: dtype for dtype, number in _IR_DTYPE.items()}


@dataclass(frozen=True)
class Placed:
    """File, offset and length of one parameter in the hooked model's folder."""

    location: str
    offset: int
    length: int


def place(
    parameters: list[ir.Value],  # values without data, of the names, shapes and dtypes that the graph reads
    stored: Mapping[str, StoredTensor],  # name -> the tensor that is the parameter, in its own dtype
    # (name, tensor) of the parameters that are in no file as they are, one in memory at a time
    converted: Iterator[tuple[str, Tensor]],
    folder: Path,
    progress: Progress,
    left: Container[str] = (),  # names of parameters that get a place in a file, and no data there
) -> None:
    """Give every parameter of a graph its data: files in `folder`, references in the values."""
    in_place = [value for value in parameters if value.name in stored and _fits(value, stored[value.name])]
    placed = _link({value.name: stored[value.name] for value in in_place}, folder, progress)
    others = [value for value in parameters if value.name not in placed]
    if others:
        read = (value.name for value in others if value.name in stored and value.name not in left)
        loaded = ((name, stored[name].load()) for name in read)
        placed |= _write_converted(others, chain(loaded, converted), folder / CONVERTED, progress, left)
    for value in parameters:
        at = placed[value.name]
        value.const_value = ir.ExternalTensor(
            at.location, at.offset, at.length, value.dtype, shape=value.shape, name=value.name, base_dir=folder
        )


def place_nowhere(parameters: Iterable[ir.Value], folder: Path) -> None:
    """Give every parameter of a graph without weights its place in a file that does not exist."""
    offset = 0
    for value in parameters:
        length = _TORCH_DTYPE[value.dtype].itemsize * prod(value.shape.numpy())
        value.const_value = ir.ExternalTensor(
            WEIGHTLESS, offset, length, value.dtype, shape=value.shape, name=value.name, base_dir=folder
        )
        offset += length


def _fits(value: ir.Value, source: StoredTensor) -> bool:
    shape = tuple(value.shape.numpy())
    if source.shape != shape:
        raise ExportError(f"checkpoint tensor {source.name} is {list(source.shape)}, the graph reads {list(shape)}")
    return (
        source.packed is None
        and _TORCH_DTYPE[value.dtype] == source.dtype
        # a runtime maps the bytes as numbers of the dtype: they have to lie at a multiple of its width
        and source.offset % source.dtype.itemsize == 0
    )


def _link(in_place: dict[str, StoredTensor], folder: Path, progress: Progress) -> dict[str, Placed]:
    for file in sorted({source.file for source in in_place.values()}):
        target = folder / file.name
        if not target.exists():  # there already: the checkpoint that a GGUF file was made into
            link_or_copy(file, target, progress)
    return {name: Placed(source.file.name, source.offset, source.length) for name, source in in_place.items()}


def _write_converted(
    values: list[ir.Value],
    converted: Iterator[tuple[str, Tensor]],
    path: Path,
    progress: Progress,
    left: Container[str],
) -> dict[str, Placed]:
    placed = _write_header(values, path)
    missing = {value.name: value for value in values if value.name not in left}
    total, done = sum(place.length for place in placed.values()), 0
    with path.open("r+b") as file:
        for name, tensor in converted:
            _write(file, missing.pop(name), tensor, placed[name])
            done += placed[name].length
            progress("converting weights", done, total)
    if missing:
        raise ExportError(f"the checkpoint's conversions do not make {len(missing)} weights: {some(missing)}")
    return placed


def _write_header(values: list[ir.Value], path: Path) -> dict[str, Placed]:
    tensors = {
        value.name: (
            _SAFETENSORS_NAME[_TORCH_DTYPE[value.dtype]],
            value.shape.numpy(),
            _TORCH_DTYPE[value.dtype].itemsize,
        )
        for value in sorted(values, key=lambda value: value.name)
    }
    with path.open("wb") as file:
        places = begin_safetensors(file, tensors)
    return {name: Placed(CONVERTED, offset, length) for name, (offset, length) in places.items()}


def begin_safetensors(
    file: BinaryIO, tensors: Mapping[str, tuple[str, Sequence[int], int]]
) -> dict[str, tuple[int, int]]:
    """Write the header of a safetensors file, and leave room for its tensors (dtype, shape, bytes of a number)."""
    # Returns name -> offset in the file, and length, in bytes.
    entries, places, total = dict[str, Any](), dict[str, tuple[int, int]](), 0
    for name, (dtype, shape, width) in tensors.items():
        places[name] = total, prod(shape) * width
        entries[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [total, total := total + places[name][1]]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the values begin aligned
    start = file.write(struct.pack("<Q", len(text)) + text)
    file.truncate(start + total)  # its whole length at once: tensors are put at their places
    return {name: (start + offset, length) for name, (offset, length) in places.items()}


def _write(file: BinaryIO, value: ir.Value, tensor: Tensor, place: Placed) -> None:
    dtype, shape = _TORCH_DTYPE[value.dtype], tuple(value.shape.numpy())
    if tuple(tensor.shape) != shape:
        raise ExportError(f"{value.name} is {list(tensor.shape)} after conversion, the graph reads {list(shape)}")
    if dtype.is_floating_point and not tensor.is_floating_point():
        raise ExportError(f"{value.name} is {tensor.dtype} in the checkpoint, where the model has fractions")
    converted = tensor.to(dtype)
    # what was infinite in the checkpoint itself may stay so
    if dtype == torch.float16 and (torch.isinf(converted) & ~torch.isinf(tensor)).any():
        raise ExportError(f"{value.name} has values beyond float16's range; use bfloat16 or float32")
    file.seek(place.offset)
    file.write(converted.contiguous().view(torch.uint8).numpy().data.cast("B"))  # bfloat16 has no numpy dtype: as bytes


def locations(parameters: Iterable[ir.Value]) -> set[str]:
    """The weight files of parameters that `place` has given their data."""
    return {str(getattr(value.const_value, "location", None)) for value in parameters}


def some(names: Iterable[str]) -> str:
    """The first few of many names."""
    names = list(names)
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
