"""A GGUF file to a hooked model: first a checkpoint of its config, weights and tokenizer, then its export."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from exporters.gguf.architectures import config_of
from exporters.gguf.facts import special_ids
from exporters.gguf.header import Header
from exporters.gguf.layout import Config
from exporters.gguf.renamed import Renamed, pieces, rename
from exporters.gguf.tokenizer import write_tokenizer
from exporters.transformers.assemble import export_checkpoint
from exporters.weight_files import begin_safetensors
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
    shapes = {tensor.name: (code, tensor.shape, np.dtype(numpy_dtype).itemsize) for tensor in tensors}
    with path.open("wb") as file:
        places = begin_safetensors(file, shapes)
        total, done = sum(length for _, length in places.values()), 0
        for tensor in tensors:
            offset, length = places[tensor.name]
            done += length
            if tensor.name not in left:
                file.seek(offset)
                for piece in pieces(header, tensor):
                    with np.errstate(over="ignore"):
                        converted = piece.astype(numpy_dtype, copy=False)
                    # what was infinite in the file itself may stay so
                    if dtype == "float16" and (np.isinf(converted) & ~np.isinf(piece)).any():
                        raise ExportError(
                            f"{tensor.info.name} has values beyond float16's range; use bfloat16 or float32"
                        )
                    file.write(converted.tobytes())
                progress(f"dequantising {header.file.name}", done, total)
