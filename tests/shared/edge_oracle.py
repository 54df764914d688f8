"""Edges of transformers' own models written out in torch, float64: every receiver reads a sum of its own.

The modules (embeddings, norms, projections, MLPs, head) are those of transformers; what is written here is who reads
what. `run` gives the logits with every edge chosen by itself, and `probes` are zeros added to what one receiver reads,
so that autograd gives the gradient by exactly that.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.codegen.modeling_codegen import apply_rotary_pos_emb as rotate_pairs
from transformers.models.codegen.modeling_codegen import create_sinusoidal_positions
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_some
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Keep = Callable[[str, str], bool]  # labels of sender and receiver


@dataclass
class Recorded:
    """What senders wrote: the embedding, each layer's heads' values [heads, seq, head_dim], and MLP outputs."""

    embed: Tensor
    z: list[Tensor] = field(default_factory=list)
    mlp: list[Tensor] = field(default_factory=list)


class Gpt2:
    """GPT-2: learned positions, one projection for queries, keys and values."""

    parallel = False
    causal = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = deepcopy(model).double()
        self.config = self.model.config
        self.heads = self.kv = self.config.num_attention_heads
        self.body: Any = getattr(self.model, self.model.base_model_prefix)
        self.layers: Any = self.blocks()

    def blocks(self) -> Any:
        return self.body.h

    def embed(self, ids: Tensor) -> Tensor:
        return (self.body.wte(ids) + self.body.wpe(torch.arange(len(ids))))[None]

    def into(self, layer: int, role: str, stream: Tensor) -> Tensor:
        """Queries, keys or values [heads, seq, head_dim]."""
        block = self.layers[layer]
        made = block.attn.c_attn(block.ln_1(stream)).chunk(3, dim=-1)["qkv".index(role)]
        return made[0].unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q, k

    def scaling(self, layer: int) -> float:
        return float(self.layers[layer].attn.scaling)

    def scores(self, scores: Tensor) -> Tensor:
        return scores

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.rotate(q, k)
        k, v = (one.repeat_interleave(self.heads // len(one), dim=0) for one in (k, v))
        scores = self.scores(q @ k.transpose(-1, -2) * self.scaling(layer))
        later = torch.ones(scores.shape[-2:]).triu(1).bool() & self.causal
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ v

    def write(self, layer: int, z: Tensor) -> Tensor:
        return self.layers[layer].attn.c_proj(z.transpose(0, 1).flatten(1)[None])

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.mlp(block.ln_2(stream))

    def normed(self, layer: int, middle: bool, total: Tensor) -> Tensor:
        """The stream that a sum in the middle or at the end of a layer becomes."""
        return total

    def logits(self, stream: Tensor) -> Tensor:
        return self.model.lm_head(self.body.ln_f(stream))[0, -1]


class Llama(Gpt2):
    """Llama: rotated queries and keys, grouped heads."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.kv = self.config.num_key_value_heads

    def blocks(self) -> Any:
        return self.body.layers

    def embed(self, ids: Tensor) -> Tensor:
        return self.body.embed_tokens(ids)[None]

    def into(self, layer: int, role: str, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        made = getattr(block.self_attn, f"{role}_proj")(block.input_layernorm(stream))[0]
        return made.unflatten(-1, (-1, block.self_attn.head_dim)).transpose(0, 1)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.body.rotary_emb(q, torch.arange(q.shape[1])[None])
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin)
        return q[0], k[0]

    def scaling(self, layer: int) -> float:
        return float(self.layers[layer].self_attn.scaling)

    def write(self, layer: int, z: Tensor) -> Tensor:
        return self.layers[layer].self_attn.o_proj(z.transpose(0, 1).flatten(1)[None])

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.mlp(block.post_attention_layernorm(stream))

    def logits(self, stream: Tensor) -> Tensor:
        return self.model.lm_head(self.body.norm(stream))[0, -1]


class Gemma2(Llama):
    """Gemma 2: outputs of attention and MLP are normed before they are added; scores and logits are capped."""

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids)  # transformers' module scales it

    def scores(self, scores: Tensor) -> Tensor:
        cap = self.config.attn_logit_softcapping
        return (scores / cap).tanh() * cap

    def write(self, layer: int, z: Tensor) -> Tensor:
        return self.layers[layer].post_attention_layernorm(super().write(layer, z))

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.post_feedforward_layernorm(block.mlp(block.pre_feedforward_layernorm(stream)))

    def logits(self, stream: Tensor) -> Tensor:
        cap = self.config.final_logit_softcapping
        return (super().logits(stream) / cap).tanh() * cap


