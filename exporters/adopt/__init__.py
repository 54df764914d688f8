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
