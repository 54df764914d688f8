"""Checkpoints of TransformerLens' own `HookedTransformer`, trained there, as hooked models.

Toy models, those of neelnanda.io and of InterpBench: a state dict saved by `torch.save` in a `.pth` file, and the
config beside it.
"""

from pathlib import Path

from mionnx.errors import ExportError
from mionnx.machine.progress import Progress, silent

SUFFIXES = (".pth", ".pt")
OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin*")  # a folder with these is another checkpoint's
LAST = "final"  # how the stem of the file of the end of a training is called, beside those of its course
OWN_TENSORS = {"embed.W_E", "unembed.W_U"}  # tensors of every HookedTransformer, and of nothing else


def recognises(folder: Path) -> bool:
    """Whether a path is a `.pth` or `.pt` file with tensors of a HookedTransformer, or a folder of such files."""
    # Cheap: torch is not imported, and nothing is unpickled.
    from exporters.rwkv.checkpoint import tensor_names

    files = weight_files(folder)
    return bool(files) and tensor_names(files[0]) >= OWN_TENSORS


def weight_files(folder: Path) -> list[Path]:
    """The files of torch in a folder without other weights, that of the end first; of a path to one, that file."""
    if folder.is_file():
        return [folder] if folder.suffix in SUFFIXES else []
    if any(path for pattern in OTHER_WEIGHTS for path in folder.glob(pattern)):
        return []
    files = [file for suffix in SUFFIXES for file in folder.glob(f"*{suffix}") if file.is_file()]
    return sorted(files, key=lambda file: (not file.stem.endswith(LAST), file.name))


def choose(folder: Path) -> Path:
    """The file of weights to export."""
    first, *others = weight_files(folder)
    if others and (not first.stem.endswith(LAST) or others[0].stem.endswith(LAST)):
        names = ", ".join(file.name for file in (first, *others))
        raise ExportError(f"{folder} holds {len(others) + 1} files of weights: give one of them, as {first}: {names}")
    return first


def export(folder: Path, target: Path, dtype: str = "float32", progress: Progress = silent) -> None:
    """Write a checkpoint as a hooked model; arguments are those of `exporters.transformers.export`."""
    # Buffers of masks, which older versions of TransformerLens save, are left out; a bias that they did not save is 0.
    from exporters.hooked_transformer.checkpoint import export_file

    export_file(choose(folder), target, dtype, progress)
