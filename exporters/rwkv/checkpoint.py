"""RWKV checkpoints: layout, sizes and constants."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporters.config_sizes import check_sizes
from exporters.rwkv.layouts import TensorLayout, find_layout
from mionnx.errors import ExportError, ModelError
from mionnx.graph.folder_file import inside, read_json

GROUP_NORM_EPS = 64e-5
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes from a checkpoint's tensors, and constants from its config if it has one.

    Attributes:
        rescale_every: after how many layers the stream is halved; 0 for never.
        norm_eps, group_norm_eps: of the layer norms and of the norm of the heads' outputs.
    """

    version: int
    num_layers: int
    num_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    rescale_every: int
    norm_eps: float
    group_norm_eps: float


def pth_file(folder: Path) -> Path | None:
    """The folder's `.pth`.

    Raises:
        ExportError: there are several, or it leads out of the folder.
    """
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
    """The checkpoint's `config.json`; empty where there is none.

    Raises:
        ExportError: it is damaged, or lies outside the folder.
    """
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


def layout_of(shapes: Mapping[str, tuple[int, ...]], folder: Path) -> TensorLayout:
    """The layout of a checkpoint.

    Raises:
        ExportError: it is none of ours.
    """
    layout = find_layout(shapes)
    if layout is None:
        raise ExportError(
            f"{folder} is neither RWKV-6 nor RWKV-7 in a layout that is known here; its tensors begin with "
            f"{', '.join(sorted(shapes)[:4])}"
        )
    return layout


def shape_of(shapes: Mapping[str, tuple[int, ...]], layout: TensorLayout, config: Mapping[str, Any]) -> Shape:
    """The sizes of a checkpoint.

    Raises:
        ExportError: a tensor is missing, the config contradicts the tensors, or asks for what no graph here does.
    """
    heads_name = layout.name("blocks.0.att." + ("time_faaaa" if layout.version == 6 else "r_k"))
    for name in (heads_name, layout.name("emb.weight")):
        if len(shapes.get(name, ())) != 2:
            raise ExportError(f"{layout.title}: the tensor {name} is missing, or has not two axes")
    num_heads, head_dim = shapes[heads_name]
    vocab_size, hidden_size = shapes[layout.name("emb.weight")]
    _check_config(config, num_heads * head_dim, hidden_size)
    num_layers = 0
    while layout.name(f"blocks.{num_layers}.ln1.weight") in shapes:
        num_layers += 1
    return Shape(
        layout.version,
        num_layers,
        num_heads,
        head_dim,
        hidden_size,
        vocab_size,
        rescale_every=int(config.get("rescale_every") or 0) if layout.version == 6 else 0,
        norm_eps=float(config.get("layer_norm_epsilon", config.get("norm_eps", LAYER_NORM_EPS))),
        group_norm_eps=_group_norm_eps(config, layout.version, head_dim),
    )


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
