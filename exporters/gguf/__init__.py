"""GGUF files of llama.cpp, Ollama and LM Studio as hooked models.

Config, tokenizer and chat template come from the file's metadata (`architectures`, `rope`, `tokenizer`), weights are
dequantised a piece at a time (`dequantise`, `weights`). What results is a transformers checkpoint, which
`exporters.transformers` makes a graph of.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from exporters.gguf.files import choose, gguf_files
from mionnx.machine.progress import Progress, silent

if TYPE_CHECKING:
    from mionnx.graph.blocks import GivenBlocks

WIDE = ("Q5", "Q6", "Q8")  # how the names of types between 4 and 16 bits begin
EMBEDDING, UNEMBEDDING = "model.embed_tokens", "lm_head"
OTHERS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "*.onnx", "onnx/*.onnx", "*.pth")


def recognises(folder: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with GGUF files and no other weights.

    Cheap: neither gguf nor torch is imported.
    """
    if folder.is_dir() and any(path for pattern in OTHERS for path in folder.glob(pattern)):
        return False
    return bool(gguf_files(folder))


def wide_weights(folder: Path, file: str | None = None) -> list[str]:
    """Name the weights, as transformers does, that the file holds in 5 to 8 bits.

    A model of 4 bits made from the file gives these 8, so that it loses nothing that the file has kept.

    Args:
        folder, file: see `export`.

    Raises:
        ExportError: see `export`.
    """
    from exporters.gguf.architectures import architecture_of, config_of
    from exporters.gguf.header import read_header
    from exporters.gguf.weights import rename

    header = read_header(choose(folder, file))
    architecture = architecture_of(header)
    found = rename(header, architecture, config_of(header, architecture))
    names = [one.name for one in found if one.info.kind.name.startswith(WIDE)]
    tied = f"{UNEMBEDDING}.weight" not in {one.name for one in found}
    return [*names, f"{UNEMBEDDING}.weight"] if tied and f"{EMBEDDING}.weight" in names else names


def export(
    folder: Path, target: Path, dtype: str = "float32", progress: Progress = silent, file: str | None = None
) -> None:
    """Write a GGUF file as a hooked model into an empty or new folder.

    Args:
        folder: the file, or a folder with it.
        target: where `model.onnx`, the weights, the config and the tokenizer go.
        dtype: "float32", "float16", "bfloat16"; or "auto", which is float32 where matrices are quantised and their own
            otherwise.
        progress: called as (stage, done, total).
        file: the name of the file, where the folder has several.

    Raises:
        ExportError: no choice among several files, an unknown architecture, or a damaged file.
    """
    chosen = choose(folder, file)
    from exporters.gguf.architectures import architecture_of
    from exporters.gguf.header import read_header

    header = read_header(chosen)
    architecture_of(header)  # refused before torch is imported, which takes longer than all of this
    from exporters.gguf.assemble import export_file

    export_file(header, target, dtype, progress)


def export_packed(
    folder: Path, target: Path, progress: Progress = silent, file: str | None = None
) -> "Mapping[str, GivenBlocks]":
    """Write a GGUF file as `export` does in float32, without the numbers of its blocks.

    Args:
        folder, target, progress, file: see `export`.

    Returns:
        the blocks by the names of the weights, whose places in the files are empty.

    Raises:
        ExportError: see `export`.
    """
    from exporters.gguf.architectures import architecture_of, config_of
    from exporters.gguf.header import read_header
    from exporters.gguf.weights import rename

    header = read_header(choose(folder, file))
    architecture = architecture_of(header)
    from exporters.gguf.assemble import export_file
    from exporters.gguf.blocks import blocks_of

    given = blocks_of(header, rename(header, architecture, config_of(header, architecture)))
    export_file(header, target, "float32", progress, given)
    return given
