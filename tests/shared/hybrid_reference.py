"""Small hybrids in float64, one whole text at a time, every hook point by name.

Mamba, Mamba-2, Bamba, Falcon-H1, Nemotron-H, Zamba, Zamba2, MiniMax, Qwen3.5's text model, LFM2 and RecurrentGemma.

As `decoder_reference.py`, whose attention and norms it has: written from the papers and the checkpoint's own names. A
recurrence goes token by token; its state is handed out where a call or a step ends, and may come back changed.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from decoder_reference import Decoder, See, _capped, _gelu_of_tanh, _shares
from rwkv_loop import Gates
from torch import Tensor
from torch.nn.functional import gelu, pad, silu, softplus

Ended = Callable[[str, Tensor, int], Tensor]  # (hook point, state, length of the text) -> the state to go on with
FORGOTTEN = -1e4  # least log of a decay
TINY = torch.finfo(torch.float32).tiny


class Hybrid(Decoder):
    """A checkpoint with recurrent mixers."""

    def text(
        self,
        ids: list[int],
        see: See,
        keys: Sequence[int],
        gates: Gates,
        steps: Sequence[tuple[int, int]],
        ended: Ended,
        hidden: Tensor,
        weighed: Collection[int] = (),
    ) -> Tensor:
        """Logits [seq, vocab].

        Args:
            gates: of all tokens.
            steps: where calls and the steps of generations begin and end.
            hidden: [queries, keys] bool, the keys that are hidden from a query besides those that come after it.
            weighed: layers whose effective attention is worked out.
        """
        self.keys, self.gates, self.steps, self.ended, self.hidden = [*keys], gates, steps, ended, hidden
        self.weighed = weighed
        layer = {
            "mamba": self._mamba,
            "mamba2": self._mamba,
            "nemotron_h": self._one_half,
            "bamba": self._bamba,
            "falcon_h1": self._side_by_side,
            "minimax": self._minimax,
            **dict.fromkeys(("zamba", "zamba2"), self._zamba),
            "qwen3_5_text": self._qwen,
            "lfm2": self._lfm2,
            "recurrent_gemma": self._griffin,
        }[self.family]
        final = {
            **dict.fromkeys(("bamba", "falcon_h1", "zamba", "zamba2"), "final_layernorm"),
            "lfm2": "embedding_norm",
            "recurrent_gemma": "final_norm",
        }
        with torch.no_grad():
            x = self.embedded = see("hook_embed", self._embeddings[ids] * self._scale)
            for i in range(self.layers):
                x = see(f"blocks.{i}.hook_resid_post", layer(i, see(f"blocks.{i}.hook_resid_pre", x), see))
            norm = "backbone.norm_f" if self._alone else f"model.{final.get(self.family, 'norm')}"
            x = see("hook_final_norm", self._rms_norm(x, norm))
            logits = x @ self.tensors.get("lm_head.weight", self._embeddings).T
            logits = self.config.get("lm_head_multiplier", 1) * logits
            return see("hook_logits", _capped(logits, self.config.get("logits_soft_cap")))

    @property
    def _alone(self) -> bool:
        """Whether a layer is one half of another's."""
        return self.family in ("mamba", "mamba2", "nemotron_h")

    @property
    def _embeddings(self) -> Tensor:
        return self.tensors["backbone.embeddings.weight" if self._alone else "model.embed_tokens.weight"]

    @property
    def _scale(self) -> float:
        """The factor of embeddings: the checkpoint's code rounds it to bfloat16."""
        size = self.config["hidden_size"] ** 0.5
        if self.family == "recurrent_gemma":
            return float(torch.tensor(size, dtype=torch.bfloat16))
        return float(self.config.get("embedding_multiplier", 1))

    def _mamba(self, i: int, x: Tensor, see: See) -> Tensor:
        at = f"backbone.layers.{i}"
        mix = self._selective_scan if self.family == "mamba" else self._state_space
        return x + mix(i, self._rms_norm(x, f"{at}.norm"), f"{at}.mixer", see)

    def _one_half(self, i: int, x: Tensor, see: See) -> Tensor:
        """A mixer, attention without positions, an MLP, or experts."""
        at, kind = f"backbone.layers.{i}.mixer", self.config["layers_block_type"][i]
        inner = self._rms_norm(x, f"backbone.layers.{i}.norm")
        if kind == "linear_attention":
            return x + self._state_space(i, inner, at, see)
        if kind == "full_attention":
            q, k, v = (
                self._linear(inner, f"{at}.{name}_proj").unflatten(-1, (-1, self.config["head_dim"])) for name in "qkv"
            )
            return x + self._mixed_heads(i, (q, k, v), f"{at}.o_proj", see)
        where = f"blocks.{i}.mlp"
        inner = see(f"{where}.hook_pre", inner)
        added = self._squared(inner, at if kind == "mlp" else f"{at}.shared_experts", where, see)
        added = added if kind == "mlp" else added + self._scored_experts(inner, at, where, see)
        return x + see(f"blocks.{i}.hook_mlp_out", see(f"{where}.hook_post", added))

    def _squared(self, x: Tensor, at: str, where: str, see: See) -> Tensor:
        """An MLP whose neurons are squares of what is above 0."""
        up = see(f"{where}.hook_up", self._linear(x, f"{at}.up_proj"))
        return self._linear(see(f"{where}.hook_act", up.clamp(min=0) ** 2), f"{at}.down_proj")

    def _scored_experts(self, x: Tensor, at: str, where: str, see: See) -> Tensor:
        """The experts that each token chooses, by scores of their own, weighed by their share in these."""
        logits = see(f"{where}.hook_router_logits", self._linear(x, f"{at}.gate"))
        scores = torch.sigmoid(logits)
        chosen = (scores + self.tensors[f"{at}.gate.e_score_correction_bias"]).topk(self.config["num_experts_per_tok"])
        chosen = see(f"{where}.hook_expert_indices", chosen.indices).long()
        weights = scores.gather(-1, chosen)
        weights = self.config["routed_scaling_factor"] * weights / weights.sum(-1, keepdim=True)
        weights = see(f"{where}.hook_expert_weights", weights)
        up = see(
            f"{where}.hook_expert_up", self._products(x[:, None].expand(-1, chosen.shape[1], -1), chosen, at, "up_proj")
        )
        act = see(f"{where}.hook_expert_act", up.clamp(min=0) ** 2)
        out = self._products(act, chosen, at, "down_proj")
        return see(f"{where}.hook_expert_out", weights[..., None] * out).sum(1)

    def _products(self, x: Tensor, chosen: Tensor, at: str, name: str) -> Tensor:
        """[seq, chosen, ...] by the matrix of each chosen expert."""
        count = 1 + max(int(one.split(".experts.")[1].split(".")[0]) for one in self.tensors if f"{at}.experts." in one)
        matrices = torch.stack([self.tensors[f"{at}.experts.{one}.{name}.weight"] for one in range(count)])
        return torch.einsum("tci,tcoi->tco", x, matrices[chosen])

    def _bamba(self, i: int, x: Tensor, see: See) -> Tensor:
        at = f"model.layers.{i}"
        inner = self._rms_norm(x, f"{at}.input_layernorm")
        if i in self.config["attn_layer_indices"]:
            size = self.config["hidden_size"] // self.config["num_attention_heads"]
            q, k, v = (self._linear(inner, f"{at}.self_attn.{name}_proj").unflatten(-1, (-1, size)) for name in "qkv")
            mixed = self._mixed_heads(i, (q, k, v), f"{at}.self_attn.o_proj", see)
        else:
            mixed = self._state_space(i, inner, f"{at}.mamba", see)
        x = see(f"blocks.{i}.hook_resid_mid", x + mixed)
        names = [f"{at}.feed_forward.{name}_proj" for name in ("gate", "up", "down")]
        return x + self._neurons(i, self._rms_norm(x, f"{at}.pre_ff_layernorm"), names, see)

    def _side_by_side(self, i: int, x: Tensor, see: See) -> Tensor:
        """Attention and a mixer on one norm, each with factors before and behind it; an MLP with factors of its own."""
        at, config = f"model.layers.{i}", self.config
        inner = self._rms_norm(x, f"{at}.input_layernorm")
        mixed = self._state_space(i, inner, f"{at}.mamba", see)  # first: a splice reads what came before
        read = config["attention_in_multiplier"] * inner
        q, k, v = (
            self._linear(read, f"{at}.self_attn.{name}_proj").unflatten(-1, (-1, config["head_dim"])) for name in "qkv"
        )
        parts = (q, config["key_multiplier"] * k, v)
        added = self._mixed_heads(i, parts, f"{at}.self_attn.o_proj", see, factor=config["attention_out_multiplier"])
        x = see(f"blocks.{i}.hook_resid_mid", x + mixed + added)
        names = [f"{at}.feed_forward.{name}_proj" for name in ("gate", "up", "down")]
        return x + self._neurons(i, self._rms_norm(x, f"{at}.pre_ff_layernorm"), names, see)

    def _zamba(self, i: int, x: Tensor, see: See) -> Tensor:
        """A mixer on the stream, or on that and what a shared block makes of it and the embeddings."""
        at, kinds = f"model.layers.{i}", self.config["layers_block_type"]
        read = x
        if kinds[i] == "hybrid":
            hybrids = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
            use = hybrids.index(i)
            first = hybrids[use % self.config.get("num_mem_blocks", 1)]
            shared = f"model.layers.{first}.shared_transf{'' if self.family == 'zamba' else 'ormer'}"
            given = self._shared_block(i, x, shared, use, see) @ self.tensors[f"{at}.linear.weight"].T
            read, at = x + see(f"blocks.{i}.ssm.hook_shared", given), f"{at}.mamba_decoder"
        mix = self._selective_heads if self.family == "zamba" else self._state_space
        return x + mix(i, self._rms_norm(read, f"{at}.input_layernorm"), f"{at}.mamba", see)

    def _selective_heads(self, i: int, x: Tensor, at: str, see: See) -> Tensor:
        """Mamba's scan in heads, whose channels share what addresses and reads them."""
        z, where = self.tensors, f"blocks.{i}.ssm"
        mixed, gate = self._linear(see(f"{where}.hook_pre", x), f"{at}.in_proj").unflatten(-1, (-1, 2)).unbind(-1)
        mixed = see(f"{where}.hook_conv", silu(self._convolved(i, mixed, f"{at}.conv1d")))
        heads, each, size = z[f"{at}.A_log"].shape
        mixed, gate = (one.unflatten(-1, (heads, each)) for one in (mixed, gate))
        inner = torch.einsum("thd,hpd->thp", mixed, z[f"{at}.x_proj_weight"])
        dt, k, q = inner.split([inner.shape[-1] - 2 * size, size, size], -1)
        dt = softplus(torch.einsum("thr,hdr->thd", dt, z[f"{at}.dt_proj_weight"]) + z[f"{at}.dt_proj_bias"])
        dt = see(f"{where}.hook_dt", dt.flatten(1)).unflatten(-1, (heads, each))
        decay = dt[:, :, None] * -z[f"{at}.A_log"].exp().transpose(1, 2)  # [seq, heads, key, channels]
        y = self._recurrence(i, see, q, k, dt * mixed, decay.flatten(2))
        y = see(f"{where}.hook_z", (y + mixed * z[f"{at}.D"]) * silu(gate))
        return see(f"blocks.{i}.hook_attn_out", self._linear(y.flatten(1), f"{at}.out_proj"))

    def _shared_block(self, i: int, x: Tensor, at: str, use: int, see: See) -> Tensor:
        """Attention, then an MLP on its output; at each use the projections of Zamba2 have an adapter of low rank."""
        block, attention, mlp = f"blocks.{i}", f"{at}.self_attn", f"{at}.feed_forward"

        def adapted(x: Tensor, name: str, adapter: str) -> Tensor:
            if self.family == "zamba":
                return self._linear(x, name)
            low = self._linear(x, f"{adapter}_adapter_list.{use}.0")
            return self._linear(x, name) + self._linear(low, f"{adapter}_adapter_list.{use}.1")

        inner = self._rms_norm(torch.cat([x, self.embedded], -1), f"{at}.input_layernorm")
        q, k, v = (
            adapted(inner, f"{attention}.{name}_proj", f"{attention}.linear_{name}")
            .unflatten(-1, (-1, 2 * self.config["hidden_size"] // self.config["num_attention_heads"]))
            .transpose(0, 1)
            for name in "qkv"
        )
        q, k, v = self._seen_heads(block, q, k, v, see)
        mixed = self._attend(i, q * 2**0.5, k, v, see)  # as heads of half their size are scaled
        out = self._linear(mixed.flatten(1), f"{attention}.o_proj")
        inner = see(f"{block}.mlp.hook_pre", self._rms_norm(out, f"{at}.pre_ff_layernorm"))
        if self.family == "zamba":
            halves = tuple(self._linear(inner, f"{mlp}.{name}_proj") for name in ("gate", "up"))
        else:
            halves = adapted(inner, f"{mlp}.gate_up_proj", f"{mlp}.gate_up_proj").chunk(2, -1)
        gate, up = (see(f"{block}.mlp.hook_{name}", one) for name, one in zip(("gate", "up"), halves, strict=True))
        neurons = see(f"{block}.mlp.hook_act", gelu(gate) * up)
        return see(f"{block}.mlp.hook_post", self._linear(neurons, f"{mlp}.down_proj"))

    def _griffin(self, i: int, x: Tensor, see: See) -> Tensor:
        at, heads = f"model.layers.{i}", self.config["num_attention_heads"]
        inner = self._rms_norm(x, f"{at}.temporal_pre_norm")
        if f"{at}.temporal_block.q_proj.weight" in self.tensors:
            size = self.tensors[f"{at}.temporal_block.q_proj.weight"].shape[0] // heads
            parts = (
                self._linear(inner, f"{at}.temporal_block.{name}_proj").unflatten(-1, (-1, size)) for name in "qkv"
            )
            mixed = self._mixed_heads(i, tuple(parts), f"{at}.temporal_block.o_proj", see)
        else:
            mixed = self._linear_unit(i, inner, f"{at}.temporal_block", see)
        x = see(f"blocks.{i}.hook_resid_mid", x + mixed)
        names = [f"{at}.mlp_block.{name}_proj" for name in ("gate", "up", "down")]
        return x + self._neurons(i, self._rms_norm(x, f"{at}.channel_pre_norm"), names, see)

    def _linear_unit(self, i: int, x: Tensor, at: str, see: See) -> Tensor:
        """RG-LRU: every channel forgets by itself, and the first token of a text reads nothing."""
        z, unit, where = self.tensors, f"{at}.rg_lru", f"blocks.{i}.ssm"
        x = see(f"{where}.hook_pre", x)
        beside = _gelu_of_tanh(self._linear(x, f"{at}.linear_y"))
        x = see(f"{where}.hook_conv", self._convolved(i, self._linear(x, f"{at}.linear_x"), f"{at}.conv_1d"))
        heads = x.unflatten(-1, (len(z[f"{unit}.input_gate_weight"]), -1))
        gates = (f"{unit}.{name}_gate" for name in ("input", "recurrent"))
        given, forget = (
            torch.sigmoid(torch.einsum("thc,hcd->thd", heads, z[f"{one}_weight"]) + z[f"{one}_bias"]) for one in gates
        )
        decay = -8 * forget.flatten(1) * softplus(z[f"{unit}.recurrent_param"])
        size = torch.sqrt(1 - torch.exp(2 * decay))
        size[0], decay[0] = 1, FORGOTTEN
        one = torch.ones(len(x), 1, 1, dtype=x.dtype)
        y = self._recurrence(i, see, one, one, (x * given.flatten(1) * size)[:, None], decay[:, None])
        y = see(f"{where}.hook_z", y * beside[:, None])
        return see(f"blocks.{i}.hook_attn_out", self._linear(y[:, 0], f"{at}.linear_out"))

    def _selective_scan(self, i: int, x: Tensor, at: str, see: See) -> Tensor:
        """Mamba: each number of the state forgets by itself; channels share what addresses and reads them."""
        z, where = self.tensors, f"blocks.{i}.ssm"
        mixed, gate = self._linear(see(f"{where}.hook_pre", x), f"{at}.in_proj").chunk(2, -1)
        mixed = see(f"{where}.hook_conv", silu(self._convolved(i, mixed, f"{at}.conv1d")))
        size = z[f"{at}.A_log"].shape[1]
        inner = mixed @ z[f"{at}.x_proj.weight"].T
        dt, k, q = inner.split([inner.shape[-1] - 2 * size, size, size], -1)
        dt = see(f"{where}.hook_dt", softplus(self._linear(dt, f"{at}.dt_proj")))
        decay = dt[:, None, None] * -z[f"{at}.A_log"].exp().T  # [seq, 1, key, channels]
        y = self._recurrence(i, see, q[:, None], k[:, None], (dt * mixed)[:, None], decay.flatten(2))
        y = see(f"{where}.hook_z", (y + mixed[:, None] * z[f"{at}.D"]) * silu(gate)[:, None])
        return see(f"blocks.{i}.hook_attn_out", self._linear(y[:, 0], f"{at}.out_proj"))

    def _state_space(self, i: int, x: Tensor, at: str, see: See) -> Tensor:
        z, where = self.tensors, f"blocks.{i}.ssm"
        names = {
            **dict.fromkeys(("bamba", "falcon_h1"), ("mamba_n_groups", "mamba_d_state")),
            "zamba2": ("mamba_ngroups", "mamba_d_state"),
            "nemotron_h": ("n_groups", "ssm_state_size"),
        }
        groups, size = (self.config[name] for name in names.get(self.family, ("n_groups", "state_size")))
        heads = len(z[f"{at}.A_log"])
        each = z[f"{at}.norm.weight"].shape[0] // heads
        x = see(f"{where}.hook_pre", x) * self.config.get("ssm_in_multiplier", 1)
        width = heads * each
        parts = self._linear(x, f"{at}.in_proj").split([width, width, groups * size, groups * size, heads], -1)
        factors = self.config.get("ssm_multipliers", [1] * len(parts))
        gate, *conv, dt = (factor * part for factor, part in zip(factors, parts, strict=True))
        mixed = torch.cat(conv, -1)
        mixed = see(f"{where}.hook_conv", silu(self._convolved(i, mixed, f"{at}.conv1d")))
        value, k, q = mixed.split([width, groups * size, groups * size], -1)
        least = self.config["time_step_min"] if self.family in ("zamba2", "nemotron_h") else 0
        dt = see(f"{where}.hook_dt", softplus(dt + z[f"{at}.dt_bias"]).clamp(min=least))
        q, k = (one.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, 1) for one in (q, k))
        value = value.unflatten(-1, (heads, -1))
        decay = (-z[f"{at}.A_log"].exp() * dt)[..., None]
        y = self._recurrence(i, see, q, k, value * dt[..., None], decay)
        y = (y + z[f"{at}.D"][:, None] * value).flatten(1) * silu(gate)
        y = y.unflatten(-1, (groups, -1))
        y = y / torch.sqrt((y**2).mean(-1, keepdim=True) + (1e-5 if self.family == "zamba2" else self._epsilon))
        y = see(f"{where}.hook_z", (y.flatten(1) * z[f"{at}.norm.weight"]).unflatten(-1, (heads, -1)))
        out = self._linear(y.flatten(1), f"{at}.out_proj") * self.config.get("ssm_out_multiplier", 1)
        return see(f"blocks.{i}.hook_{'ssm' if self.family == 'falcon_h1' else 'attn'}_out", out)

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
        gate = see(f"blocks.{i}.attn.hook_gate", gate)
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

    def _minimax(self, i: int, x: Tensor, see: See) -> Tensor:
        """Halves on the normed stream, which they and it join with a factor each."""
        at, block, config = f"model.layers.{i}", f"blocks.{i}", self.config
        kind = "linear" if config["layer_types"][i] == "linear_attention" else "full"
        factor = config[f"{kind}_attn_beta_factor"]
        x = self._rms_norm(x, f"{at}.input_layernorm")
        if kind == "linear":
            added = see(f"{block}.hook_attn_out", factor * self._lightning(i, x, f"{at}.self_attn", see))
        else:
            size = config["head_dim"]
            q, k, v = (self._linear(x, f"{at}.self_attn.{name}_proj").unflatten(-1, (-1, size)) for name in "qkv")
            added = self._mixed_heads(i, (q, k, v), f"{at}.self_attn.o_proj", see, factor=factor)
        x = see(f"{block}.hook_resid_mid", config[f"{kind}_attn_alpha_factor"] * x + added)
        x = self._rms_norm(x, f"{at}.post_attention_layernorm")
        mixed = see(f"{block}.mlp.hook_post", self._experts(i, x, f"{at}.block_sparse_moe", see))
        return config["mlp_alpha_factor"] * x + see(f"{block}.hook_mlp_out", config["mlp_beta_factor"] * mixed)

    def _lightning(self, i: int, x: Tensor, at: str, see: See) -> Tensor:
        """Linear attention, whose heads forget at a rate each, the slower the later the layer."""
        where, heads, layers = f"blocks.{i}.ssm", self.config["num_attention_heads"], self.layers
        x = see(f"{where}.hook_pre", x)
        q, k, v = silu(self._linear(x, f"{at}.qkv_proj")).unflatten(-1, (heads, -1)).chunk(3, -1)
        slopes = 2 ** (-8 / heads * torch.arange(1, heads + 1)) * (1 - i / (layers - 1 + 1e-5) + 1e-5)
        y = self._recurrence(i, see, q, k, v, -slopes.to(v).expand(len(x), heads)[..., None])
        y = y.flatten(1) / torch.sqrt((y.flatten(1) ** 2).mean(-1, keepdim=True) + 1e-6)
        y = y * self.tensors[f"{at}.norm.weight"] * torch.sigmoid(self._linear(x, f"{at}.output_gate"))
        return self._linear(see(f"{where}.hook_z", y.unflatten(1, (heads, -1))).flatten(1), f"{at}.out_proj")

    def _experts(self, i: int, x: Tensor, at: str, see: See) -> Tensor:
        """The experts that each token chooses, weighed by its softmax over these."""
        where = f"blocks.{i}.mlp"
        x = see(f"{where}.hook_pre", x)
        logits = see(f"{where}.hook_router_logits", self._linear(x, f"{at}.gate"))
        weights, chosen = torch.softmax(logits, -1).topk(self.config["num_experts_per_tok"], -1)
        chosen = see(f"{where}.hook_expert_indices", chosen).long()
        weights = see(f"{where}.hook_expert_weights", weights / weights.sum(-1, keepdim=True))
        read, names = x[:, None].expand(-1, chosen.shape[1], -1), {"gate": "w1", "up": "w3"}
        gate, up = (
            see(f"{where}.hook_expert_{what}", self._products(read, chosen, at, name)) for what, name in names.items()
        )
        out = self._products(see(f"{where}.hook_expert_act", silu(gate) * up), chosen, at, "w2")
        return see(f"{where}.hook_expert_out", weights[..., None] * out).sum(1)

    def _rotated(self, x: Tensor) -> Tensor:
        return x if self.family in ("zamba", "nemotron_h") else super()._rotated(x)

    def _mixed_heads(
        self, i: int, parts: tuple[Tensor, ...], out: str, see: See, gate: Tensor | None = None, factor: float = 1.0
    ) -> Tensor:
        """Attention of queries, keys and values [seq, heads, size], gated or not: [seq, hidden]."""
        block = f"blocks.{i}"
        q, k, v = self._seen_heads(block, *(one.transpose(0, 1) for one in parts), see)
        # behind a gate z is what the projection reads
        seen = see if gate is None else lambda name, value: value if name.endswith("hook_z") else see(name, value)
        mixed = self._attend(i, q, k, v, seen)
        mixed = mixed if gate is None else see(f"{block}.attn.hook_z", mixed * gate)
        weight = self.tensors[f"{out}.weight"].T.reshape(*mixed.shape[1:], -1)
        added = _shares(block, mixed, weight, see).sum(1) + self.tensors.get(f"{out}.bias", 0)
        return see(f"{block}.hook_attn_out", factor * added)

    def _neurons(self, i: int, x: Tensor, names: Sequence[str], see: See) -> Tensor:
        block = f"blocks.{i}"
        x = see(f"{block}.mlp.hook_pre", x)
        halves = dict(zip(("gate", "up"), names, strict=False))
        order = ("up", "gate") if self.family == "falcon_h1" else ("gate", "up")  # a splice reads what came before
        found = {what: see(f"{block}.mlp.hook_{what}", self._linear(x, halves[what])) for what in order}
        gate, up = found["gate"], found["up"]
        before, behind = self.config.get("mlp_multipliers", (1, 1))
        active = _gelu_of_tanh(gate) if self.family == "recurrent_gemma" else silu(before * gate)
        post = behind * self._linear(see(f"{block}.mlp.hook_act", active * up), names[2])
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
        """y [seq, heads, value]; q, k are [seq, heads, key], strengths [seq, heads, 1], log decays [seq, heads, n].

        n is 1, key, or key * value.
        """
        where = f"blocks.{i}.ssm"
        q, k, v = (see(f"{where}.hook_{name}", one) for name, one in zip("qkv", (q, k, v), strict=True))
        strength = None if strength is None else see(f"{where}.hook_write", strength)
        decay = see(f"{where}.hook_log_decay", decay).clamp(FORGOTTEN, 0)
        write, erase = (torch.from_numpy(one[i])[..., None] for one in (self.gates.write, self.gates.erase))
        by_number = decay.shape[-1] == k.shape[-1] * v.shape[-1]
        kept = decay.unflatten(-1, (k.shape[-1], v.shape[-1])) if by_number else decay[..., None]
        kept = torch.where(torch.from_numpy(self.gates.decay[i])[:, None, None, None], kept.exp(), 1)
        gates = (write, erase if strength is None else erase * strength, strength)
        state, ys, states, stops = torch.zeros(*k.shape[1:], v.shape[-1], dtype=v.dtype), [], [], dict(self.steps)
        for t in range(len(v)):
            state = _stepped(state, kept[t], k[t], v[t], [None if one is None else one[t] for one in gates])
            states.append(state)
            ys.append(torch.einsum("hk,hkv->hv", q[t], state))
            if t + 1 in stops.values():
                state = self.ended(f"{where}.hook_state", state, t + 1)
        see(f"{where}.hook_states", torch.stack(states))
        if i in self.weighed:
            parts = (q, k, kept, *gates)
            if by_number:  # a weight for each channel of each head
                channels = kept.transpose(2, 3).flatten(1, 2)[..., None]
                wide = [one if one is None else one.repeat_interleave(v.shape[-1], 1) for one in (q, k, *gates)]
                parts = (*wide[:2], channels, *wide[2:])
            weights = self._weights(*parts[:3], parts[3:])
            see(f"{where}.hook_effective_attn_raw", weights)
            positive = weights.clamp(min=0)
            see(f"{where}.hook_effective_attn", positive / positive.sum(-1, keepdim=True).clamp(min=TINY))
        return see(f"{where}.hook_y", torch.stack(ys))

    def _weights(self, q: Tensor, k: Tensor, kept: Tensor, gates: Sequence[Tensor | None]) -> Tensor:
        """[heads or channels, seq, seq]: the weight of each token of a call in the outputs of the same call.

        That is the recurrence on the unit vectors, from an empty state. `kept` is [seq, heads, key or 1, 1], or of
        channels in the place of heads.
        """
        seq, heads = len(q), max(kept.shape[1], k.shape[1])
        found, unit = torch.zeros(seq, heads, seq, dtype=q.dtype), torch.eye(seq, dtype=q.dtype)
        for start, stop in self.steps:
            state = torch.zeros(heads, k.shape[-1], seq, dtype=q.dtype)
            for t in range(start, stop):
                key, row = k[t].expand(heads, -1), unit[t].expand(heads, -1)
                state = _stepped(state, kept[t], key, row, [None if one is None else one[t] for one in gates])
                found[t] = torch.einsum("hk,hkv->hv", q[t].expand(heads, -1), state)
        return found.transpose(0, 1)

    def _read(self, i: int, seq: int) -> Tensor:
        window = self.config["attention_window_size"] if self.family == "recurrent_gemma" else seq
        shown = ~self.hidden
        places = shown.cumsum(1)  # a window counts no hidden key
        return shown.tril() & (places.diagonal()[:, None] - places < window)

    @property
    def _epsilon(self) -> float:
        name = "layer_norm_epsilon" if self._alone else "norm_eps" if self.family == "lfm2" else "rms_norm_eps"
        return self.config[name]

    def _rms_norm(self, x: Tensor, name: str) -> Tensor:
        gain = self.tensors[f"{name}.weight"] + (self.family in ("qwen3_5_text", "recurrent_gemma"))
        return gain * x / torch.sqrt((x**2).mean(-1, keepdim=True) + self._epsilon)


def _stepped(state: Tensor, kept: Tensor, k: Tensor, v: Tensor, gates: Sequence[Tensor | None]) -> Tensor:
    """A state [heads, key, value] behind one more token."""
    write, erase, strength = gates
    state = state * kept
    written = v if write is None else write * v
    if strength is not None:
        written = strength * written - (0 if erase is None else erase) * torch.einsum("hk,hkv->hv", k, state)
    return state + k[:, :, None] * written[:, None]
