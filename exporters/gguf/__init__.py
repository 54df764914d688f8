"""GGUF files of llama.cpp, Ollama and LM Studio as hooked models."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mionnx.errors import ExportError, ModelError, nearest
from mionnx.graph.folder_file import inside
from mionnx.machine.progress import Progress, silent

if TYPE_CHECKING:
    from exporters.gguf.header import Header
    from mionnx.graph.blocks import GivenBlocks

SUFFIX = ".gguf"
WIDE = ("Q5", "Q6", "Q8")  # how the names of types between 4 and 16 bits begin
OTHERS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "*.onnx", "onnx/*.onnx", "*.pth")


def recognises(folder: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with GGUF files and no other weights."""
    # Cheap: neither gguf nor torch is imported.
    if folder.is_dir() and any(path for pattern in OTHERS for path in folder.glob(pattern)):
        return False
    return bool(gguf_files(folder))


def wide_weights(folder: Path, file: str | None = None) -> list[str]:
    """Name the weights, as transformers does, that the file holds in 5 to 8 bits."""
    # A model of 4 bits made from the file gives these 8, so that it loses nothing that the file has kept.
    header = _header(folder, file)
    from exporters.gguf.architectures import architecture_of, config_of
    from exporters.gguf.layout import UNEMBEDDING
    from exporters.gguf.renamed import rename

    tensors, table = rename(header, config_of(header)), architecture_of(header).token_table
    names = [one.name for one in tensors if one.info.kind.name.startswith(WIDE)]
    tied = UNEMBEDDING not in {one.name for one in tensors}  # one table is both: its bits hold for the unembedding too
    return [*names, UNEMBEDDING] if tied and table in names else names


def _header(folder: Path, file: str | None) -> "Header":
    from exporters.gguf.architectures import architecture_of
    from exporters.gguf.header import read_header

    header = read_header(choose(folder, file))
    architecture_of(header)  # refused before torch is imported, which takes longer than all of this
    return header


def export(
    folder: Path, target: Path, dtype: str = "float32", progress: Progress = silent, file: str | None = None
) -> None:
    """Write a GGUF file as a hooked model; arguments are those of `exporters.transformers.export`."""
    # "auto" is float32 where matrices are quantised, and their own dtype otherwise; `file` is a name where the folder
    # has several.
    header = _header(folder, file)
    from exporters.gguf.assemble import export_file

    export_file(header, target, dtype, progress)


def export_packed(
    folder: Path, target: Path, progress: Progress = silent, file: str | None = None
) -> "Mapping[str, GivenBlocks]":
    """Write a GGUF file as `export` does in float32; returns the blocks of weights left without numbers, by name."""
    header = _header(folder, file)
    from exporters.gguf.assemble import export_file
    from exporters.gguf.blocks import blocks_of

    blocks = blocks_of(header)
    export_file(header, target, "float32", progress, blocks)
    return blocks


def gguf_files(folder: Path) -> list[Path]:
    """GGUF files of a folder, by name; of a path to one, that file."""
    if folder.is_file():
        return [folder] if folder.suffix == SUFFIX else []
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file())


def choose(folder: Path, file: str | None = None) -> Path:
    """The file to export of a folder with GGUF files, or of a path to one."""
    files = gguf_files(folder)
    try:
        for path in files if folder.is_dir() else ():
            inside(folder, path.name)
    except ModelError as error:
        raise ExportError(str(error)) from error
    names = [path.name for path in files]
    if file is not None:
        named = [path for path in files if file in (path.name, path.stem)]
        if not named:
            has = ", ".join(names) or "none"
            raise ExportError(f"{folder} has no GGUF file {file!r}; it has {has}{nearest(file, names)}")
        return named[0]
    if not files:
        raise ExportError(f"{folder} holds no GGUF file")
    if len(files) > 1:
        raise ExportError(
            f"{folder} holds {len(files)} GGUF files: give one of them, as {files[0]}, or --file on the command line. "
            f"It has {', '.join(names)}"
        )
    return files[0]
