"""Small masked language models (BERT, RoBERTa, DistilBERT, ModernBERT) in float64, one whole text at a time.

Written from the papers and from the checkpoint's own names, as `decoder_reference.py`, whose attention and norms it
has: every token reads every other, or those of a window on both sides.
"""

from collections.abc import Sequence
from typing import Any

import torch
from decoder_reference import Decoder, See
from torch import Tensor

# Family -> the names of a layer's parts: queries, keys, values, output, its norm, MLP in and out, its norm.
BERT = (
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    *("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
)
DISTILBERT = (
    *(f"attention.{name}_lin" for name in ("q", "k", "v", "out")),
    *("sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
)
LAYERS = {
    "bert": ("bert.encoder.layer", BERT),
    "roberta": ("roberta.encoder.layer", BERT),
    "distilbert": ("distilbert.transformer.layer", DISTILBERT),
}
HEADS = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
    "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    "modernbert": ("head.dense", "head.norm", "decoder"),
}


class Encoder(Decoder):
    """A checkpoint with the head of a masked language model."""

    @property
    def layers(self) -> int:
        return self.config["n_layers" if self.family == "distilbert" else "num_hidden_layers"]

    @property
    def heads(self) -> int:
        return self.config["n_heads" if self.family == "distilbert" else "num_attention_heads"]

    @property
    def _epsilon(self) -> float:
        return self.config.get("norm_eps", self.config.get("layer_norm_eps", 1e-12))

    def run(self, ids: list[int], see: See, keys: Sequence[int] = ()) -> Tensor:
        """Logits [seq, vocab]; every query reads all keys."""
        self.keys = [len(ids)] * len(ids)
        with torch.no_grad():
            return self._modernbert(ids, see) if self.family == "modernbert" else self._bert(ids, see)

    def _bert(self, ids: list[int], see: See) -> Tensor:
        z, (blocks, names) = self.tensors, LAYERS[self.family]
        table = f"{self.family}.embeddings"
        first = self.config["pad_token_id"] + 1 if self.family == "roberta" else 0
        x = see("hook_embed", z[f"{table}.word_embeddings.weight"][ids])
        if self.family != "distilbert":
            types = z[f"{table}.token_type_embeddings.weight"][:1].expand(len(ids), -1)
            x = x + see("hook_token_type_embed", types)
        places = z[f"{table}.position_embeddings.weight"][first : first + len(ids)]
        x = self._layer_norm(x + see("hook_pos_embed", places), f"{table}.LayerNorm")
        for i in range(self.layers):
            block, parts = f"blocks.{i}", [f"{blocks}.{i}.{name}" for name in names]
            x = see(f"{block}.hook_resid_pre", x)
            q, k, v = (self._cut(self._linear(x, part)) for part in parts[:3])
            # in the order of the graph, where a splice may read what stands before it
            k, v, q = (see(f"{block}.attn.hook_{name}", one) for name, one in zip("kvq", (k, v, q), strict=True))
            mixed = self._shares(block, self._attend(i, q, k, v, see), parts[3], see)
            x = see(f"{block}.hook_resid_mid_sum", x + see(f"{block}.hook_attn_out", mixed))
            x = see(f"{block}.hook_resid_mid", self._layer_norm(x, parts[4]))
            up = see(f"{block}.mlp.hook_up", self._linear(see(f"{block}.mlp.hook_pre", x), parts[5]))
            neurons = see(f"{block}.mlp.hook_act", torch.nn.functional.gelu(up))
            post = see(f"{block}.mlp.hook_post", self._linear(neurons, parts[6]))
            x = see(f"{block}.hook_resid_post_sum", x + see(f"{block}.hook_mlp_out", post))
            x = see(f"{block}.hook_resid_post", self._layer_norm(x, parts[7]))
        return self._predicted(x, z[f"{table}.word_embeddings.weight"], see)

    def _modernbert(self, ids: list[int], see: See) -> Tensor:
        table = self.tensors["model.embeddings.tok_embeddings.weight"]
        x = self._layer_norm(see("hook_embed", table[ids]), "model.embeddings.norm")
        for i in range(self.layers):
            block, at = f"blocks.{i}", f"model.layers.{i}"
            x = see(f"{block}.hook_resid_pre", x)
            fused = self._linear(self._layer_norm(x, f"{at}.attn_norm") if i else x, f"{at}.attn.Wqkv")
            q, k, v = (self._cut(one) for one in fused.chunk(3, -1))
            q, k = (see(f"{block}.attn.hook_{name}", one) for name, one in zip("qk", (q, k), strict=True))
            kind = self.config["layer_types"][i]
            self.theta = self.config["rope_parameters"][kind]["rope_theta"]
            q, k = (
                see(f"{block}.attn.hook_rot_{name}", self._rotated(one)) for name, one in zip("qk", (q, k), strict=True)
            )
            z = self._attend(i, q, k, see(f"{block}.attn.hook_v", v), see)  # in the order of the graph
            x = x + see(f"{block}.hook_attn_out", self._shares(block, z, f"{at}.attn.Wo", see))
            x = see(f"{block}.hook_resid_mid", x)
            inner = see(f"{block}.mlp.hook_pre", self._layer_norm(x, f"{at}.mlp_norm"))
            gate, up = self._linear(inner, f"{at}.mlp.Wi").chunk(2, -1)
            gate, up = see(f"{block}.mlp.hook_gate", gate), see(f"{block}.mlp.hook_up", up)
            neurons = see(f"{block}.mlp.hook_act", torch.nn.functional.gelu(gate) * up)
            post = see(f"{block}.mlp.hook_post", self._linear(neurons, f"{at}.mlp.Wo"))
            x = see(f"{block}.hook_resid_post", x + see(f"{block}.hook_mlp_out", post))
        x = see("hook_final_norm", self._layer_norm(x, "model.final_norm"))
        return self._predicted(x, table, see)

    def _predicted(self, x: Tensor, table: Tensor, see: See) -> Tensor:
        dense, norm, output = HEADS[self.family]
        hidden = torch.nn.functional.gelu(self._linear(x, dense))
        hidden = see("mlm_head.hook_out", self._layer_norm(hidden, norm))
        return see("hook_logits", hidden @ table.T + self.tensors[f"{output}.bias"])

    def _cut(self, x: Tensor) -> Tensor:
        """[n_heads, seq, head_dim]."""
        return x.reshape(len(x), self.heads, -1).transpose(0, 1)

    def _shares(self, block: str, z: Tensor, name: str, see: See) -> Tensor:
        out = self.tensors[f"{name}.weight"].T.reshape(*z.shape[1:], -1)
        shares = see(f"{block}.attn.hook_result", torch.einsum("shd,hdm->shm", z, out))
        bias: Any = self.tensors.get(f"{name}.bias", 0)
        return shares.sum(1) + bias

    def _read(self, i: int, seq: int) -> Tensor:
        far = (torch.arange(seq)[:, None] - torch.arange(seq)[None, :]).abs()
        sliding = self.family == "modernbert" and self.config["layer_types"][i] == "sliding_attention"
        return far <= (self.config["local_attention"] // 2 if sliding else seq)

    @property
    def _speed(self) -> float:
        return self.theta

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt((x**2).mean(-1, keepdim=True) + self._epsilon) * self.tensors[f"{name}.weight"]
        return x + self.tensors.get(f"{name}.bias", 0)
