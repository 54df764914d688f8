"""Models of the Hugging Face Hub: what transformers would load is downloaded, and found in the Hub's cache after."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from google.protobuf.message import DecodeError

from mionnx.errors import ModelError, nearest
from mionnx.graph.embedded_weights import read_light
from mionnx.graph.folder_file import read_json
from mionnx.graph.hooked_model import GRAPH, LARGEST_GRAPH
from mionnx.graph.onnx_file import external_files
from mionnx.machine.caller import caller_level
from mionnx.run.repository import Repository, below
from mionnx.run.source_path import is_hooked

INDEX = ".index.json"
WEIGHT_NAMES = tuple(f"{stem}{index}" for stem in ("model.safetensors", "pytorch_model.bin") for index in ("", INDEX))
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # config, vocabularies, chat templates
TEMPLATES = "additional_chat_templates"  # a folder of chat templates by name, as transformers reads it
MODULES = "modules.json"  # of sentence-transformers: the folders of what follows the transformer
SINGLE = (".gguf", ".pth")  # files that are a model by themselves
DEPTH = 2  # slashes in the name of one of them, USER/REPOSITORY/FILE
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".h5", ".msgpack", ".ot", ".pt", ".ckpt", ".tflite", ".mlmodel")
Choose = Callable[[Sequence[str]], str]  # of the repository's ONNX files


def download(repository: Repository, choose: Choose, chosen: bool, weights: bool = True) -> Path:
    """Download what a model needs, and return its folder in the Hub's cache, or its `.pth` or GGUF file there."""
    # A checkpoint goes before ONNX files, these before a `.pth` or GGUF file. `choose` picks one of several ONNX files
    # by their paths; where the caller named one (`chosen`), the choice need not be said. Without weights it is what a
    # graph alone is made of.
    names = [*repository.sizes]
    checkpoint = None if chosen else checkpoint_of(names)
    graphs = [name for name in names if name.endswith(".onnx")]
    alone = [name for name in names if name.endswith(SINGLE) and "/" not in name]
    if weights and not (chosen or checkpoint or graphs or alone):
        raise ModelError(_without_weights(repository, names))
    folder = repository.fetch(small_files(names))  # first: where weights are in the cache, these are too
    if not weights:
        return folder
    if checkpoint:
        _fetch_checkpoint(repository, folder, names)
    elif chosen or graphs:
        graph = choose(graphs)
        repository.fetch(_weights(repository.fetch([graph]), graph))
        if not chosen and len(graphs) > 1:
            warnings.warn(
                f"{repository.name} holds {len(graphs)} ONNX files, and {graph} is taken; mionnx adopt "
                f"{repository.name} --file NAME -o FOLDER takes another: {', '.join(sorted({*graphs} - {graph}))}",
                stacklevel=caller_level(),
            )
    else:
        return _fetch_alone(repository, alone)
    return folder


def download_file(repository: Repository, file: str) -> Path:
    """Download one file that is a model by itself; with a `.pth` file its config and vocabulary."""
    names = [*repository.sizes]
    if file not in names:
        files = [name for name in names if name.endswith(SINGLE)]
        has = f"it has {', '.join(files) or 'none'}{nearest(file, files)}"
        raise ModelError(f"{repository.where} has no file {file!r}; {has}")
    beside = [*small_files(names), *{file.replace(".pth", "_cfg.pkl")}.intersection(names)]  # InterpBench pickles it
    return repository.fetch([file, *(beside if file.endswith(".pth") else ())]) / file


def _fetch_alone(repository: Repository, files: list[str]) -> Path:
    if len(files) > 1:
        kind = "GGUF" if all(name.endswith(".gguf") for name in files) else "model"
        raise ModelError(
            f"{repository.where} holds {len(files)} {kind} files: give one of them, as {repository.name}/{files[0]}: "
            f"{', '.join(files)}"
        )
    return download_file(repository, files[0])


def _fetch_checkpoint(repository: Repository, folder: Path, names: list[str]) -> None:
    """The weights of a checkpoint, and of a hooked model's folder those of its graph."""
    if 0 < repository.sizes.get(GRAPH, 0) <= LARGEST_GRAPH:  # else it holds weights: another tool's
        repository.fetch([GRAPH])
        if is_hooked(folder / GRAPH):
            repository.fetch(_weights(folder, GRAPH))
            return
    files = shards(folder, names)
    for module in module_folders(folder, names):
        inner = below(module, names)
        repository.fetch(f"{module}/{name}" for name in small_files(inner))
        files += [f"{module}/{name}" for name in shards(folder / module, inner)]
    repository.fetch(files)


def _weights(folder: Path, graph: str) -> list[str]:
    """The paths of a graph's weight files in its repository."""
    try:
        files = external_files(read_light(folder / graph).graph)
    except DecodeError as error:
        raise ModelError(f"{folder / graph} cannot be read as an ONNX model: {error}") from error
    return [str(PurePosixPath(graph).parent / one) for one in sorted(files)]


def _without_weights(repository: Repository, names: list[str]) -> str:
    others = [name for name in names if name.endswith(WEIGHT_SUFFIXES)]
    listing = f"; it has {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}" if others else ""
    read = ", ".join(name for name in WEIGHT_NAMES if not name.endswith(".json"))
    return f"{repository.where} holds no weights that are read ({read}, single or sharded, .onnx, .gguf, .pth){listing}"


def names_file(name: str) -> bool:
    """Whether a name means one file on the Hub, a model by itself: USER/REPOSITORY/FILE.gguf."""
    return name.count("/") == DEPTH and name.endswith(SINGLE) and not name.startswith((".", "/", "~"))


def checkpoint_of(names: Iterable[str]) -> str | None:
    """The weights of a checkpoint, or the index of their shards, in transformers' order; None if there are none."""
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
