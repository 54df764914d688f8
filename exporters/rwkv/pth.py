"""BlinkDL's `.pth` files: a zip with one pickle of names and shapes, and each tensor's bytes as they are.

The bytes are stored, not compressed, so ONNX external data can point into the file like into a safetensors file.
"""

import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from exporters.checkpoint_tensors import DTYPES, Stored
from mionnx.errors import ExportError

_LOCAL_HEADER = 30


def read_pth(file: Path) -> list[Stored]:
    """Offset of each tensor in a `.pth`. Only plain tensors are unpickled, nothing is executed.

    Raises:
        ExportError: a damaged file, something else than tensors in it, or tensors that are not stored in one piece.
    """
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        starts = _starts(file)
    except (OSError, RuntimeError, UnpicklingError, zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ExportError(f"{file} is no intact .pth of tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ExportError(f"{file} holds something else than a table of tensors")
    # Each storage is mapped where it lies in the file, so addresses and offsets differ by one constant.
    base = min(tensor.untyped_storage().data_ptr() for tensor in tensors.values()) - min(starts)
    return [_stored(name, tensor, file, base, starts) for name, tensor in tensors.items()]


def _starts(file: Path) -> set[int]:
    """The offsets at which the storages begin."""
    starts = set()
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        for info in archive.infolist():
            if "/data/" not in info.filename or info.file_size == 0:
                continue
            if info.compress_type != zipfile.ZIP_STORED:
                raise ExportError(f"{file} is a compressed archive; save the checkpoint with torch.save as it is")
            stream.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(stream.read(2), "little") for _ in range(2))
            starts.add(info.header_offset + _LOCAL_HEADER + name + extra)
    return starts


def _stored(name: str, tensor: Tensor, file: Path, base: int, starts: set[int]) -> Stored:
    if tensor.dtype not in DTYPES.values():
        raise ExportError(f"{file.name}: tensor {name} is {tensor.dtype}; quantised checkpoints are not supported")
    start = tensor.untyped_storage().data_ptr() - base
    if start not in starts or not tensor.is_contiguous():
        raise ExportError(f"{file.name}: tensor {name} is not stored in one piece; save it again as contiguous")
    return Stored(name, file, tensor.dtype, tuple(tensor.shape), tensor.data_ptr() - base, tensor.nbytes)
