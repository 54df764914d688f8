"""RWKV-6 (Finch) and RWKV-7 (Goose) as hooked models, their recurrence an ONNX Scan."""

from pathlib import Path

from mionnx.machine.progress import Progress, silent


def recognises(folder: Path) -> bool:
    """Whether a folder or a `.pth` file holds RWKV-6 or RWKV-7, by the names of its tensors."""
    # Cheap: torch is not imported, and nothing is unpickled.
    from exporters.rwkv.checkpoint import find_layout, tensor_names

    return find_layout(tensor_names(folder)) is not None


def export(folder: Path, target: Path, dtype: str = "float32", progress: Progress = silent) -> None:
    """Write a checkpoint as a hooked model into an empty or new folder.

    Args:
        folder: RWKV-6 in Hugging Face's layout, RWKV-7 in flash-linear-attention's, or one BlinkDL `.pth` of either;
            with `config.json` and tokenizer files where there are any. Or a `.pth` file, of whose folder the tokenizer
            files alone belong to it.
        target: where `model.onnx`, the weights, the config and the tokenizer go.
        dtype: "float32", "float16", "bfloat16", or "auto" for the checkpoint's own. Weights already of this dtype are
            referenced in place, others converted one at a time. The recurrence runs in float32 all the same.
        progress: called as (stage, done, total).

    Raises:
        ExportError: the layout is unknown, or checkpoint and graph do not match tensor by tensor.
    """
    from exporters.rwkv.assemble import export_checkpoint

    export_checkpoint(folder, target, dtype, progress)
