"""Sentence embeddings: the modules of a sentence-transformers folder behind its transformer, `modules.json`.

Their code lies in a package that is not imported here; what they compute is written down, one function a pooling
(sentence-transformers 5, `models/Pooling.py`, `Dense.py`, `Normalize.py`, `LayerNorm.py`).
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exporters.checkpoint_tensors import StoredTensor, read_tensors
from exporters.sentence_folder import MODULES_FILE, Module, SentenceModules
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.files import link_or_copy

SENTENCE = "sentence"  # name of the modules in a model, and in the names of their weights
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU", "LeakyReLU", "Softmax")
}


def make(sentence: SentenceModules) -> "Sentence":
    """The modules in torch, with random weights and parameters named as their files name them."""
    return Sentence(sentence.poolings, [_module(module) for module in sentence.modules])


def _module(module: Module) -> nn.Module:
    config = module.config
    try:
        if module.kind == "LayerNorm":
            return _LayerNorm(config["dimension"])
        if module.kind == "Dense":
            _refuse_other_features(config, module.folder)
            sizes = config["in_features"], config["out_features"], config.get("bias", True)
            return _Dense(*sizes, str(config.get("activation_function") or "Tanh"))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ExportError(f"{module.folder} describes no {module.kind} module: {error}") from error
    return _Normalize()


def load(sentence: SentenceModules, dtype: torch.dtype) -> "Sentence":
    """The modules in torch, with their weights."""
    modules = make(sentence)
    with tempfile.TemporaryDirectory() as staging:
        read = {one.name.removeprefix(f"{SENTENCE}."): one.load() for one in tensors_of(sentence, Path(staging))}
    try:
        modules.load_state_dict(read)
    except RuntimeError as error:
        raise ExportError(f"the modules of {MODULES_FILE} have other weights: {error}") from error
    return modules.to(dtype).eval()


def tensors_of(sentence: SentenceModules, staging: Path) -> list[StoredTensor]:
    """The modules' weights, by their names in a model; their files are linked into `staging` by other names."""
    tensors = list[StoredTensor]()
    for number, module in enumerate(sentence.modules):
        if module.kind == "Normalize":
            continue
        inner = staging / f"sentence-{number}"
        inner.mkdir()
        read = read_tensors(module.folder, inner)
        files = {tensor.file: staging / f"{module.folder.name}-{tensor.file.name}" for tensor in read}
        for file, own in files.items():
            link_or_copy(file, own)
        tensors += [
            replace(one, name=f"{SENTENCE}.modules_behind.{number}.{one.name}", file=files[one.file]) for one in read
        ]
    return tensors


def _refuse_other_features(config: dict[str, Any], folder: Path) -> None:
    """Refuse a Dense module that reads or writes something else than the embedding."""
    names = {config.get(f"module_{end}_name") for end in ("input", "output")} - {None, "sentence_embedding"}
    if names or config.get("use_residual"):
        raise ExportError(f"{folder} is a Dense module of {', '.join(map(str, names)) or 'a residual'}: not exported")


class _Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool, activation: str) -> None:
        super().__init__()
        name = activation.rpartition(".")[2].removesuffix("()")
        if name not in ACTIVATIONS or not (activation == name or activation.startswith("torch.nn.")):
            raise ExportError(f"a Dense module has the activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
        self.linear, self.activation_function = nn.Linear(inputs, outputs, bias), ACTIVATIONS[name]()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_function(self.linear(x))


class _LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class _Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, p=2, dim=1)


class Sentence(nn.Module):
    """Pooling and what follows, as a function of a stream [batch, seq, hidden] and its mask [batch, seq]."""

    def __init__(self, poolings: list[str], modules: list[nn.Module]) -> None:
        super().__init__()
        self.poolings, self.modules_behind = poolings, nn.ModuleList(modules)

    def forward(self, stream: Tensor, mask: Tensor, at: Callable[[HookPoint, Tensor], Tensor]) -> Tensor:
        x = torch.cat([pooled(stream, mask, mode) for mode in self.poolings], 1)
        x = at(HookPoint.Pooled, x)
        for module in self.modules_behind:
            x = module(x)
        return at(HookPoint.Embedding, x)


def at_token(stream: Tensor, columns: Tensor) -> Tensor:
    """The stream [batch, seq, hidden] at one column [batch] of each row."""
    places = columns[:, None, None].expand(-1, 1, stream.shape[-1])
    return stream.gather(1, places).squeeze(1)  # `[:, 0]` would be that of a first token once more


def first_columns(mask: Tensor) -> Tensor:
    """The column of each row's first token."""
    return torch.argmax(mask, 1)


def last_columns(mask: Tensor) -> Tensor:
    """The column of each row's last token."""
    return torch.argmax(mask.cumsum(1) * mask, 1)  # 1, 2, ... of each row's own text


def pooled(stream: Tensor, mask: Tensor, mode: str) -> Tensor:
    """One vector a row, [batch, hidden], of the tokens that are no padding."""
    if mode == "cls":
        return at_token(stream, first_columns(mask))
    places = mask.cumsum(1) * mask  # 1, 2, ... of each row's own text
    if mode == "lasttoken":
        return at_token(stream, last_columns(mask))
    real = mask[:, :, None].to(stream.dtype)
    if mode == "max":
        return torch.where(real > 0, stream, torch.full_like(stream, -1e4 if _narrow(stream) else -1e9)).amax(1)
    weights = places[:, :, None].to(stream.dtype) if mode == "weightedmean" else real
    total = weights.sum(1).clamp(min=1e-9 if not _narrow(stream) else 1e-4)
    return (stream * weights).sum(1) / (torch.sqrt(total) if mode == "mean_sqrt_len" else total)


def _narrow(stream: Tensor) -> bool:
    return stream.dtype == torch.float16
