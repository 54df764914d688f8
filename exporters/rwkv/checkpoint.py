"""RWKV checkpoints: the layouts in which they come, recognised by the names of their tensors; sizes and constants.

BlinkDL's own names are the canonical ones here; the other layouts are the same tensors under other names, some of them
transposed.
"""

import json
import os
import pickletools
import re
import struct
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporters.config_sizes import check_sizes
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import inside, read_json

GROUP_NORM_EPS = 64e-5
LAYER_NORM_EPS = 1e-5
MAX_HEADER = 100_000_000
MAX_PICKLE = 16_000_000
STATE_NUMBERS = ("numerator", "denominator", "exponent")  # of each channel of RWKV-4's state

# A tensor that only one version has.
_ONLY = {4: "blocks.0.att.time_first", 6: "blocks.0.att.time_maa_w1", 7: "blocks.0.att.r_k"}
_HEADS = {4: "time_first", 6: "time_faaaa", 7: "r_k"}  # [heads, head_dim], of RWKV-4 [channels]
# Low-rank factors and projections are read as x @ W; torch's Linear stores W turned.
_LINEAR = re.compile(r"(receptance|key|value|gate|output|head)\.weight$")
_LOW_RANK = re.compile(r"\.att\.[wavg][12]$")
# The order of RWKV-7's mixes where they are stored as one tensor, `attn.x_x`.
FUSED_MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")


@dataclass(frozen=True)
class TensorLayout:
    """One way to name the tensors of a checkpoint."""

    title: str
    version: int
    # (pattern, replacement), applied one after the other to a canonical name.
    renamings: tuple[tuple[str, str], ...] = ()
    low_rank_turned: bool = False  # whether low-rank factors are stored as torch's Linear stores them

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
_HF4 = (
    *_HF6,
    (r"\.time_mix_k$", ".time_mix_key"),
    (r"\.time_mix_v$", ".time_mix_value"),
    (r"\.time_mix_r$", ".time_mix_receptance"),
)
_FLA7 = (
    (r"^emb\.", "model.embeddings."),
    (r"^ln_out\.", "model.norm."),
    (r"^head\.", "lm_head."),
    (r"^blocks\.", "model.layers."),
    (r"\.ln0\.", ".pre_norm."),
    (r"\.ln1\.", ".attn_norm."),
    (r"\.ln2\.", ".ffn_norm."),
    # torch's Sequential(Linear, activation, Linear): 0 and 2 are its linear layers, the second one has the bias
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
    TensorLayout("BlinkDL RWKV-4", 4),
    TensorLayout("Hugging Face RWKV-4", 4, _HF4),
    TensorLayout("BlinkDL RWKV-6", 6),
    TensorLayout("BlinkDL RWKV-7", 7),
    TensorLayout("Hugging Face RWKV-6", 6, _HF6),
    TensorLayout("flash-linear-attention RWKV-7", 7, _FLA7, low_rank_turned=True),
)

# Tensors that checkpoints carry and no model reads: layer 0 has no earlier value to mix in.
UNREAD = re.compile(r"(blocks\.0\.att\.v[012]|layers\.0\.attn\.v_lora\.lora\.[02]\.(weight|bias))$")


@dataclass(frozen=True)
class Shape:
    """Sizes from a checkpoint's tensors, and constants from its config if it has one."""

    version: int
    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    rescale_every: int  # after how many layers the stream is halved; 0 for never
    # norm_eps, group_norm_eps: of the layer norms and of the norm of the heads' outputs.
    norm_eps: float
    group_norm_eps: float
    final_eps: float  # of the last layer norm
    key_dim: int  # size of a key of the state; of RWKV-4 the three numbers of a channel


def pth_file(folder: Path) -> Path | None:
    """The one `.pth` of a folder, if it has any."""
    files = sorted(folder.glob("*.pth"))
    if len(files) > 1:
        raise ExportError(
            f"{folder} holds {len(files)} .pth files ({', '.join(file.name for file in files[:3])} ...): "
            "give each a folder of its own"
        )
    try:
        return inside(folder, files[0].name) if files else None
    except ModelError as error:
        raise ExportError(str(error)) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's `config.json`; empty where there is none."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        return {}
    try:
        config = read_json(inside(folder, path.name))
    except ModelError as error:
        raise ExportError(str(error)) from error
    if not isinstance(config, dict):
        raise ExportError(f"{path} is damaged: it holds no table")
    check_sizes(config, path)
    return config


