"""A GGUF file to a hooked model: first a checkpoint of its config, weights and tokenizer, then its export.

What llama.cpp's converter changed in weights is undone: rows of queries and keys in the order of its rotation, and what
it adds to the weights of norms.
"""

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from exporters.gguf.architectures import Architecture, Config, architecture_of, config_of
from exporters.gguf.facts import FACTORS, special_ids
from exporters.gguf.header import Header, TensorInfo, read_pieces, read_tensor
from exporters.gguf.tokenizer import write_tokenizer
from exporters.transformers.assemble import export_checkpoint
from exporters.weight_files import begin_safetensors, some
from mionnx.errors import ExportError, nearest
from mionnx.machine.progress import Progress

STORED_DTYPES: dict[str, tuple[str, Any]] = {  # name -> safetensors' name and numpy's
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
}
OWN = {"F16": "float16", "BF16": "bfloat16"}  # types of matrices that a model can be exported in as they are
ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message: each ends what a model writes


def export_file(header: Header, target: Path, dtype: str, progress: Progress, left: Container[str] = ()) -> None:
    """See `exporters.gguf.export`; weights that are `left` get a place and no numbers."""
    file = header.file

    def said(stage: str, done: int, total: int) -> None:
        progress(stage.replace(target.name, file.name), done, total)

    try:
        export_checkpoint(target, target, write_checkpoint(header, target, dtype, said, left), said)
    except ExportError as error:
        if str(file) in str(error):
            raise
        raise ExportError(f"{file}: {error}") from error


def write_checkpoint(header: Header, folder: Path, dtype: str, progress: Progress, left: Container[str] = ()) -> str:
    """Write a GGUF file as a transformers checkpoint: config, weights, tokenizer; returns the dtype that was meant."""
    config, dtype = config_of(header), own_dtype(header, dtype)
    tensors = rename(header, config)
    folder.mkdir(parents=True, exist_ok=True)
    _write_configs(header, config, dtype, folder)
    write_tokenizer(header, folder)
    write_weights(header, tensors, folder / "model.safetensors", dtype, progress, left)
    return dtype


def _write_configs(header: Header, config: Config, dtype: str, folder: Path) -> None:
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]
    table = {"architectures": [kind], **config, "dtype": dtype}
    (folder / "config.json").write_text(json.dumps(table, indent=1))
    special = special_ids(header)
    ends = sorted({special[name] for name in ENDS if name in special})
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": ends or None}
    stated = {key: value for key, value in generation.items() if value is not None}
    (folder / "generation_config.json").write_text(json.dumps(stated, indent=1))


@dataclass(frozen=True)
class Renamed:
    """A tensor of the file, with what it is in transformers."""

    name: str
    info: TensorInfo
    heads: int = 0  # rows are those of so many heads in the order of neighbouring values; 0 where they are in order
    offset: float = 0.0  # what has been added to it


def rename(header: Header, config: Config) -> list[Renamed]:
    """Find transformers' name for every tensor, and what to undo."""
    architecture, renamed, unknown = architecture_of(header), [], []
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for gguf_name, info in header.tensors.items():
        path, _, leaf = gguf_name.rpartition(".")
        module, module_name = _module(path, architecture)
        if gguf_name in FACTORS:  # they go into the config's rotation
            continue
        if module_name is None or leaf not in ("weight", "bias"):
            unknown.append(gguf_name)
            continue
        # Gemma multiplies by 1 + weight; llama.cpp's converter adds the 1 to the stored weight
        offset = architecture.norm_offset if module.endswith("_norm") and leaf == "weight" else 0.0
        turned = heads.get(module, 0) if architecture.interleaved else 0
        if module == architecture.convolution and len(info.shape) == 2 and leaf == "weight":
            info = replace(info, shape=(info.shape[0], 1, info.shape[1]))
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
        return path, architecture.outside.get(path)
    name = architecture.layer.get(module)
    return module, f"model.layers.{number}.{name}" if name and number.isdigit() else None


def own_dtype(header: Header, dtype: str) -> str:
    """The dtype to write; "auto" is that of the matrices, float32 if they are quantised."""
    if dtype == "auto":
        kinds = {info.kind.name for info in header.tensors.values() if len(info.shape) > 1}
        # matrices alone: llama.cpp writes all norms in float32
        return OWN.get(kinds.pop(), "float32") if len(kinds) == 1 else "float32"
    if dtype not in STORED_DTYPES:
        choices = [*STORED_DTYPES, "auto"]
        raise ExportError(f"dtype {dtype!r} is none of {', '.join(choices)}{nearest(dtype, choices)}")
    return dtype


def write_weights(
    header: Header, tensors: list[Renamed], path: Path, dtype: str, progress: Progress, left: Container[str] = ()
) -> None:
    """Write tensors in a dtype, a piece of one in memory at a time; those `left` out get a place without numbers."""
    code, numpy_dtype = STORED_DTYPES[dtype]
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
                    with np.errstate(over="ignore"):
                        converted = piece.astype(numpy_dtype, copy=False)
                    # what was infinite in the file itself may stay so
                    if dtype == "float16" and (np.isinf(converted) & ~np.isinf(piece)).any():
                        raise ExportError(
                            f"{tensor.info.name} has values beyond float16's range; use bfloat16 or float32"
                        )
                    file.write(converted.tobytes())
                progress(f"dequantising {header.file.name}", done, total)


def _pieces(header: Header, tensor: Renamed) -> Iterator[NDArray[np.float32]]:
    if tensor.heads:
        yield in_order(read_tensor(header, tensor.info), tensor)  # read whole, since its rows change places
    else:
        for piece in read_pieces(header, tensor.info):
            yield piece - np.float32(tensor.offset) if tensor.offset else piece


def in_order(weight: NDArray[Any], tensor: Renamed) -> NDArray[Any]:
    """Rows of each head so that a rotation pairs a value with the one half a head away."""
    rows = weight.shape[0]
    if rows % (2 * tensor.heads):
        raise ExportError(f"{tensor.info.name} has {rows} rows, no whole pairs for {tensor.heads} heads")
    # stored as [pair, half] for llama.cpp's rotation of neighbours; transformers rotates [half, pair]
    pairs = weight.reshape(tensor.heads, rows // tensor.heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)
