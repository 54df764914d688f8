"""GGUF files on the Hugging Face Hub: one file of a repository that holds many quantisations of a model."""

from pathlib import Path

from mionnx.errors import ModelError, nearest

SUFFIX = ".gguf"
WEIGHTS = (".safetensors", ".bin", ".onnx", ".pth")


def names_file(name: str) -> bool:
    """Whether a name is that of a GGUF file on the Hub: USER/REPOSITORY/FILE.gguf."""
    return name.count("/") == 2 and name.endswith(SUFFIX) and not name.startswith((".", "/", "~"))


def download_file(name: str) -> Path:
    """Download one GGUF file; see `names_file`.

    Raises:
        OSError: the Hub has no such file, or is out of reach.
        ValueError: the Hub takes no such name.
    """
    from huggingface_hub import hf_hub_download  # slow to import

    repository, _, file = name.rpartition("/")
    return Path(hf_hub_download(repository, file))


def only_file(name: str, folder: Path) -> Path:
    """The folder of a snapshot, or its one GGUF file if there are no other weights.

    Args:
        name: the repository.
        folder: its snapshot, without GGUF files.

    Raises:
        ModelError: the repository has several GGUF files.
        OSError: the Hub is out of reach.
    """
    if any(path.suffix in WEIGHTS for path in [*folder.glob("*"), *folder.glob("onnx/*")]):
        return folder
    from huggingface_hub import list_repo_files

    files = sorted(file for file in list_repo_files(name) if file.endswith(SUFFIX))
    if not files:
        return folder
    if len(files) > 1:
        raise ModelError(
            f"{name} holds {len(files)} GGUF files: give one of them, as {name}/{files[0]}: {', '.join(files)}"
        )
    return download_file(f"{name}/{files[0]}")


def file_in(folder: Path, file: str) -> Path:
    """A file of a folder by its name.

    Raises:
        ModelError: the folder has no such file.
    """
    choices = [path.name for path in folder.glob("*") if path.suffix in (SUFFIX, ".onnx")] if folder.is_dir() else []
    if Path(file).name != file or not (folder / file).is_file():
        raise ModelError(
            f"{folder} has no file {file!r}; it has {', '.join(sorted(choices)) or 'none'}{nearest(file, choices)}"
        )
    return folder / file
