"""A GGUF file to a hooked model: first a checkpoint of its config, weights and tokenizer, then its export."""

import json
from collections.abc import Container
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from exporters.gguf.architectures import Config, architecture_of, config_of
from exporters.gguf.facts import special_ids
from exporters.gguf.header import Header
from exporters.gguf.tokenizer import write_tokenizer
from exporters.gguf.weights import own_dtype, rename, write_weights
from exporters.transformers.assemble import export_checkpoint
from mionnx.errors import ExportError
from mionnx.machine.progress import Progress

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
    """Write a GGUF file as a transformers checkpoint: config, weights, tokenizer.

    Returns:
        the dtype, where "auto" was given the one that it means.

    Raises:
        ExportError: see `exporters.gguf.export`.
    """
    architecture = architecture_of(header)
    dtype = own_dtype(header, dtype)
    config = config_of(header, architecture)
    tensors = rename(header, architecture, config)
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
