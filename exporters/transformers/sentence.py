"""Sentence embeddings: the modules of a sentence-transformers folder behind its transformer, `modules.json`.

Their code lies in a package that is not imported here; what they compute is written down, one function a pooling
(sentence-transformers 5, `models/Pooling.py`, `Dense.py`, `Normalize.py`, `LayerNorm.py`).
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exporters.checkpoint_tensors import StoredTensor, read_tensors
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import inside, read_json
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import POOLINGS
from mionnx.machine.files import link_or_copy

MODULES, SETTINGS = "modules.json", "config_sentence_transformers.json"
TEXTS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json")
PACKAGE = "sentence_transformers."  # where a module's class has to come from
SENTENCE = "sentence"  # name of the modules in a model, and in the names of their weights
NAMED = {"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean"} | {
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    name: getattr(nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU", "LeakyReLU", "Softmax")
}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True)
class Module:
    """A module behind the pooling: "Dense", "LayerNorm" or "Normalize", with its config and its folder."""

    kind: str
    config: dict[str, Any]
    folder: Path

    def make(self) -> nn.Module:
        """The module, with parameters named as its file names them."""
        config = self.config
        try:
            if self.kind == "LayerNorm":
                return _LayerNorm(config["dimension"])
            if self.kind == "Dense":
                _refuse_other_features(config, self.folder)
                sizes = config["in_features"], config["out_features"], config.get("bias", True)
                return _Dense(*sizes, str(config.get("activation_function") or "Tanh"))
        except (KeyError, TypeError, RuntimeError) as error:
            raise ExportError(f"{self.folder} describes no {self.kind} module: {error}") from error
        return _Normalize()


@dataclass(frozen=True)
class SentenceModules:
    """What makes an embedding of a stream.

    Attributes:
        poolings: one or several of `POOLINGS`, concatenated in this order.
        modules: what follows.
        texts: facts for who makes tokens of texts, as in `Metadata.pooling`.
        max_length: tokens at which longer texts are cut; None where nothing is said.
    """

    poolings: list[str]
    modules: list[Module] = field(default_factory=list)
    texts: dict[str, Any] = field(default_factory=dict)
    max_length: int | None = None

    def metadata(self) -> dict[str, Any]:
        """`Metadata.pooling`."""
        normal = bool(self.modules) and self.modules[-1].kind == "Normalize"
        return {"modes": self.poolings, "normalize": normal, **self.texts}

    def make(self) -> "Sentence":
        """The modules in torch, with random weights."""
        return Sentence(self.poolings, [module.make() for module in self.modules])

    def load(self, dtype: torch.dtype) -> "Sentence":
        """The modules in torch, with their weights."""
        made = self.make()
        with tempfile.TemporaryDirectory() as staging:
            read = {one.name.removeprefix(f"{SENTENCE}."): one.load() for one in self.tensors(Path(staging))}
        try:
            made.load_state_dict(read)
        except RuntimeError as error:
            raise ExportError(f"the modules of {MODULES} have other weights: {error}") from error
        return made.to(dtype).eval()

    def tensors(self, staging: Path) -> list[StoredTensor]:
        """The modules' weights, by their names in a model; their files are linked into `staging` by other names."""
        tensors = list[StoredTensor]()
        for number, module in enumerate(self.modules):
            if module.kind == "Normalize":
                continue
            inner = staging / f"sentence-{number}"
            inner.mkdir()
            read = read_tensors(module.folder, inner)
            files = {tensor.file: staging / f"{module.folder.name}-{tensor.file.name}" for tensor in read}
            for file, own in files.items():
                link_or_copy(file, own)
            tensors += [
                replace(one, name=f"{SENTENCE}.modules_behind.{number}.{one.name}", file=files[one.file])
                for one in read
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


def pooled(stream: Tensor, mask: Tensor, mode: str) -> Tensor:
    """One vector a row, [batch, hidden], of the tokens that are no padding."""
    if mode == "cls":
        return at_token(stream, first_columns(mask))
    places = mask.cumsum(1) * mask  # 1, 2, ... of each row's own text
    if mode == "lasttoken":
        return at_token(stream, torch.argmax(places, 1))
    real = mask[:, :, None].to(stream.dtype)
    if mode == "max":
        return torch.where(real > 0, stream, torch.full_like(stream, -1e4 if _narrow(stream) else -1e9)).amax(1)
    weights = places[:, :, None].to(stream.dtype) if mode == "weightedmean" else real
    total = weights.sum(1).clamp(min=1e-9 if not _narrow(stream) else 1e-4)
    return (stream * weights).sum(1) / (torch.sqrt(total) if mode == "mean_sqrt_len" else total)


def _narrow(stream: Tensor) -> bool:
    return stream.dtype == torch.float16


def sentence_modules(folder: Path) -> SentenceModules | None:
    """The modules of a folder behind its transformer; None if it is no sentence-transformers folder.

    Raises:
        ExportError: a damaged file, or modules that are not known.
    """
    if not (folder / MODULES).is_file():
        return None
    entries = _read(folder, MODULES, list)
    kinds = [_kind(entry, folder) for entry in entries]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds.count("Pooling") > 1:
        raise ExportError(f"{folder / MODULES} has the modules {', '.join(kinds)}: no transformer with one pooling")
    paths = [str(entry.get("path", "")) for entry in entries]
    if paths[0]:
        raise ExportError(f"{folder / MODULES} keeps its transformer in {paths[0]!r}: give that folder, it has no head")
    poolings, whole = _poolings(_read(folder, f"{paths[1]}/config.json", dict), folder / paths[1])
    behind = [
        Module(kind, {} if kind == "Normalize" else _read(folder, f"{path}/config.json", dict), folder / path)
        for kind, path in zip(kinds[2:], paths[2:], strict=True)
        if kind != "Dropout"
    ]
    texts: dict[str, Any] = next((_read(folder, name, dict) for name in TEXTS if (folder / name).is_file()), {})
    length = texts.get("max_seq_length")
    facts = {"include_prompt": whole, **_settings(folder), "lower_case": bool(texts.get("do_lower_case"))}
    return SentenceModules(poolings, behind, facts, length if type(length) is int and length > 0 else None)


def _read(folder: Path, name: str, kind: type) -> Any:
    try:
        table = read_json(inside(folder, name))
    except ModelError as error:
        raise ExportError(str(error)) from error
    if not isinstance(table, kind):
        raise ExportError(f"{folder / name} is damaged: it holds no {'list' if kind is list else 'table'}")
    return table


def _kind(entry: Any, folder: Path) -> str:
    """The class of a module by its last word; its path has moved between versions."""
    path = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(path, str):
        raise ExportError(f"{folder / MODULES} is damaged: an entry has no type")
    kind = path.rpartition(".")[2]
    if not path.startswith(PACKAGE):
        raise ExportError(f"{folder} brings code of its own for the module {path}: code of a checkpoint is never run")
    known = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")
    if kind not in known:
        raise ExportError(f"{folder / MODULES} has a module {kind!r}; mionnx knows {', '.join(known)}")
    return kind


def _poolings(config: dict[str, Any], folder: Path) -> tuple[list[str], bool]:
    """The poolings of a config in the order of their vectors, and whether the tokens of a prompt count."""
    named = config.get("pooling_mode")  # since sentence-transformers 6, in an order of its own
    chosen = [mode for key, mode in NAMED.items() if config.get(key)]
    if isinstance(named, str | list):
        chosen = [str(mode).removesuffix("_tokens") for mode in ([named] if isinstance(named, str) else named)]
    unknown = [mode for mode in chosen if mode not in POOLINGS]
    if unknown or not chosen:
        raise ExportError(f"{folder} has the pooling {unknown[0] if unknown else None!r}; known: {', '.join(POOLINGS)}")
    return chosen, config.get("include_prompt") is not False


def _settings(folder: Path) -> dict[str, Any]:
    """Prompts, the default one, and the measure of likeness."""
    table = _read(folder, SETTINGS, dict) if (folder / SETTINGS).is_file() else {}
    prompts = table.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ExportError(f"{folder / SETTINGS} is damaged: prompts are no table of texts")
    default, measure = table.get("default_prompt_name"), table.get("similarity_fn_name") or "cosine"
    if default is not None and default not in prompts:
        raise ExportError(f"{folder / SETTINGS} names the default prompt {default!r}, and has no such prompt")
    if measure not in SIMILARITIES:
        raise ExportError(f"{folder / SETTINGS} compares by {measure!r}; known are {', '.join(SIMILARITIES)}")
    return {"prompts": prompts, "default_prompt": default, "similarity": measure}
