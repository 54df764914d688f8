"""Foreign ONNX files of decoder-only language models as hooked models, without torch.

Files of optimum, transformers.js, onnxruntime-genai, torch's exporter, ONNX Runtime's optimizer and quantiser. Hook
points are recognised by dataflow (`flow`, `recognise`, `attention`, `mlp`), fused operators expanded so that a hook can
stand inside (`operators`), and the result is run once against laws that need no reference (`self_check`).
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from exporters.adopt.onnx_files import choose, onnx_files, pick
from mionnx.machine.progress import Progress, silent

if TYPE_CHECKING:
    from exporters.adopt.assemble import Adopted
    from exporters.adopt.self_check import LawResult

__all__ = ["adopt", "check", "export", "pick", "recognises"]
CHECKPOINT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def recognises(folder: Path) -> bool:
    """Whether a folder holds foreign ONNX files and no checkpoint, or a file is one."""
    # Cheap: onnx_ir is not imported.
    if folder.is_dir() and any(path for pattern in CHECKPOINT_FILES for path in folder.glob(pattern)):
        return False
    return bool(onnx_files(folder))


def export(folder: Path, target: Path, dtype: str = "auto", progress: Progress = silent) -> None:
    """Write the preferred ONNX file of a folder, in its own dtype, as a hooked model; see `adopt`."""
    files = onnx_files(folder)
    if len(files) > 1:
        others = ", ".join(str(path.relative_to(folder)) for path in files[1:])
        warnings.warn(
            f"{folder} holds {len(files)} ONNX files, and {files[0].relative_to(folder)} is taken; "
            f"mionnx adopt {folder} --file NAME -o FOLDER takes another: {others}",
            stacklevel=2,
        )
    adopt(folder, target, None, progress)


def adopt(folder: Path, target: Path, file: str | None = None, progress: Progress = silent) -> "Adopted":
    """Write a foreign ONNX file, of a folder with one or several or by itself, as a hooked model."""
    # `file` is a name where the folder has several. Returns what was recognised and expanded, how well each law holds,
    # and what the file lacks; weights are referenced in place.
    from exporters.adopt.assemble import adopt_file

    return adopt_file(choose(folder, file), target, progress)


def check(folder: Path) -> "list[LawResult]":
    """Run a hooked model of a transformer once, and check it against the laws of a decoder."""
    from exporters.adopt.assemble import check_folder

    return check_folder(folder)
