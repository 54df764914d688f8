"""Small decoders (gpt2, gpt_neox, llama and its kin) in float64, one whole text at a time, every hook point by name.

Written from the papers and from the checkpoint's own names: no padding, no cache, no batch, and nothing shared with the
exporter or with transformers. `see(name, value)` is handed each value without its batch axis, and gives back what the
rest of the pass reads.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min  # what masked scores are
See = Callable[[str, Tensor], Tensor]


@dataclass
class Decoder:
    """A checkpoint: its config, and its tensors in float64."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, folder: Path) -> "Decoder":
        stored = load_file(folder / "model.safetensors")
        return cls(json.loads((folder / "config.json").read_text()), {k: v.double() for k, v in stored.items()})

    @property
    def family(self) -> str:
        return self.config["model_type"]

    @property
    def layers(self) -> int:
        if self.family == "nemotron_h":
            return len(self.config["layers_block_type"])
        return self.config["n_layer" if self.family == "gpt2" else "num_hidden_layers"]

    def run(self, ids: list[int], see: See, keys: Sequence[int] = ()) -> Tensor:
        """Logits [seq, vocab].

        Args:
            keys: how many keys each query reads; all if left out. Values behind them are not read: NaN times 0 is NaN.
        """
        self.keys = [*keys] or [len(ids)] * len(ids)
        with torch.no_grad():
            return {"gpt2": self._gpt2, "gpt_neox": self._gpt_neox}.get(self.family, self._llama)(ids, see)

    def _gpt2(self, ids: list[int], see: See) -> Tensor:
        z, heads = self.tensors, self.config["n_head"]
        x = see("hook_embed", z["transformer.wte.weight"][ids])
        x = x + see("hook_pos_embed", z["transformer.wpe.weight"][: len(ids)])
        for i in range(self.layers):
            at, block = f"transformer.h.{i}", f"blocks.{i}"
            x = see(f"{block}.hook_resid_pre", x)
            fused = self._layer_norm(x, f"{at}.ln_1") @ z[f"{at}.attn.c_attn.weight"] + z[f"{at}.attn.c_attn.bias"]
            parts = dict(zip("qkv", fused.chunk(3, dim=-1), strict=True))
            k, v, q = (
                see(f"{block}.attn.hook_{name}", parts[name].reshape(len(ids), heads, -1).transpose(0, 1))
                for name in "kvq"
            )
            mixed = self._attend(i, q, k, v, see)
            out = z[f"{at}.attn.c_proj.weight"].reshape(*mixed.shape[1:], -1)
            shares = _shares(block, mixed, out, see)
            x = x + see(f"{block}.hook_attn_out", shares.sum(1) + z[f"{at}.attn.c_proj.bias"])
            x = see(f"{block}.hook_resid_mid", x)
            inner = see(f"{block}.mlp.hook_pre", self._layer_norm(x, f"{at}.ln_2"))
            up = see(f"{block}.mlp.hook_up", inner @ z[f"{at}.mlp.c_fc.weight"] + z[f"{at}.mlp.c_fc.bias"])
            neurons = see(f"{block}.mlp.hook_act", _gelu_of_tanh(up))
            post = neurons @ z[f"{at}.mlp.c_proj.weight"] + z[f"{at}.mlp.c_proj.bias"]
            x = x + see(f"{block}.hook_mlp_out", see(f"{block}.mlp.hook_post", post))
            x = see(f"{block}.hook_resid_post", x)
        x = see("hook_final_norm", self._layer_norm(x, "transformer.ln_f"))
        return see("hook_logits", x @ z["transformer.wte.weight"].T)

    def _gpt_neox(self, ids: list[int], see: See) -> Tensor:
        z, heads = self.tensors, self.config["num_attention_heads"]
        x = see("hook_embed", z["gpt_neox.embed_in.weight"][ids])
        for i in range(self.layers):
            at, block = f"gpt_neox.layers.{i}", f"blocks.{i}"
            x = see(f"{block}.hook_resid_pre", x)
            fused = self._linear(self._layer_norm(x, f"{at}.input_layernorm"), f"{at}.attention.query_key_value")
            q, k, v = fused.reshape(len(ids), heads, 3, -1).permute(2, 1, 0, 3)
            mixed = self._attend(i, *self._seen_heads(block, q, k, v, see), see)
            out = z[f"{at}.attention.dense.weight"].T.reshape(*mixed.shape[1:], -1)
            shares = _shares(block, mixed, out, see)
            attended = see(f"{block}.hook_attn_out", shares.sum(1) + z[f"{at}.attention.dense.bias"])
            inner = see(f"{block}.mlp.hook_pre", self._layer_norm(x, f"{at}.post_attention_layernorm"))
            up = see(f"{block}.mlp.hook_up", self._linear(inner, f"{at}.mlp.dense_h_to_4h"))
            neurons = see(f"{block}.mlp.hook_act", 0.5 * up * (1 + torch.erf(up / math.sqrt(2))))
            post = see(f"{block}.mlp.hook_post", self._linear(neurons, f"{at}.mlp.dense_4h_to_h"))
            x = see(f"{block}.hook_resid_post", see(f"{block}.hook_mlp_out", post) + attended + x)
        x = see("hook_final_norm", self._layer_norm(x, "gpt_neox.final_layer_norm"))
        return see("hook_logits", x @ z["embed_out.weight"].T)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.tensors.get(f"{name}.bias")
        product = x @ self.tensors[f"{name}.weight"].T
        return product if bias is None else product + bias

    def _llama(self, ids: list[int], see: See) -> Tensor:
        z, config, gemma = self.tensors, self.config, self.family == "gemma2"
        norm, first, last = self._rms_norm, self.family != "olmo2", self.family in ("gemma2", "olmo2")
        x = see("hook_embed", z["model.embed_tokens.weight"][ids] * (config["hidden_size"] ** 0.5 if gemma else 1))
        for i in range(self.layers):
            at, block = f"model.layers.{i}", f"blocks.{i}"
            x = see(f"{block}.hook_resid_pre", x)
            shares = self._mixed(i, norm(x, f"{at}.input_layernorm") if first else x, see)
            out = shares.sum(1)
            x = x + see(f"{block}.hook_attn_out", norm(out, f"{at}.post_attention_layernorm") if last else out)
            x = see(f"{block}.hook_resid_mid", x)
            before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
            inner = see(f"{block}.mlp.hook_pre", norm(x, f"{at}.{before}") if first else x)
            names = ("gate", "up")
            if self.family == "phi3":
                parts = self._linear(inner, f"{at}.mlp.gate_up_proj").chunk(2, dim=-1)
            else:
                parts = tuple(self._linear(inner, f"{at}.mlp.{name}_proj") for name in names)
            gate, up = (see(f"{block}.mlp.hook_{name}", part) for name, part in zip(names, parts, strict=True))
            gate = _gelu_of_tanh(gate) if gemma else gate * torch.sigmoid(gate)
            neurons = see(f"{block}.mlp.hook_act", gate * up)
            out = see(f"{block}.mlp.hook_post", self._linear(neurons, f"{at}.mlp.down_proj"))
            x = x + see(f"{block}.hook_mlp_out", norm(out, f"{at}.post_feedforward_layernorm") if last else out)
            x = see(f"{block}.hook_resid_post", x)
        x = see("hook_final_norm", norm(x, "model.norm"))
        return see("hook_logits", _capped(x @ self._head.T, config.get("final_logit_softcapping")))

    @property
    def _head(self) -> Tensor:
        return self.tensors.get("lm_head.weight", self.tensors["model.embed_tokens.weight"])

    def _mixed(self, i: int, x: Tensor, see: See) -> Tensor:
        """[seq, n_heads, hidden]: what each head gives, before a norm that may follow."""
        z, at, block = self.tensors, f"model.layers.{i}.self_attn", f"blocks.{i}"
        heads = self.config["num_attention_heads"]
        width = self.config.get("head_dim") or self.config["hidden_size"] // heads
        if self.family == "phi3":
            groups = self.config["num_key_value_heads"]
            parts = self._linear(x, f"{at}.qkv_proj").split([heads * width, groups * width, groups * width], dim=-1)
        else:
            parts = tuple(self._linear(x, f"{at}.{name}_proj") for name in "qkv")
        if self.family == "olmo2":
            parts = self._rms_norm(parts[0], f"{at}.q_norm"), self._rms_norm(parts[1], f"{at}.k_norm"), parts[2]
        q, k, v = (part.reshape(len(x), -1, width).transpose(0, 1) for part in parts)
        if self.family == "qwen3":
            q, k = self._rms_norm(q, f"{at}.q_norm"), self._rms_norm(k, f"{at}.k_norm")
        mixed = self._attend(i, *self._seen_heads(block, q, k, v, see), see)
        out = z[f"{at}.o_proj.weight"].T.reshape(*mixed.shape[1:], -1)
        return _shares(block, mixed, out, see)

    def _seen_heads(self, block: str, q: Tensor, k: Tensor, v: Tensor, see: See) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values."""
        q, k = (see(f"{block}.attn.hook_{name}", part) for name, part in (("q", q), ("k", k)))
        q, k = (see(f"{block}.attn.hook_rot_{name}", self._rotated(part)) for name, part in (("q", q), ("k", k)))
        return q, k, see(f"{block}.attn.hook_v", v)

    def _attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, see: See) -> Tensor:
        """[seq, n_heads, head_dim]: the heads' outputs before the output projection."""
        block, seq = f"blocks.{i}.attn", q.shape[1]
        k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
        scale = self.config.get("query_pre_attn_scalar") or q.shape[-1]
        scores = _capped(q @ k.transpose(1, 2) / math.sqrt(scale), self.config.get("attn_logit_softcapping"))
        scores = see(f"{block}.hook_scores", torch.where(self._read(i, seq), scores, LOWEST))
        pattern = see(f"{block}.hook_pattern", torch.softmax(scores, dim=-1))
        z = torch.stack(
            [pattern[:, query, :stop, None].mul(v[:, :stop]).sum(-2) for query, stop in enumerate(self.keys)]
        )
        return see(f"{block}.hook_z", z)

    def _read(self, i: int, seq: int) -> Tensor:
        """[queries, keys] bool: the keys that a query reads."""
        behind = torch.arange(seq)[:, None] - torch.arange(seq)[None, :]
        sliding = self.family == "gemma2" and self.config["layer_types"][i] == "sliding_attention"
        window = self.config["sliding_window"] if sliding or self.family == "mistral" else seq
        return (behind >= 0) & (behind < window)

    @property
    def _speed(self) -> float:
        return (self.config.get("rope_parameters") or self.config)["rope_theta"]

    def _rotated(self, x: Tensor) -> Tensor:
        rope = self.config.get("rope_parameters") or self.config
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1))
        half = width // 2
        speeds = self._speed ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1])[:, None] * speeds
        cos, sin, left, right = angles.cos(), angles.sin(), x[..., :half], x[..., half:width]
        return torch.cat([left * cos - right * sin, right * cos + left * sin, x[..., width:]], dim=-1)

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x**2).mean(-1, keepdim=True) + self._epsilon)
        return x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    @property
    def _epsilon(self) -> float:
        return self.config["layer_norm_epsilon" if self.family == "gpt2" else "layer_norm_eps"]

    def _rms_norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.tensors[f"{name}.weight"] + (1 if self.family == "gemma2" else 0)
        return gain * x / torch.sqrt((x**2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])


def _shares(block: str, z: Tensor, out: Tensor, see: See) -> Tensor:
    """[seq, n_heads, hidden]: what each head gives."""
    return see(f"{block}.attn.hook_result", torch.einsum("shd,hdm->shm", z, out))


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _gelu_of_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