class Neox(Gpt2):
    """GPT-NeoX: attention and MLP read the same stream."""

    parallel = True

    def blocks(self) -> Any:
        return self.body.layers

    def embed(self, ids: Tensor) -> Tensor:
        return self.body.embed_in(ids)[None]

    def into(self, layer: int, role: str, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        made = block.attention.query_key_value(block.input_layernorm(stream))[0].unflatten(-1, (self.heads, -1))
        return made.chunk(3, dim=-1)["qkv".index(role)].transpose(0, 1)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.body.rotary_emb(q, torch.arange(q.shape[1])[None])
        q, k = rotate_some(q[None], k[None], cos, sin)
        return q[0], k[0]

    def scaling(self, layer: int) -> float:
        return float(self.layers[layer].attention.scaling)

    def write(self, layer: int, z: Tensor) -> Tensor:
        return self.layers[layer].attention.dense(z.transpose(0, 1).flatten(1)[None])

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.mlp(block.post_attention_layernorm(stream))

    def logits(self, stream: Tensor) -> Tensor:
        return self.model.get_output_embeddings()(self.body.final_layer_norm(stream))[0, -1]


class CodeGen(Gpt2):
    """CodeGen: one norm for attention and MLP; one projection, in four parts of queries, values and keys each."""

    parallel = True

    def embed(self, ids: Tensor) -> Tensor:
        return self.body.wte(ids)[None]

    def into(self, layer: int, role: str, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        made = block.attn.qkv_proj(block.ln_1(stream))[0].unflatten(-1, (4, 3, -1))[:, :, "qvk".index(role)]
        return made.flatten(1).unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        width = self.config.rotary_dim
        sin, cos = create_sinusoidal_positions(q.shape[1], width).double()[None].chunk(2, dim=-1)

        def rotated(one: Tensor) -> Tensor:
            turned = rotate_pairs(one[..., :width].transpose(0, 1)[None], sin, cos)[0].transpose(0, 1)
            return torch.cat([turned, one[..., width:]], dim=-1)

        return rotated(q), rotated(k)

    def write(self, layer: int, z: Tensor) -> Tensor:
        return self.layers[layer].attn.out_proj(z.transpose(0, 1).flatten(1)[None])

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.mlp(block.ln_1(stream))


class EuroBert(Llama):
    """EuroBERT: Llama's layers read in both directions; a token's logits at a place, or labels of the whole text."""

    causal = False

    def __init__(self, model: PreTrainedModel, at: int | None = None) -> None:
        super().__init__(model)
        self.at = at

    def logits(self, stream: Tensor) -> Tensor:
        stream = self.body.norm(stream)
        if self.at is not None:
            return self.model.lm_head(stream)[0, self.at]
        return self.model.classifier(self.model.activation(self.model.dense(stream))).mean(1)[0]


class Bert(Gpt2):
    """BERT: the stream is normed after each addition; a token's logits at a place, or labels of the whole text."""

    causal = False

    def __init__(self, model: PreTrainedModel, at: int | None = None) -> None:
        super().__init__(model)
        self.at = at

    def blocks(self) -> Any:
        return self.body.encoder.layer

    def embed(self, ids: Tensor) -> Tensor:
        return self.body.embeddings(ids[None])

    def into(self, layer: int, role: str, stream: Tensor) -> Tensor:
        attention = self.layers[layer].attention.self
        made = {"q": attention.query, "k": attention.key, "v": attention.value}[role](stream)[0]
        return made.unflatten(-1, (self.heads, -1)).transpose(0, 1)

    def scaling(self, layer: int) -> float:
        return float((self.config.hidden_size // self.heads) ** -0.5)

    def write(self, layer: int, z: Tensor) -> Tensor:
        return self.layers[layer].attention.output.dense(z.transpose(0, 1).flatten(1)[None])

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        block = self.layers[layer]
        return block.output.dense(block.intermediate(stream))

    def normed(self, layer: int, middle: bool, total: Tensor) -> Tensor:
        block = self.layers[layer]
        return (block.attention.output if middle else block.output).LayerNorm(total)

    def logits(self, stream: Tensor) -> Tensor:
        if self.at is not None:
            return self.model.cls(stream)[0, self.at]
        return self.model.classifier(self.body.pooler(stream))[0]


class AttentionOnly(Gpt2):
    """GPT-2 without MLPs: what they would write is 0."""

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        return torch.zeros_like(stream)


KINDS = {"gpt2": Gpt2, "llama": Llama, "gemma2": Gemma2, "gpt_neox": Neox, "hooked_transformer": AttentionOnly}


@dataclass
class EdgeModel:
    """One model with every edge apart."""

    parts: Gpt2
    ungrouped: bool = False  # whether each query head reads keys and values of its own, though it shares them

    def run(
        self,
        ids: Tensor,
        corrupted: Recorded | None = None,
        keep: Keep = lambda *_: True,
        probes: dict[tuple[str, str], Tensor] | None = None,
        start: Tensor | None = None,
        put: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Recorded]:
        """The last position's logits [vocab], and what senders wrote.

        Args:
            ids: [seq].
            corrupted: what senders wrote on the other prompt, for the edges that are not kept.
            keep: whether an edge carries what its sender writes now.
            probes: filled with zeros that are added to what each receiver reads, where a part writes ("a1", "m1",
                "embed").
            start: what the embedding writes, if not that of the ids.
            put: what a layer's heads ("a1") or its MLP ("m1") write, if not what they compute.
        """
        now = Recorded(self.parts.embed(ids) if start is None else start)
        old = corrupted or now

        def probed(receiver: str, at: str, total: Tensor) -> Tensor:
            if probes is None:
                return total
            probes[receiver, at] = torch.zeros_like(total, requires_grad=True)
            return total + probes[receiver, at]

        def read(receiver: str, layers: int, mlps: int) -> Tensor:
            total = probed(receiver, "embed", now.embed if keep("embed", receiver) else old.embed)
            for layer in range(layers):
                heads = range(self.parts.heads)
                z = [(now if keep(f"a{layer}.h{h}", receiver) else old).z[layer][h] for h in heads]
                total = probed(receiver, f"a{layer}", total + self.parts.write(layer, torch.stack(z)))
                total = self.parts.normed(layer, True, total)
                if layer < mlps:
                    total = total + (now if keep(f"m{layer}", receiver) else old).mlp[layer]
                    total = self.parts.normed(layer, False, probed(receiver, f"m{layer}", total))
            return total

        for layer in range(len(self.parts.layers)):
            given = [
                torch.stack([self.own(layer, role, head, read(name, layer, layer)) for head, name in named])
                for role, named in self.roles(layer)
            ]
            z = (put or {}).get(f"a{layer}", self.parts.attend(layer, *given))
            if not self.parts.parallel:
                now.z.append(z)
            mlp = self.parts.mlp(layer, read(f"m{layer}", layer + (not self.parts.parallel), layer))
            now.mlp.append((put or {}).get(f"m{layer}", mlp))
            if self.parts.parallel:
                now.z.append(z)
        count = len(self.parts.layers)
        return self.parts.logits(read("logits", count, count)), now

    def own(self, layer: int, role: str, head: int, stream: Tensor) -> Tensor:
        """What a head computes of a stream: its queries, its keys or values, or those of its group."""
        values = self.parts.into(layer, role, stream)
        return values[head // (self.parts.heads // len(values)) if self.ungrouped else head]

    def roles(self, layer: int) -> Iterator[tuple[str, list[tuple[int, str]]]]:
        """Role -> (head, label) of the receivers of a layer's attention."""
        for role in "qkv":
            count = self.parts.heads if role == "q" or self.ungrouped else self.parts.kv
            kind = "h" if count == self.parts.heads else "kv"
            yield role, [(head, f"a{layer}.{kind}{head}<{role}>") for head in range(count)]

    def changes(self, base: Recorded, other: Recorded) -> dict[str, Tensor]:
        """Sender -> how the stream changes if it alone writes what it wrote on the other prompt."""
        made = {"embed": other.embed - base.embed}
        for layer, (mine, its) in enumerate(zip(base.z, other.z, strict=True)):
            for head in range(self.parts.heads):
                mixed = mine.clone()
                mixed[head] = its[head]
                made[f"a{layer}.h{head}"] = self.parts.write(layer, mixed) - self.parts.write(layer, mine)
            made[f"m{layer}"] = other.mlp[layer] - base.mlp[layer]
        return made


def edge_scores(
    model: EdgeModel, base: Tensor, other: Tensor, answer: int, versus: int, steps: int, along: str = "inputs"
) -> dict[tuple[str, str], float]:
    """(sender, receiver) -> EAP or EAP-IG score of the logit difference, by autograd."""
    with torch.no_grad():
        own, its = (model.run(ids)[1] for ids in (base, other))
        changes = model.changes(own, its)
    total: dict[tuple[str, str], Tensor] = {}
    ends = {"start": (own.embed, its.embed)}
    if along == "activations":
        ends |= {f"a{layer}": pair for layer, pair in enumerate(zip(own.z, its.z, strict=True))}
        ends |= {f"m{layer}": pair for layer, pair in enumerate(zip(own.mlp, its.mlp, strict=True))}
    for step, (what, (here, there)) in product(range(1, steps + 1), ends.items()):
        probes: dict[tuple[str, str], Tensor] = {}
        moved = there + step / steps * (here - there)
        way: dict[str, Any] = {"start": moved} if what == "start" else {"put": {what: moved}}
        logits, _ = model.run(base, probes=probes, **way)
        (logits[answer] - logits[versus]).backward()
        for name, probe in probes.items():
            if probe.grad is not None:  # what is replaced reads nothing
                total[name] = total.get(name, 0) + probe.grad / (steps * len(ends))
    return {
        (s, r): float((change * grad).sum())
        for s, change in changes.items()
        for (r, at), grad in total.items()
        if at == s.partition(".")[0]
    }
