"""Text encoders as ONNX files of torch's exporter, as optimum and sentence-transformers write theirs."""

import json
import shutil
from inspect import signature
from pathlib import Path

import torch
from encoders import make_encoder
from transformers import PreTrainedModel

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
OUTPUTS = {
    "none": ["last_hidden_state", "pooler_output"],
    "embedding": ["token_embeddings", "sentence_embedding"],
}


class _Mean(torch.nn.Module):
    """optimum's file of a sentence-transformers model: the stream and its normalised mean."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        stream = self.inner(input_ids=input_ids, attention_mask=attention_mask, **types).last_hidden_state
        real = attention_mask.unsqueeze(-1).to(stream.dtype)
        pooled = (stream * real).sum(1) / real.sum(1).clamp(min=1e-9)
        return stream, torch.nn.functional.normalize(pooled, dim=1)


class _Called(torch.nn.Module):
    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return tuple(self.inner(input_ids=input_ids, attention_mask=attention_mask, **types).to_tuple())


def stock_encoder(
    family: str, folder: Path, head: str = "masked_lm", dynamo: bool = False, **changes
) -> PreTrainedModel:
    """Write `folder/onnx/model.onnx` and its config; returns the same model in eager torch."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_encoder(family, folder / "checkpoint", "none" if head == "embedding" else head, **changes)
    shutil.copyfile(folder / "checkpoint" / "config.json", folder / "config.json")
    names = [name for name in INPUTS if name in signature(model.forward).parameters]
    if (getattr(model.config, "type_vocab_size", 0) or 0) < 2:
        names = [name for name in names if name != "token_type_ids"]
    example = {name: torch.ones(2, 6, dtype=torch.long) for name in names}
    example["input_ids"] = torch.arange(12).reshape(2, 6) + 5
    outputs = OUTPUTS.get(head, ["logits"])
    outputs = outputs if head != "none" or "pooler" in dict(model.named_children()) else outputs[:1]
    sizes = {name: {0: "batch", 1: "sequence"} for name in names}
    options = {"dynamic_axes": {**sizes, outputs[0]: {0: "batch"}}, "opset_version": 14}
    if dynamo:
        dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
        options = {"dynamic_shapes": dict.fromkeys(names, dims), "opset_version": 18}
    (folder / "onnx").mkdir()
    torch.onnx.export(
        (_Mean if head == "embedding" else _Called)(model).eval(),
        (),
        folder / "onnx" / "model.onnx",
        kwargs=example,
        input_names=names,
        output_names=outputs,
        dynamo=dynamo,
        **options,
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"]
    return model


def write_modules(folder: Path, pooling: str, behind: str) -> None:
    """Make a sentence-transformers folder of a file's, with one module behind the pooling."""
    paths = {"Transformer": "", "Pooling": "1_Pooling", behind: f"2_{behind}"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in paths.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    configs = {"1_Pooling": {"pooling_mode": pooling}, f"2_{behind}": {"in_features": 32, "out_features": 8}}
    for path, config in configs.items():
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
