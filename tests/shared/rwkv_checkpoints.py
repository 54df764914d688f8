"""Small random RWKV-4, RWKV-6 and RWKV-7 checkpoints, in every layout in which they come."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from exporters.rwkv.checkpoint import LAYOUTS as FOUND

VOCAB, HIDDEN, HEAD, LAYERS = 101, 128, 64, 2
LAYOUTS = ["4-pth", "4-hf", "6-pth", "6-hf", "7-pth", "7-fla", "7-fla-fused"]
Tensors = dict[str, Tensor]


class _Random:
    """Seeded tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * scale + mean

    def share(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)


def blinkdl(version: int, seed: int = 0, hidden: int = HIDDEN, layers: int = LAYERS, vocab: int = VOCAB) -> Tensors:
    """A checkpoint under BlinkDL's names."""
    random = _Random(seed)
    tensors = {
        "emb.weight": random.normal(vocab, hidden),
        "head.weight": random.normal(vocab, hidden, scale=hidden**-0.5),
    }

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = random.normal(hidden, scale=0.1, mean=1.0)
        tensors[f"{name}.bias"] = random.normal(hidden, scale=0.1)

    norm("blocks.0.ln0")
    norm("ln_out")
    for layer in range(layers):
        block = f"blocks.{layer}"
        for name in ("ln1", "ln2", "att.ln_x")[: 2 if version == 4 else 3]:
            norm(f"{block}.{name}")
        mix = {4: _time_mix4, 6: _time_mix6, 7: _time_mix7}[version]
        tensors |= {f"{block}.att.{name}": value for name, value in mix(random, hidden).items()}
        inner = int(hidden * 3.5) // 32 * 32 if version == 6 else hidden * 4
        tensors[f"{block}.ffn.key.weight"] = random.normal(inner, hidden, scale=hidden**-0.5)
        tensors[f"{block}.ffn.value.weight"] = random.normal(hidden, inner, scale=inner**-0.5)
        if version < 7:
            tensors[f"{block}.ffn.receptance.weight"] = random.normal(hidden, hidden, scale=hidden**-0.5)
        mixes = {4: ("time_mix_k", "time_mix_r"), 6: ("time_maa_k", "time_maa_r"), 7: ("x_k",)}
        for name in mixes[version]:
            tensors[f"{block}.ffn.{name}"] = random.share(1, 1, hidden)
    return tensors


def _projections(random: _Random, hidden: int, names: tuple[str, ...]) -> Tensors:
    return {f"{name}.weight": random.normal(hidden, hidden, scale=hidden**-0.5) for name in names}


def _time_mix4(random: _Random, hidden: int) -> Tensors:
    projections = _projections(random, hidden, ("receptance", "key", "value", "output"))
    return {
        **{f"time_mix_{which}": random.share(1, 1, hidden) for which in "kvr"},
        "time_decay": random.normal(hidden, scale=1.5, mean=-2.0),
        "time_first": random.normal(hidden, scale=0.5),
        **{name: value * 3 if name == "key.weight" else value for name, value in projections.items()},
    }


