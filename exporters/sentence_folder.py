"""A sentence-transformers folder: what makes an embedding of its transformer's stream, by `modules.json`.

Read without torch: exports of checkpoints make the modules in torch (`transformers/sentence.py`), adoption writes them
as nodes (`adopt/pooling.py`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import inside, read_json
from mionnx.graph.metadata import POOLINGS
from mionnx.graph.sizes import TEXT_SETTINGS, text_limit

MODULES_FILE, SETTINGS = "modules.json", "config_sentence_transformers.json"
PACKAGE = "sentence_transformers."  # where a module's class has to come from
NAMED = {"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean"} | {
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True)
class Module:
    """A module behind the pooling: "Dense", "LayerNorm" or "Normalize", with its config and its folder."""

    kind: str
    config: dict[str, Any]
    folder: Path


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


def sentence_modules(folder: Path) -> SentenceModules | None:
    """The modules of a folder behind its transformer; None if it is no folder of sentence embeddings.

    Raises:
        ExportError: a damaged file, or modules that are not known.
    """
    if not (folder / MODULES_FILE).is_file():
        return None
    entries = _read(folder, MODULES_FILE, list)
    kinds = [_kind(entry, folder) for entry in entries]
    texts: dict[str, Any] = next((_read(folder, name, dict) for name in TEXT_SETTINGS if (folder / name).is_file()), {})
    if kinds == ["Transformer"] and texts.get("transformer_task") == "sequence-classification":
        return None  # a CrossEncoder's, since sentence-transformers 6
    if kinds[:2] != ["Transformer", "Pooling"] or kinds.count("Pooling") > 1:
        raise ExportError(
            f"{folder / MODULES_FILE} has the modules {', '.join(kinds)}: no transformer with one pooling"
        )
    paths = [str(entry.get("path", "")) for entry in entries]
    if paths[0]:
        raise ExportError(
            f"{folder / MODULES_FILE} keeps its transformer in {paths[0]!r}: give that folder, it has no head"
        )
    poolings, with_prompt = _poolings(_read(folder, f"{paths[1]}/config.json", dict), folder / paths[1])
    behind = [
        Module(kind, {} if kind == "Normalize" else _read(folder, f"{path}/config.json", dict), folder / path)
        for kind, path in zip(kinds[2:], paths[2:], strict=True)
        if kind != "Dropout"
    ]
    facts = {"include_prompt": with_prompt, **_settings(folder), "lower_case": bool(texts.get("do_lower_case"))}
    return SentenceModules(poolings, behind, facts, text_limit(folder))


def stated_activation(folder: Path) -> str:
    """What a CrossEncoder's folder says makes scores of its logits, by the name of a class of torch; empty if nothing.

    Raises:
        ExportError: a class that is not known, or a prompt before each text.
    """
    settings = _read(folder, SETTINGS, dict) if (folder / SETTINGS).is_file() else {}
    config = _read(folder, "config.json", dict) if (folder / "config.json").is_file() else {}
    if settings.get("model_type") == "CrossEncoder" and settings.get("default_prompt_name"):
        raise ExportError(f"{folder / SETTINGS} puts a prompt before the texts of a CrossEncoder: not exported")
    inner = config.get("sentence_transformers")  # of versions 4 and 5; before these a word of its own
    named = [settings.get("activation_fn"), inner.get("activation_fn") if isinstance(inner, dict) else None]
    stated = next(filter(None, [*named, config.get("sbert_ce_default_activation_function")]), "")
    if not isinstance(stated, str) or not stated.startswith("torch."):
        return ""  # the package imports no other either, unless it is told to trust the folder
    name = stated.rpartition(".")[2]
    if name not in ("Identity", "Sigmoid"):
        raise ExportError(f"{folder} makes scores by {stated}; known are torch's Identity and Sigmoid")
    return name


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
        raise ExportError(f"{folder / MODULES_FILE} is damaged: an entry has no type")
    kind = path.rpartition(".")[2]
    if not path.startswith(PACKAGE):
        raise ExportError(f"{folder} brings code of its own for the module {path}: code of a checkpoint is never run")
    kinds = ("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize", "Dropout")
    if kind not in kinds:
        raise ExportError(f"{folder / MODULES_FILE} has a module {kind!r}; mionnx knows {', '.join(kinds)}")
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
