"""Foreign ONNX files of decoder-only language models as hooked models, without torch.

Files of optimum, transformers.js, onnxruntime-genai, torch's exporter, ONNX Runtime's optimizer and quantiser. Hook
points are recognised by dataflow (`flow`, `stream`, `attention`, `mlp`), fused operators expanded so that a hook can
stand inside (`operators`), and the result is run once against laws that need no reference (`self_check`).
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mionnx.errors import ExportError
from mionnx.machine.progress import Progress, silent

if TYPE_CHECKING:
    from exporters.adopt.assemble import Adopted


def recognises(folder: Path) -> bool:
    """Whether a folder or a file is a foreign ONNX model. Cheap: onnx_ir is not imported."""
    from exporters.adopt.source_file import onnx_files

    return bool(onnx_files(folder))


def export(folder: Path, target: Path, dtype: str = "auto", progress: Progress = silent) -> None:
    """Write a foreign ONNX file as a hooked model into an empty or new folder; its weights are referenced in place.

    Args:
        folder: with one or several ONNX files, in the layouts of the Hub; or the file itself.
        target: where `model.onnx`, links to the weight files, the config and the tokenizer go.
        dtype: not read: a file computes in its own dtype.
        progress: called as (stage, done, total).

    Raises:
        ExportError: no decoder is recognised in it, or what is recognised breaks a law.
    """
    from exporters.adopt.assemble import adopt
    from exporters.adopt.source_file import choose

    adopt(choose(folder), target, progress)
