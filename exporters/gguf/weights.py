"""A GGUF file's tensors as one `model.safetensors` by transformers' names, written a piece of a tensor at a time.

What llama.cpp's converter changed is undone: rows of queries and keys in the order of its rotation, and what it adds
to the weights of norms. A tensor that no name is known for is refused.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from exporters.gguf.architectures import MODULES_OUTSIDE, Architecture, Config
from exporters.gguf.dequantise import read_pieces, read_tensor
from exporters.gguf.header import Header, TensorInfo
from exporters.gguf.rope import FACTORS
from exporters.weight_files import begin_safetensors, some
from mionnx.errors import ExportError, nearest
from mionnx.machine.progress import Progress

DTYPES: dict[str, tuple[str, Any]] = {  # name -> safetensors' name and numpy's
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
}
OWN = {"F16": "float16", "BF16": "bfloat16"}  # types of matrices that a model can be exported in as they are


@dataclass(frozen=True)
class Renamed:
    """A tensor of the file, with what it is in transformers.

    Attributes:
        heads: rows are those of so many heads in the order of neighbouring values; 0 where they are in order.
        offset: what has been added to it.
    """

    name: str
    info: TensorInfo
    heads: int = 0
    offset: float = 0.0


def rename(header: Header, architecture: Architecture, config: Config) -> list[Renamed]:
    """Find transformers' name for every tensor, and what to undo.

    Raises:
        ExportError: tensors that the architecture has no name for.
    """
    renamed, unknown = [], []
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for gguf_name, info in header.tensors.items():
        path, _, leaf = gguf_name.rpartition(".")
        module, module_name = _module(path, architecture)
        if gguf_name in FACTORS:
            continue
        if module_name is None or leaf not in ("weight", "bias"):
            unknown.append(gguf_name)
            continue
        offset = architecture.norm_offset if module.endswith("_norm") and leaf == "weight" else 0.0
        turned = heads.get(module, 0) if architecture.interleaved else 0
        renamed.append(Renamed(f"{module_name}.{leaf}", info, turned, offset))
    if unknown:
        raise ExportError(
            f"{header.file}: {len(unknown)} tensors have no place in {config['model_type']}: {some(unknown)}"
        )
    return renamed


def _module(path: str, architecture: Architecture) -> tuple[str, str | None]:
    """llama.cpp's name of a module, and transformers' with its layer."""
    block, _, rest = path.partition(".")
    number, _, module = rest.partition(".")
    if block != "blk":
        return path, MODULES_OUTSIDE.get(path)
    name = architecture.layer.get(module)
    return module, f"model.layers.{number}.{name}" if name and number.isdigit() else None


def own_dtype(header: Header, dtype: str) -> str:
    """The dtype to write; "auto" is that of the matrices, float32 if they are quantised.

    Raises:
        ExportError: no such dtype.
    """
    if dtype == "auto":
        kinds = {info.kind.name for info in header.tensors.values() if len(info.shape) > 1}
        return OWN.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
    if dtype not in DTYPES:
        raise ExportError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}, auto" + nearest(dtype, [*DTYPES, "auto"]))
    return dtype


def write_weights(
    header: Header, tensors: list[Renamed], path: Path, dtype: str, progress: Progress, left: Container[str] = ()
) -> None:
    """Write tensors in a dtype, a piece of one in memory at a time.

    Args:
        left: names of tensors that get a place in the file, and no numbers there.

    Raises:
        ExportError: a type that is not dequantised, or values beyond float16's range.
    """
    code, numpy_dtype = DTYPES[dtype]
    shapes = {tensor.name: (code, tensor.info.shape, np.dtype(numpy_dtype).itemsize) for tensor in tensors}
    with path.open("wb") as file:
        places = begin_safetensors(file, shapes)
        total, done = sum(length for _, length in places.values()), 0
        for tensor in tensors:
            offset, length = places[tensor.name]
            done += length
            if tensor.name not in left:
                file.seek(offset)
                for piece in _pieces(header, tensor):
                    file.write(_converted(piece, numpy_dtype, tensor).tobytes())
                progress(f"dequantising {header.file.name}", done, total)


def _pieces(header: Header, tensor: Renamed) -> Iterator[NDArray[np.float32]]:
    if tensor.heads:
        yield in_order(read_tensor(header, tensor.info), tensor)
    else:
        for piece in read_pieces(header, tensor.info):
            yield piece - np.float32(tensor.offset) if tensor.offset else piece


def in_order(weight: NDArray[Any], tensor: Renamed) -> NDArray[Any]:
    """Rows of each head so that a rotation pairs a value with the one half a head away."""
    rows = weight.shape[0]
    if rows % (2 * tensor.heads):
        raise ExportError(f"{tensor.info.name} has {rows} rows, no whole pairs for {tensor.heads} heads")
    pairs = weight.reshape(tensor.heads, rows // tensor.heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _converted(piece: NDArray[np.float32], dtype: Any, tensor: Renamed) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        converted = piece.astype(dtype, copy=False)
    if dtype is np.float16 and np.isinf(converted).any() and np.isfinite(piece).all():
        raise ExportError(f"{tensor.info.name} has values beyond float16's range; use bfloat16 or float32")
    return converted
