"""A model's files in a repository, by their paths: what transformers would load."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from mionnx.errors import ModelError
from mionnx.graph.folder_file import read_json

INDEX = ".index.json"
WEIGHT_NAMES = tuple(f"{stem}{index}" for stem in ("model.safetensors", "pytorch_model.bin") for index in ("", INDEX))
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # config, vocabularies, chat templates
TEMPLATES = "additional_chat_templates"  # a folder of chat templates by name, as transformers reads it
MODULES = "modules.json"  # of sentence-transformers: the folders of what follows the transformer
SINGLE = (".gguf", ".pth")  # files that are a model by themselves
DEPTH = 2  # slashes in the name of one of them, USER/REPOSITORY/FILE


def names_file(name: str) -> bool:
    """Whether a name means one file on the Hub, a model by itself: USER/REPOSITORY/FILE.gguf."""
    return name.count("/") == DEPTH and name.endswith(SINGLE) and not name.startswith((".", "/", "~"))


def checkpoint_of(names: Iterable[str]) -> str | None:
    """The weights of a checkpoint, or the index of their shards; None if there are none.

    In transformers' order. Others beside them are not read: `consolidated.safetensors`, `original/`, and shards of
    another framework.
    """
    present = {*names}
    return next((name for name in WEIGHT_NAMES if name in present), None)


def small_files(names: Iterable[str]) -> list[str]:
    """The config, tokenizer files and chat templates; of indices the one whose shards are read."""
    names = [*names]
    unread = {name for name in names if name.endswith(INDEX)} - {checkpoint_of(names)}
    return [
        name
        for name in names
        if name not in unread
        and ("/" not in name or PurePosixPath(name).parent == PurePosixPath(TEMPLATES))
        and any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)
    ]


def shards(folder: Path, names: Iterable[str]) -> list[str]:
    """The weight files of a checkpoint whose small files are in a folder."""
    weights = checkpoint_of(names)
    if weights is None or not weights.endswith(INDEX):
        return [] if weights is None else [weights]
    index = read_json(folder / weights)
    files = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(files, Mapping) or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(f"{folder / weights} is damaged: its weight_map names no files")
    return sorted({*files.values()})


def module_folders(folder: Path, names: Iterable[str]) -> list[str]:
    """The folders in `modules.json` of sentence-transformers, without the transformer's own."""
    if MODULES not in names:
        return []
    modules = read_json(folder / MODULES)
    if not isinstance(modules, Sequence) or not all(isinstance(one, Mapping) for one in modules):
        raise ModelError(f"{folder / MODULES} is damaged: it is no list of modules")
    return [str(one["path"]) for one in modules if one.get("path")]


def below(folder: str, names: Iterable[str]) -> list[str]:
    """The paths of a folder's files, from that folder."""
    return [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")] if folder else [*names]
