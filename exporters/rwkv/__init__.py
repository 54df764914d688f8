"""RWKV-4 (Dove), RWKV-6 (Finch) and RWKV-7 (Goose) as hooked models, their recurrence an ONNX Scan."""

from pathlib import Path

from mionnx.machine.progress import Progress, silent


def recognises(folder: Path) -> bool:
    """Whether a folder or a `.pth` file holds RWKV-4, 6 or 7, by the names of its tensors."""
    # Cheap: torch is not imported, and nothing is unpickled.
    from exporters.rwkv.checkpoint import find_layout, tensor_names

    return find_layout(tensor_names(folder)) is not None


def export(folder: Path, target: Path, dtype: str = "float32", progress: Progress = silent) -> None:
    """Write a checkpoint as a hooked model; arguments are those of `exporters.transformers.export`."""
    # RWKV-4 or 6 in Hugging Face's layout, RWKV-7 in flash-linear-attention's, or one BlinkDL `.pth` of any; with
    # `config.json` and tokenizer files where there are any. Of the folder of a `.pth` file the tokenizer files alone
    # belong to it. The recurrence runs in float32 in any dtype.
    from exporters.rwkv.assemble import export_checkpoint

    export_checkpoint(folder, target, dtype, progress)
