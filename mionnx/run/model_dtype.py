"""The dtype of a model: of a checkpoint's export, or of a hooked model as it is; refused before an export begins."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mionnx.errors import InputError, nearest
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import DTYPE_NAMES
from mionnx.quantise.settings import BLOCK_DTYPES as BLOCKS

AUTO_DTYPE = "auto"
DTYPE_CHOICES = (*DTYPE_NAMES, *BLOCKS)
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # names in safetensors


class Unsaid(str):
    """A default that nobody wrote: a hooked model's own dtype comes before it."""

    __slots__ = ()


DEFAULT = Unsaid("float32")


def check_name(dtype: str) -> None:
    """Refuse a dtype that no model has."""
    if dtype not in (*DTYPE_CHOICES, AUTO_DTYPE):
        near = nearest(dtype, [*DTYPE_CHOICES, AUTO_DTYPE])
        raise InputError(f"dtype {dtype!r} is none of {', '.join(DTYPE_CHOICES)}, {AUTO_DTYPE}{near}")


def refuse_uncomputed(folder: Path, dtype: str, lacking: Collection[str], where: str) -> None:
    """Refuse to export a checkpoint in a dtype that its engine does not compute in."""
    kind = stored_dtype(folder) if dtype == AUTO_DTYPE else dtype
    if kind in lacking:
        own = f", the dtype of {folder}" if dtype == AUTO_DTYPE else ""
        left = " or ".join(name for name in DTYPE_NAMES if name not in lacking)
        raise InputError(f"dtype={dtype!r}{own}: {where} does not compute in {kind}; use {left}, or provider='cuda'")


def refuse_other(hooked: HookedModel, dtype: str) -> None:
    """Refuse another dtype than a hooked model has; it is chosen when a checkpoint is exported."""
    own = hooked.metadata.weight_dtype
    if not isinstance(dtype, Unsaid) and dtype not in (AUTO_DTYPE, own):
        raise InputError(
            f"dtype={dtype!r}, but {hooked.folder} is a hooked model in {own} already: leave dtype out, or export its "
            f"checkpoint with dtype={dtype!r}"
        )


def stored_dtype(folder: Path) -> str | None:
    """The dtype of most tensors in a checkpoint's safetensors files; None without such files."""
    counts: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="np") as tensors:
                counts.update(tensors.get_slice(name).get_dtype() for name in tensors.keys())  # noqa: SIM118 - it is no dictionary
        except (OSError, SafetensorError):
            return None  # refused by the exporter, which says what is wrong with the file
    kinds = [STORED[name] for name, _ in counts.most_common() if name in STORED]
    return kinds[0] if kinds else None
