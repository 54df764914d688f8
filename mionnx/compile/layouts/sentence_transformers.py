"""The layout "sentence-transformers": what sentence-transformers 5 loads with `backend="onnx"`, and fastembed.

`onnx/model.onnx` gives the last stream, and the modules of the folder make sentences of it: pooling, Dense, Normalize.
fastembed 0.9 reads the same folder as a custom model, and takes the graph's own `sentence_embedding`. A model of
classes is opened as a `CrossEncoder`.
"""

import json
from pathlib import Path
from typing import Any

import onnx

from mionnx.compile.layouts.encoders import as_transformers, check_encoder, write_tokenizer
from mionnx.compile.layouts.layout import CARD_PROMPT, ClientLayout, Content
from mionnx.errors import InputError, ModelError
from mionnx.graph import onnx_file
from mionnx.graph.folder_file import inside
from mionnx.machine.tensor_file import write_tensors

MODULES = "modules.json"
WEIGHTS = "model.safetensors"
# Modules with weights -> the names of those in the module's own file.
WEIGHED = {"Dense": ("linear.weight", "linear.bias"), "LayerNorm": ("norm.weight", "norm.bias")}


class SentenceTransformersLayout(ClientLayout):
    """For sentence-transformers, and fastembed."""

    name = "sentence-transformers"
    client = "sentence-transformers"
    turns_knobs = False  # `encode` feeds what it knows
    takes_encoders = True
    takes_decoders = False

    def check(self, content: Content) -> None:
        check_encoder(self, content)
        head = content.model.metadata.head
        if head not in ("embedding", "classes"):
            raise self.refuse(
                f"{self.client} makes embeddings and scores pairs, and {content.model.name} has the head {head!r}: use "
                "layout='optimum'"
            )
        if head == "embedding" and not _modules(content):
            raise self.refuse(f"{content.model.folder} has no {MODULES}, which says how {self.client} pools")
        _module_weights(content)

    def adapt(self, content: Content) -> onnx.ModelProto:
        return as_transformers(content)

    def graph(self, content: Content) -> str:
        return "onnx/model.onnx"

    def write(self, content: Content, at: Path) -> None:
        write_tokenizer(content, at)
        for path, weights in _module_weights(content).items():
            write_tensors(at / path / WEIGHTS, weights)

    def loop(self, content: Content) -> str:
        if content.model.metadata.head == "classes":
            kind, run = "CrossEncoder", f'model.predict([("{CARD_PROMPT}", "Paris")])'
        else:
            kind, run = "SentenceTransformer", f'model.encode("{CARD_PROMPT}")'
        return f"""from sentence_transformers import {kind}

model = {kind}(".", backend="onnx", model_kwargs={{"provider": "CPUExecutionProvider"}})
output = {run}
print(output.shape, output.ravel()[:8].tolist())"""


def _modules(content: Content) -> list[dict[str, Any]]:
    """The modules of the model's folder, in order; none without any."""
    folder = content.model.folder
    try:
        listed = json.loads(inside(folder, MODULES).read_text()) if (folder / MODULES).is_file() else []
    except ValueError as error:
        raise ModelError(f"{folder / MODULES} is damaged: {error}") from error
    return listed if isinstance(listed, list) and all(isinstance(one, dict) for one in listed) else []


def _module_weights(content: Content) -> dict[str, dict[str, Any]]:
    """Folder of a module that has weights -> those, by the names in its file."""
    folders, proto = dict[str, dict[str, Any]](), content.model.proto
    there = {tensor.name for tensor in proto.graph.initializer}
    for number, module in enumerate(_modules(content)[2:]):  # behind the transformer and its pooling
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path"))
        if kind not in WEIGHED:
            continue
        if Path(path).name != path or not (content.model.folder / path / "config.json").is_file():
            raise ModelError(f"{content.model.folder / MODULES} names no folder beside it for {kind}: {path!r}")
        names = {name: f"sentence.modules_behind.{number}.{name}" for name in WEIGHED[kind]}
        own = {name: full for name, full in names.items() if full in there}
        if WEIGHED[kind][0] not in own:
            raise InputError(
                f"layout 'sentence-transformers': {content.model.name} has no weights of {path} by their name: use "
                "layout='plain'"
            )
        folders[path] = {name: onnx_file.weight(proto, content.model.folder, full) for name, full in own.items()}
    return folders