def find_layout(names: Collection[str]) -> TensorLayout | None:
    """The layout of a checkpoint with tensors of these names; None if it is none of ours."""
    return next((layout for layout in LAYOUTS if layout.fits(names)), None)


def tensor_names(folder: Path) -> set[str]:
    """Names of a checkpoint's tensors, of a folder or a `.pth`, read without torch; empty if there is no checkpoint."""
    if folder.is_file():
        return _pickled_names(folder)
    # Regular files only: a device or a pipe has no end.
    names = [_safetensors_names(file) for file in folder.glob("*.safetensors") if file.is_file()]
    if not any(names):
        pickles = [*folder.glob("*.pth"), *folder.glob("pytorch_model*.bin")]
        names = [_pickled_names(file) for file in pickles if file.is_file()]
    return set().union(*names)


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


def layout_of(shapes: Mapping[str, tuple[int, ...]], folder: Path) -> TensorLayout:
    """The layout of a checkpoint, which has to be one of ours."""
    layout = find_layout(shapes)
    if layout is None:
        raise ExportError(
            f"{folder} is none of RWKV-4, RWKV-6 and RWKV-7 in a layout that is known here; its tensors begin with "
            f"{', '.join(sorted(shapes)[:4])}"
        )
    return layout


def shape_of(shapes: Mapping[str, tuple[int, ...]], layout: TensorLayout, config: Mapping[str, Any]) -> Shape:
    """The sizes of a checkpoint, its config compared with its tensors."""
    version = layout.version
    heads_name = layout.name(f"blocks.0.att.{_HEADS[version]}")
    for name, axes in ((heads_name, 1 if version == 4 else 2), (layout.name("emb.weight"), 2)):
        if len(shapes.get(name, ())) != axes:
            raise ExportError(f"{layout.title}: the tensor {name} is missing, or has other axes than {axes}")
    num_heads, head_dim = (1, *shapes[heads_name])[-2:]  # the channels of RWKV-4 are one head
    vocab_size, hidden_size = shapes[layout.name("emb.weight")]
    _check_config(config, num_heads * head_dim, hidden_size)
    num_layers = 0
    while layout.name(f"blocks.{num_layers}.ln1.weight") in shapes:
        num_layers += 1
    norm_eps = float(config.get("layer_norm_epsilon", config.get("norm_eps", LAYER_NORM_EPS)))
    return Shape(
        version,
        num_layers,
        num_heads,
        head_dim,
        hidden_size,
        vocab_size,
        rescale_every=_rescale_every(config, version),
        norm_eps=norm_eps,
        group_norm_eps=_group_norm_eps(config, version, head_dim),
        final_eps=norm_eps if version == 7 else LAYER_NORM_EPS,  # Hugging Face gives the last norm torch's own
        key_dim=len(STATE_NUMBERS) if version == 4 else head_dim,
    )


def _rescale_every(config: Mapping[str, Any], version: int) -> int:
    """A setting of Hugging Face's RWKV-4 and 6, in RWKV-4 with transformers' default where a config leaves it out."""
    if version == 7 or not config:
        return 0
    return int(config.get("rescale_every", 6 if version == 4 else 0) or 0)


def _check_config(config: Mapping[str, Any], attention: int, hidden: int) -> None:
    for name, expected in (("hidden_size", hidden), ("attention_hidden_size", attention)):
        if config.get(name) not in (None, expected):
            raise ExportError(f"config.json says {name}={config[name]}, the tensors say {expected}")
    if config.get("attn"):
        raise ExportError("layers of softmax attention between the RWKV layers (config.json: attn) are not supported")
    if config.get("hidden_act", "sqrelu") != "sqrelu":
        raise ExportError(f"config.json says hidden_act={config['hidden_act']!r}; RWKV's channel mix has sqrelu")


def _group_norm_eps(config: Mapping[str, Any], version: int, head_dim: int) -> float:
    """RWKV-6: 1e-5 x head_size_divisor^2; RWKV-7 of fla: head_dim x norm_eps; default 64e-5."""
    if version == 6 and "head_size_divisor" in config:
        return 1e-5 * float(config["head_size_divisor"]) ** 2
    if version == 7 and "norm_eps" in config:
        return head_dim * float(config["norm_eps"])
    return GROUP_NORM_EPS