def _time_mix6(random: _Random, hidden: int) -> Tensors:
    small, large = (32, 64) if hidden < 4096 else (64, 128)
    return {
        **{f"time_maa_{which}": random.share(1, 1, hidden) for which in "xwkvrg"},
        "time_maa_w1": random.normal(hidden, 5 * small, scale=0.1),
        "time_maa_w2": random.normal(5, small, hidden, scale=0.1),
        "time_decay": random.normal(1, 1, hidden, scale=1.5, mean=-2.0),
        "time_decay_w1": random.normal(hidden, large, scale=0.1),
        "time_decay_w2": random.normal(large, hidden, scale=0.1),
        "time_faaaa": random.normal(hidden // HEAD, HEAD, scale=0.5),
        **_projections(random, hidden, ("receptance", "key", "value", "gate", "output")),
    }


def _time_mix7(random: _Random, hidden: int, rank: int = 32) -> Tensors:
    tensors = {f"x_{which}": random.share(1, 1, hidden) for which in "rwkvag"}
    for which in "wav":
        tensors[f"{which}0"] = random.normal(1, 1, hidden)
    for which in "wavg":
        tensors[f"{which}1"] = random.normal(hidden, rank, scale=0.1)
        tensors[f"{which}2"] = random.normal(rank, hidden, scale=0.2)
    tensors |= {name: random.normal(1, 1, hidden, scale=0.2, mean=1.0) for name in ("k_k", "k_a")}
    tensors["r_k"] = random.normal(hidden // HEAD, HEAD, scale=0.2)
    return tensors | _projections(random, hidden, ("receptance", "key", "value", "output"))


def to_hf6(tensors: Tensors) -> Tensors:
    """As RWKV/v6-Finch-*-HF names them, and transformers those of RWKV-4."""
    names = {"emb": "rwkv.embeddings", "ln_out": "rwkv.ln_out", "head": "head", "blocks": "rwkv.blocks"}
    parts = {"ln0": "pre_ln", "att": "attention", "ffn": "feed_forward"}
    renamed = {}
    for name, value in tensors.items():
        first, *rest = name.split(".")
        renamed[".".join([names[first], *(parts.get(part, part) for part in rest)])] = value
    mixes = {"time_mix_k": "time_mix_key", "time_mix_v": "time_mix_value", "time_mix_r": "time_mix_receptance"}
    ends = {name: name.rpartition(".")[2] for name in renamed}
    return {name.removesuffix(end) + mixes.get(end, end): renamed[name] for name, end in ends.items()}


def to_fla7(tensors: Tensors, fused: bool = False) -> Tensors:
    """As flash-linear-attention names and turns them."""
    ends = {"emb.weight": "model.embeddings.weight", "head.weight": "lm_head.weight"}
    parts = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
    attention = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj", "ln_x": "g_norm"}
    renamed = {}
    for name, value in tensors.items():
        if not name.startswith("blocks"):
            renamed[ends.get(name, name.replace("ln_out", "model.norm"))] = value
            continue
        _, layer, part, *rest = name.split(".")
        where, last = f"model.layers.{layer}", rest[0]
        if part == "att" and (low := re.fullmatch(r"([wavg])([012])", last)):
            if layer == "0" and low[1] == "v":
                continue
            end = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[low[2]]
            stored = value.reshape(-1) if low[2] == "0" else value.T
            renamed[f"{where}.attn.{low[1]}_lora.lora.{end}"] = stored
        elif part == "att":
            stored = value.reshape(-1) if last in ("k_k", "k_a") else value
            renamed[".".join([where, "attn", attention.get(last, last), *rest[1:]])] = stored
        elif part == "ffn":
            renamed[".".join([where, "ffn", *rest])] = value.reshape(-1) if last == "x_k" else value
        else:
            renamed[".".join([where, parts[part], *rest])] = value
    return _fused(renamed) if fused else renamed


def _fused(tensors: Tensors) -> Tensors:
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers")}
    for layer in layers:
        mixes = [tensors.pop(f"model.layers.{layer}.attn.x_{which}").reshape(-1) for which in "rwkvag"]
        tensors[f"model.layers.{layer}.attn.x_x"] = torch.stack(mixes)
    return tensors


def write(layout: str, folder: Path, tensors: Tensors | None = None, **config: object) -> Tensors:
    """Write a checkpoint folder; returns its tensors under BlinkDL's names."""
    version = int(layout[0])
    tensors = blinkdl(version) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    if layout.endswith("pth"):
        torch.save(tensors, folder / "model.pth")
        return tensors
    stored = to_hf6(tensors) if layout.endswith("hf") else to_fla7(tensors, fused=layout.endswith("fused"))
    save_file({name: value.contiguous() for name, value in stored.items()}, folder / "model.safetensors")
    known = {"model_type": "rwkv" if version == 4 else f"rwkv{version}", "hidden_size": tensors["emb.weight"].shape[1]}
    if version == 4:
        inner = tensors["blocks.0.ffn.key.weight"].shape[0]
        known |= {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "intermediate_size": inner}
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return tensors


def to_blinkdl(stored: Tensors) -> Tensors:
    """A checkpoint in flash-linear-attention's layout under BlinkDL's names; what layer 0 lacks is zeros."""
    layout = next(layout for layout in FOUND if layout.low_rank_turned)
    wanted = blinkdl(7, hidden=stored["lm_head.weight"].shape[1], layers=sum(".ffn.x_k" in name for name in stored))
    tensors = {}
    for name, like in wanted.items():
        value = stored.get(layout.name(name))
        if value is None:
            tensors[name] = torch.zeros_like(like)
        else:
            turned = layout.turned(name) and name.endswith(("1", "2"))
            tensors[name] = (value.T if turned else value.reshape(1, 1, -1) if like.dim() == 3 else value).contiguous()
    return tensors


def run_package(
    version: int, tensors: Tensors, texts: dict[str, np.ndarray], folder: Path, new: int = 0
) -> dict[str, np.ndarray]:
    """What the `rwkv` package gives: `{text}.logits` [seq, vocab], `{text}.state.{n}`, `{text}.greedy` [new]."""
    write(f"{version}-pth", folder, tensors)
    np.savez(folder / "tokens.npz", **texts)
    files = [str(folder / name) for name in ("model.pth", "tokens.npz", "out.npz")]
    environment = {**os.environ, "RWKV_V7_ON": str(int(version == 7)), "RWKV_CUDA_ON": "0"}
    script = str(Path(__file__).with_name("rwkv_reference.py"))
    subprocess.run([sys.executable, script, *files, str(new)], check=True, env=environment, capture_output=True)
    return dict(np.load(folder / "out.npz"))
