"""A HookedTransformer to a hooked model: first a checkpoint of the family with its names, then that one's export."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from exporters.hooked_transformer.settings import CONFIG_JSON, SOLU_NORMED, converted, read_settings
from exporters.sidecar_files import find_files, keep_files
from exporters.transformers.assemble import export_checkpoint
from exporters.weight_files import some
from mionnx.errors import ExportError
from mionnx.machine.progress import Progress

BUFFERS = re.compile(r"\.(mask|IGNORE)$")  # constants of a layer


def export_file(file: Path, target: Path, dtype: str, progress: Progress) -> None:
    """See `exporters.hooked_transformer.export`."""
    target.mkdir(parents=True, exist_ok=True)
    beside = [one for one in find_files(file.parent) if one.name != CONFIG_JSON]
    settings = read_settings(file)
    named = settings.get("tokenizer_name")
    if named and not any(one.name.startswith("tokenizer") for one in beside):
        where = f"{file.parent}: its config names the tokenizer of {named}"
        warnings.warn(f"{where}; for text instead of token ids put its tokenizer.json there", stacklevel=2)
    write_checkpoint(file, settings, target)
    keep_files(beside, file.parent, target)

    def said(stage: str, done: int, total: int) -> None:
        progress(stage.replace(target.name, file.name), done, total)

    try:
        export_checkpoint(target, target, dtype, said)
    except ExportError as error:
        raise ExportError(f"{file}: {error}") from error


def write_checkpoint(file: Path, settings: Mapping[str, Any], folder: Path) -> None:
    """Write `config.json` and `model.safetensors` of a HookedTransformer as transformers' classes name them."""
    config = converted(settings, file)
    renamed = RenamedTensors(read_tensors(file), config, file).all()
    (folder / CONFIG_JSON).write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in renamed.items()}, folder / "model.safetensors")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a state dict, mapped where they lie; nothing else is unpickled, and nothing executed."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError, ValueError) as error:
        raise ExportError(f"{file} is no intact file of tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ExportError(f"{file} holds something else than a table of tensors")
    return {name: tensor for name, tensor in tensors.items() if not BUFFERS.search(name)}


class RenamedTensors:
    """The tensors of a HookedTransformer in GPT-2's names and shapes; each has to be there, and none is left."""

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], file: Path) -> None:
        self._left, self._config, self._file = dict(tensors), config, file
        self._dtype = self._left["embed.W_E"].dtype

    def all(self) -> dict[str, Tensor]:
        """Name in the family -> tensor; those of Conv1D [in, out], of the unembedding [out, in]."""
        renamed = dict(self._model())
        if self._left:
            raise ExportError(f"{self._file}: no part of such a model reads {some(self._left)}")
        return renamed

    def _model(self) -> Iterator[tuple[str, Tensor]]:
        config = self._config
        width, vocab = config["n_embd"], config["vocab_size"]
        head, logits = ("classifier", len(config["id2label"])) if "id2label" in config else ("lm_head", vocab)
        yield "transformer.wte.weight", self._take("embed.W_E", vocab, width)
        yield "transformer.wpe.weight", self._take("pos_embed.W_pos", config["n_positions"], width)
        for layer in range(config["n_layer"]):
            for name, tensor in self._layer(f"blocks.{layer}."):
                yield f"transformer.h.{layer}.{name}", tensor
        yield from self._norm("transformer.ln_f", "ln_final", width, config["final_normalization"])
        yield f"{head}.weight", self._take("unembed.W_U", width, logits).T
        yield f"{head}.bias", self._take("unembed.b_U", logits)

    def _layer(self, at: str) -> Iterator[tuple[str, Tensor]]:
        config = self._config
        width, heads, size, inner = (config[name] for name in ("n_embd", "n_head", "head_dim", "n_inner"))
        yield from self._norm("ln_1", f"{at}ln1", width, config["normalization"])
        read = [self._take(f"{at}attn.W_{role}", heads, width, size) for role in "QKV"]
        yield "attn.c_attn.weight", torch.cat([one.transpose(0, 1).reshape(width, -1) for one in read], 1)
        yield "attn.c_attn.bias", torch.cat([self._take(f"{at}attn.b_{role}", heads, size).ravel() for role in "QKV"])
        yield "attn.c_proj.weight", self._take(f"{at}attn.W_O", heads, size, width).reshape(-1, width)
        yield "attn.c_proj.bias", self._take(f"{at}attn.b_O", width)
        if config["attn_only"]:
            return
        yield from self._norm("ln_2", f"{at}ln2", width, config["normalization"])
        for name, own, shape in (("c_fc", "in", (width, inner)), ("c_proj", "out", (inner, width))):
            yield f"mlp.{name}.weight", self._take(f"{at}mlp.W_{own}", *shape)
            yield f"mlp.{name}.bias", self._take(f"{at}mlp.b_{own}", shape[1])
        if config["activation_function"] == SOLU_NORMED:  # with weights where those of the stream have any
            kind = "LN" if config["normalization"] == "LN" else "LNPre"
            yield from self._norm("mlp.ln", f"{at}mlp.ln", inner, kind)

    def _norm(self, name: str, own: str, size: int, kind: str | None) -> Iterator[tuple[str, Tensor]]:
        if kind is None:
            return
        without = kind.endswith("Pre")
        yield f"{name}.weight", torch.ones(size, dtype=self._dtype) if without else self._take(f"{own}.w", size)
        if kind.startswith("LN"):
            yield f"{name}.bias", torch.zeros(size, dtype=self._dtype) if without else self._take(f"{own}.b", size)

    def _take(self, name: str, *shape: int) -> Tensor:
        tensor = self._left.pop(name, None)
        if tensor is None:
            if not name.rpartition(".")[2].startswith("b"):
                raise ExportError(f"{self._file} lacks the tensor {name}")
            return torch.zeros(shape, dtype=self._dtype)  # as TransformerLens fills in biases that a file lacks
        if tensor.shape != shape:
            raise ExportError(f"{self._file}: {name} is {[*tensor.shape]}, the config says {[*shape]}")
        return tensor
