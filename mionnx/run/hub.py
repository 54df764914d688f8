"""Models of the Hugging Face Hub: of a repository with several ONNX files, one is downloaded."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf.message import DecodeError

from mionnx.errors import ModelError
from mionnx.graph.embedded_weights import read_light
from mionnx.graph.hooked_model import GRAPH
from mionnx.graph.onnx_file import external_files

BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")  # config and tokenizer
CHECKPOINT = "*.safetensors"
ONNX = ("*.onnx", "*.onnx_data*", "*.onnx.data")

Choose = Callable[[Sequence[str]], str]  # of the repository's ONNX files


def download(name: str, choose: Choose, chosen: bool) -> Path:
    """Download what a model needs, and find it in the Hub's cache afterwards.

    A checkpoint goes before ONNX files. Without a network, it is what the cache has.

    Args:
        name: of the repository.
        choose: picks one of several ONNX files, by their paths in the repository.
        chosen: whether the caller named a file: an ONNX file is wanted then, and the choice need not be said.

    Raises:
        ModelError: a damaged graph.
        OSError, ValueError: the errors of huggingface_hub.
    """
    from huggingface_hub import HfApi, snapshot_download  # not needed for a folder, and slow to import
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        info = HfApi().model_info(name)
    except (HFValidationError, RepositoryNotFoundError):
        raise
    except Exception as error:  # of several libraries, by version: no network
        return _cached(name, snapshot_download, error)
    names = [one.rfilename for one in info.siblings or ()]
    found = [one for one in names if one.endswith(".onnx")]
    checkpoint = not chosen and any(PurePosixPath(one).match(CHECKPOINT) for one in names)
    graph = (GRAPH if GRAPH in names else None) if checkpoint else choose(found) if found or chosen else None
    if graph is not None and not checkpoint and not chosen and len(found) > 1:
        warnings.warn(
            f"{name} holds {len(found)} ONNX files, and {graph} is taken; mionnx adopt {name} --file NAME -o FOLDER "
            f"takes another: {', '.join(sorted({*found} - {graph}))}",
            stacklevel=2,
        )
    wanted = [*BESIDE, *([CHECKPOINT] if checkpoint else []), *([graph] if graph else [])]
    folder = Path(snapshot_download(name, revision=info.sha, allow_patterns=wanted))
    if graph is not None:
        data = [one for one in _weights(folder, graph) if one in names]
        if data:
            snapshot_download(name, revision=info.sha, allow_patterns=data)
    return folder


def _cached(name: str, find: Any, error: Exception) -> Path:
    """The folder of an earlier download of a repository."""
    try:
        return Path(find(name, allow_patterns=[*BESIDE, CHECKPOINT, *ONNX], local_files_only=True))
    except OSError as missing:
        raise missing from error


def _weights(folder: Path, graph: str) -> list[str]:
    """The paths of a graph's weight files in its repository."""
    try:
        files = external_files(read_light(folder / graph).graph)
    except DecodeError as error:
        raise ModelError(f"{folder / graph} cannot be read as an ONNX model: {error}") from error
    return [str(PurePosixPath(graph).parent / one) for one in sorted(files)]
