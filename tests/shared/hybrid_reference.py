"""Small hybrids (mamba2, qwen3_5_text, lfm2) in float64, one whole text at a time, every hook point by name.

As `decoder_reference.py`, whose attention and norms it has: written from the papers and the checkpoint's own names. A
recurrence goes token by token; its state is handed out where a call or a step ends, and may come back changed.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from decoder_reference import Decoder, See, _shares
from rwkv_loop import Gates
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

Ended = Callable[[str, Tensor, int], Tensor]  # (hook point, state, length of the text) -> the state to go on with
FORGOTTEN = -1e4  # least log of a decay


class Hybrid(Decoder):
    """A checkpoint with recurrent mixers."""

    def text(
        self, ids: list[int], see: See, keys: Sequence[int], gates: Gates, stops: Collection[int], ended: Ended
    ) -> Tensor:
        """Logits [seq, vocab]; `gates` are of all tokens, `stops` the lengths at which calls and steps end."""
        self.keys, self.gates, self.stops, self.ended = [*keys], gates, stops, ended
        layer = {"mamba2": self._mamba2, "qwen3_5_text": self._qwen, "lfm2": self._lfm2}[self.family]
        final = {"mamba2": "backbone.norm_f", "qwen3_5_text": "model.norm", "lfm2": "model.embedding_norm"}
        with torch.no_grad():
            x = see("hook_embed", self._embeddings[ids])
            for i in range(self.layers):
                x = see(f"blocks.{i}.hook_resid_post", layer(i, see(f"blocks.{i}.hook_resid_pre", x), see))
            x = see("hook_final_norm", self._rms_norm(x, final[self.family]))
            return see("hook_logits", x @ self.tensors.get("lm_head.weight", self._embeddings).T)

    @property
    def _embeddings(self) -> Tensor:
        return self.tensors["backbone.embeddings.weight" if self.family == "mamba2" else "model.embed_tokens.weight"]

    def _mamba2(self, i: int, x: Tensor, see: See) -> Tensor:
        z, at, where = self.tensors, f"backbone.layers.{i}.mixer", f"blocks.{i}.ssm"
        heads, groups, size = (self.config[name] for name in ("num_heads", "n_groups", "state_size"))
        inner = self._linear(see(f"{where}.hook_pre", self._rms_norm(x, f"backbone.layers.{i}.norm")), f"{at}.in_proj")
        width = heads * self.config["head_dim"]
        gate, mixed, dt = inner.split([width, width + 2 * groups * size, heads], -1)
        mixed = see(f"{where}.hook_conv", silu(self._convolved(i, mixed, f"{at}.conv1d")))
        value, k, q = mixed.split([width, groups * size, groups * size], -1)
        dt = see(f"{where}.hook_dt", softplus(dt + z[f"{at}.dt_bias"]))
        q, k = (one.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for one in (q, k))
        value = value.unflatten(-1, (heads, -1))
        decay = (-z[f"{at}.A_log"].exp() * dt)[..., None]
        y = self._recurrence(i, see, q, k, value * dt[..., None], decay)
        y = (y + z[f"{at}.D"][:, None] * value).flatten(1) * silu(gate)
        y = y.unflatten(-1, (groups, -1))
        y = y / torch.sqrt((y**2).mean(-1, keepdim=True) + self._epsilon)
        y = see(f"{where}.hook_z", (y.flatten(1) * z[f"{at}.norm.weight"]).unflatten(-1, (heads, -1)))
        return x + see(f"blocks.{i}.hook_attn_out", self._linear(y.flatten(1), f"{at}.out_proj"))

    def _qwen(self, i: int, x: Tensor, see: See) -> Tensor:
        at = f"model.layers.{i}"
        mix = self._delta_net if self.config["layer_types"][i] == "linear_attention" else self._gated_attention
        x = see(f"blocks.{i}.hook_resid_mid", x + mix(i, self._rms_norm(x, f"{at}.input_layernorm"), see))
        inner = self._rms_norm(x, f"{at}.post_attention_layernorm")
        return x + self._neurons(i, inner, [f"{at}.mlp.{name}_proj" for name in ("gate", "up", "down")], see)

    def _delta_net(self, i: int, x: Tensor, see: See) -> Tensor:
        z, at, where = self.tensors, f"model.layers.{i}.linear_attn", f"blocks.{i}.ssm"
        pairs, heads = self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        x = see(f"{where}.hook_pre", x)
        mixed = see(
            f"{where}.hook_conv", silu(self._convolved(i, self._linear(x, f"{at}.in_proj_qkv"), f"{at}.conv1d"))
        )
        keys = pairs * self.config["linear_key_head_dim"]
        parts = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], -1)
        q, k = (one.unflatten(-1, (pairs, -1)) for one in parts[:2])
        q, k = (one / torch.sqrt((one**2).sum(-1, keepdim=True) + 1e-6) for one in (q, k))
        q, k = (one.repeat_interleave(heads // pairs, 1) for one in (q / q.shape[-1] ** 0.5, k))
        strength = torch.sigmoid(self._linear(x, f"{at}.in_proj_b"))[..., None]
        decay = -z[f"{at}.A_log"].exp() * softplus(self._linear(x, f"{at}.in_proj_a") + z[f"{at}.dt_bias"])
        y = self._recurrence(i, see, q, k, parts[2].unflatten(-1, (heads, -1)), decay[..., None], strength)
        y = z[f"{at}.norm.weight"] * y / torch.sqrt((y**2).mean(-1, keepdim=True) + self._epsilon)
        y = see(f"{where}.hook_z", y * silu(self._linear(x, f"{at}.in_proj_z").unflatten(-1, (heads, -1))))
        return see(f"blocks.{i}.hook_attn_out", self._linear(y.flatten(1), f"{at}.out_proj"))

    def _gated_attention(self, i: int, x: Tensor, see: See) -> Tensor:
        at, heads = f"model.layers.{i}.self_attn", self.config["num_attention_heads"]
        q, gate = self._linear(x, f"{at}.q_proj").unflatten(-1, (heads, -1)).chunk(2, -1)
        k, v = (self._linear(x, f"{at}.{name}_proj").unflatten(-1, (-1, q.shape[-1])) for name in "kv")
        q, k = self._rms_norm(q, f"{at}.q_norm"), self._rms_norm(k, f"{at}.k_norm")
        return self._mixed_heads(i, (q, k, v), f"{at}.o_proj", see, torch.sigmoid(gate))

    def _lfm2(self, i: int, x: Tensor, see: See) -> Tensor:
        at = f"model.layers.{i}"
        inner = self._rms_norm(x, f"{at}.operator_norm")
        mix = self._convolution if self.config["layer_types"][i] == "conv" else self._attention
        x = see(f"blocks.{i}.hook_resid_mid", x + mix(i, inner, see))
        names = [f"{at}.feed_forward.{name}" for name in ("w1", "w3", "w2")]
        return x + self._neurons(i, self._rms_norm(x, f"{at}.ffn_norm"), names, see)

    def _convolution(self, i: int, x: Tensor, see: See) -> Tensor:
        at, where = f"model.layers.{i}.conv", f"blocks.{i}.ssm"
        before, behind, value = self._linear(see(f"{where}.hook_pre", x), f"{at}.in_proj").chunk(3, -1)
        mixed = see(f"{where}.hook_conv", self._convolved(i, before * value, f"{at}.conv"))
        mixed = see(f"{where}.hook_z", (behind * mixed)[:, None])
        return see(f"blocks.{i}.hook_attn_out", self._linear(mixed[:, 0], f"{at}.out_proj"))

    def _attention(self, i: int, x: Tensor, see: See) -> Tensor:
        at, heads = f"model.layers.{i}.self_attn", self.config["num_attention_heads"]
        size = self.tensors[f"{at}.q_layernorm.weight"].shape[0]
        q, k, v = (self._linear(x, f"{at}.{name}_proj").unflatten(-1, (-1, size)) for name in "qkv")
        assert q.shape[1] == heads
        q, k = self._rms_norm(q, f"{at}.q_layernorm"), self._rms_norm(k, f"{at}.k_layernorm")
        return self._mixed_heads(i, (q, k, v), f"{at}.out_proj", see)

    def _mixed_heads(self, i: int, parts: tuple[Tensor, ...], out: str, see: See, gate: Tensor | None = None) -> Tensor:
        """Attention of queries, keys and values [seq, heads, size], gated or not: [seq, hidden]."""
        block = f"blocks.{i}"
        q, k, v = self._seen_heads(block, *(one.transpose(0, 1) for one in parts), see)
        # behind a gate z is what the projection reads
        seen = see if gate is None else lambda name, value: value if name.endswith("hook_z") else see(name, value)
        mixed = self._attend(i, q, k, v, seen)
        mixed = mixed if gate is None else see(f"{block}.attn.hook_z", mixed * gate)
        weight = self.tensors[f"{out}.weight"].T.reshape(*mixed.shape[1:], -1)
        return see(f"{block}.hook_attn_out", _shares(block, mixed, weight, see).sum(1))

    def _neurons(self, i: int, x: Tensor, names: Sequence[str], see: See) -> Tensor:
        block = f"blocks.{i}"
        x = see(f"{block}.mlp.hook_pre", x)
        gate, up = (
            see(f"{block}.mlp.hook_{what}", self._linear(x, name))
            for what, name in zip(("gate", "up"), names, strict=False)
        )
        post = self._linear(see(f"{block}.mlp.hook_act", silu(gate) * up), names[2])
        return see(f"{block}.hook_mlp_out", see(f"{block}.mlp.hook_post", post))

    def _convolved(self, i: int, x: Tensor, name: str) -> Tensor:
        """[seq, channels]: each channel by itself, and what it sees before it."""
        kernel = self.tensors[f"{name}.weight"][:, 0]
        width, columns = kernel.shape[1], pad(x, (0, 0, 0, 1))  # nothing stands behind the last
        read = []
        for t in range(len(x)):
            seen = [s for s in range(t) if self.gates.convolution[i, s]]
            read.append([*[len(x)] * width, *seen, t][-width:])
        mixed = (columns[torch.tensor(read)] * kernel.T).sum(1)
        return mixed + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else mixed

    def _recurrence(
        self, i: int, see: See, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor | None = None
    ) -> Tensor:
        """y [seq, heads, value]; q, k are [seq, heads, key], log decays and strengths [seq, heads, 1]."""
        where = f"blocks.{i}.ssm"
        q, k, v = (see(f"{where}.hook_{name}", one) for name, one in zip("qkv", (q, k, v), strict=True))
        strength = None if strength is None else see(f"{where}.hook_write", strength)
        decay = see(f"{where}.hook_log_decay", decay).clamp(FORGOTTEN, 0)
        write, erase = (torch.from_numpy(one[i])[..., None] for one in (self.gates.write, self.gates.erase))
        state, ys, states = torch.zeros(*k.shape[1:], v.shape[-1], dtype=v.dtype), [], []
        for t in range(len(v)):
            state = state * decay[t].exp()[..., None] if self.gates.decay[i, t] else state
            written = write[t] * v[t]
            if strength is not None:
                written = strength[t] * (written - erase[t] * torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][:, :, None] * written[:, None]
            states.append(state)
            ys.append(torch.einsum("hk,hkv->hv", q[t], state))
            if t + 1 in self.stops:
                state = self.ended(f"{where}.hook_state", state, t + 1)
        see(f"{where}.hook_states", torch.stack(states))
        return see(f"{where}.hook_y", torch.stack(ys))

    @property
    def _epsilon(self) -> float:
        return self.config[{"mamba2": "layer_norm_epsilon", "lfm2": "norm_eps"}.get(self.family, "rms_norm_eps")]

    def _rms_norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.tensors[f"{name}.weight"] + (self.family == "qwen3_5_text")
        return gain * x / torch.sqrt((x**2).mean(-1, keepdim=True) + self._epsilon)
