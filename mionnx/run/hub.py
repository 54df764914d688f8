"""Models of the Hugging Face Hub: what transformers would load is downloaded, and found in the Hub's cache after."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from google.protobuf.message import DecodeError

from mionnx.errors import ModelError, nearest
from mionnx.graph.embedded_weights import read_light
from mionnx.graph.hooked_model import GRAPH, LARGEST_GRAPH
from mionnx.graph.onnx_file import external_files
from mionnx.run.hub_files import SINGLE, WEIGHT_NAMES, below, checkpoint_of, module_folders, shards, small_files
from mionnx.run.repository import Repository
from mionnx.run.source_path import is_hooked

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".h5", ".msgpack", ".ot", ".pt", ".ckpt", ".tflite", ".mlmodel")
Choose = Callable[[Sequence[str]], str]  # of the repository's ONNX files


def download(repository: Repository, choose: Choose, chosen: bool, weights: bool = True) -> Path:
    """Download what a model needs.

    A checkpoint goes before ONNX files, these before a `.pth` or GGUF file. Small files come first: where weights are
    in the cache, the config and the tokenizer are.

    Args:
        choose: picks one of several ONNX files, by their paths in the repository.
        chosen: whether the caller named a file: an ONNX file is wanted then, and the choice need not be said.
        weights: download the weights; without them it is what a graph alone is made of.

    Returns:
        the model's folder in the Hub's cache, or its `.pth` or GGUF file there.

    Raises:
        ModelError: no weights, several files that are a model each, or a damaged graph or index.
    """
    names = repository.names()
    checkpoint = None if chosen else checkpoint_of(names)
    graphs = [name for name in names if name.endswith(".onnx")]
    alone = [name for name in names if name.endswith(SINGLE) and "/" not in name]
    if weights and not (chosen or checkpoint or graphs or alone):
        raise ModelError(_without_weights(repository, names))
    folder = repository.fetch(small_files(names))
    if not weights:
        return folder
    if checkpoint:
        _fetch_checkpoint(repository, folder, names)
    elif chosen or graphs:
        _fetch_graph(repository, choose(graphs))
        if not chosen and len(graphs) > 1:
            _say_choice(repository.name, choose(graphs), graphs)
    else:
        return _fetch_alone(repository, alone)
    return folder


def download_file(repository: Repository, file: str) -> Path:
    """Download one file that is a model by itself; with a `.pth` file its vocabulary."""
    names = repository.names()
    if file not in names:
        files = [name for name in names if name.endswith(SINGLE)]
        has = f"it has {', '.join(files) or 'none'}{nearest(file, files)}"
        raise ModelError(f"{repository.where} has no file {file!r}; {has}")
    return repository.fetch([file, *(small_files(names) if file.endswith(".pth") else ())]) / file


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


def _fetch_graph(repository: Repository, graph: str) -> None:
    folder = repository.fetch([graph])
    repository.fetch(_weights(folder, graph))


def _say_choice(name: str, graph: str, graphs: list[str]) -> None:
    warnings.warn(
        f"{name} holds {len(graphs)} ONNX files, and {graph} is taken; mionnx adopt {name} --file NAME -o FOLDER "
        f"takes another: {', '.join(sorted({*graphs} - {graph}))}",
        stacklevel=2,
    )


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
