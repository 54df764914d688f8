"""The layouts in which RWKV-6 and RWKV-7 checkpoints come, recognised by the names of their tensors.

BlinkDL's own names are the canonical ones here; the other layouts are the same tensors under other names, some of them
transposed.
"""

import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

MAX_HEADER = 100_000_000
MAX_PICKLE = 16_000_000

# A tensor that only one version has.
_ONLY = {6: "blocks.0.att.time_maa_w1", 7: "blocks.0.att.r_k"}
# Low-rank factors and projections are read as x @ W; torch's Linear stores W turned.
_LINEAR = re.compile(r"(receptance|key|value|gate|output|head)\.weight$")
_LOW_RANK = re.compile(r"\.att\.[wavg][12]$")
# The order of RWKV-7's mixes where they are stored as one tensor, `attn.x_x`.
FUSED_MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")


@dataclass(frozen=True)
class TensorLayout:
    """One way to name the tensors of a checkpoint.

    Attributes:
        title: for messages.
        version: 6 or 7.
        renamings: (pattern, replacement), applied one after the other to a canonical name.
        low_rank_turned: whether low-rank factors are stored as torch's Linear stores them.
    """

    title: str
    version: int
    renamings: tuple[tuple[str, str], ...] = ()
    low_rank_turned: bool = False

    def name(self, canonical: str) -> str:
        """The name of a tensor in this layout."""
        for pattern, replacement in self.renamings:
            canonical = re.sub(pattern, replacement, canonical)
        return canonical

    def turned(self, canonical: str) -> bool:
        """Whether the tensor is stored [out, in], while it is multiplied as [in, out]."""
        return bool(_LINEAR.search(canonical)) or (self.low_rank_turned and bool(_LOW_RANK.search(canonical)))

    def fits(self, names: Collection[str]) -> bool:
        """Whether a checkpoint with tensors of these names is in this layout."""
        return self.name(_ONLY[self.version]) in names and self.name("emb.weight") in names


_HF6 = (
    (r"^emb\.", "rwkv.embeddings."),
    (r"^ln_out\.", "rwkv.ln_out."),
    (r"^blocks\.", "rwkv.blocks."),
    (r"\.ln0\.", ".pre_ln."),
    (r"\.att\.", ".attention."),
    (r"\.ffn\.", ".feed_forward."),
)
_FLA7 = (
    (r"^emb\.", "model.embeddings."),
    (r"^ln_out\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"^blocks\.", "model.layers."),
    (r"\.ln0\.", ".pre_norm."),
    (r"\.ln1\.", ".attn_norm."),
    (r"\.ln2\.", ".ffn_norm."),
    (r"\.att\.([wavg])0$", r".attn.\1_lora.lora.2.bias"),
    (r"\.att\.([wavg])1$", r".attn.\1_lora.lora.0.weight"),
    (r"\.att\.([wavg])2$", r".attn.\1_lora.lora.2.weight"),
    (r"\.att\.receptance\.", ".attn.r_proj."),
    (r"\.att\.key\.", ".attn.k_proj."),
    (r"\.att\.value\.", ".attn.v_proj."),
    (r"\.att\.output\.", ".attn.o_proj."),
    (r"\.att\.ln_x\.", ".attn.g_norm."),
    (r"\.att\.", ".attn."),
)

LAYOUTS = (
    TensorLayout("BlinkDL RWKV-6", 6),
    TensorLayout("BlinkDL RWKV-7", 7),
    TensorLayout("Hugging Face RWKV-6", 6, _HF6),
    TensorLayout("flash-linear-attention RWKV-7", 7, _FLA7, low_rank_turned=True),
)

# Tensors that checkpoints carry and no model reads: layer 0 has no earlier value to mix in.
UNREAD = re.compile(r"(blocks\.0\.att\.v[012]|layers\.0\.attn\.v_lora\.lora\.[02]\.(weight|bias))$")


def find_layout(names: Collection[str]) -> TensorLayout | None:
    """The layout of a checkpoint with tensors of these names; None if it is none of ours."""
    return next((layout for layout in LAYOUTS if layout.fits(names)), None)


def tensor_names(folder: Path) -> set[str]:
    """Names of a checkpoint's tensors, read without torch; empty if there is no checkpoint.

    Args:
        folder: of the checkpoint, or a `.pth` file.
    """
    names: set[str] = set()
    if folder.is_file():
        return _pickled_names(folder)
    for file in _files(folder, "*.safetensors"):
        names |= _safetensors_names(file)
    if not names:
        for file in _files(folder, "*.pth"):
            names |= _pickled_names(file)
    return names


def _files(folder: Path, pattern: str) -> list[Path]:
    """Regular files only: a device or a pipe has no end."""
    return [file for file in folder.glob(pattern) if file.is_file()]


def _safetensors_names(file: Path) -> set[str]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            return set(json.loads(stream.read(min(length, MAX_HEADER)))) - {"__metadata__"}
    except (OSError, ValueError, struct.error, TypeError, RecursionError):
        return set()


def _pickled_names(file: Path) -> set[str]:
    """Strings of a `.pth`, its tensors' names among them; the pickle is never executed."""
    try:
        with zipfile.ZipFile(file) as archive:
            entry = next(info for info in archive.infolist() if info.filename.endswith("/data.pkl"))
            if entry.file_size > MAX_PICKLE:
                return set()
            operations = pickletools.genops(archive.read(entry))
            return {argument for _, argument, _ in operations if isinstance(argument, str)}
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError, RuntimeError, NotImplementedError):
        return set()
