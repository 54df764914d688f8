"""TransformerLens' `HookedTransformer` as a family of transformers: GPT-2 with the freedoms of its config.

Heads of any width, norms of its five kinds, SoLU, layers without an MLP, a bias of the unembedding. Classes register
themselves with transformers' own tables, so that a checkpoint of this family opens as any other.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    PreTrainedModel,
)
from transformers.activations import ACT2FN
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from exporters.hooked_transformer.settings import HOOKED_TRANSFORMER, NORM_KINDS, SOLU, SOLU_NORMED


class HookedTransformerConfig(GPT2Config):
    """GPT-2's config with the words of `settings.converted`."""

    model_type = HOOKED_TRANSFORMER

    head_dim: int | None = None
    normalization: str | None = "LN"
    final_normalization: str | None = "LN"
    attn_only: bool = False
    attn_scale: float | None = None


def of_one_head(config: HookedTransformerConfig, **changes: int) -> HookedTransformerConfig:
    """A config that GPT-2's own modules accept, whose heads divide the stream."""
    changed = copy(config)
    for name, value in {"n_head": 1, **changes}.items():
        setattr(changed, name, value)
    return changed


def make_norm(kind: str | None, size: int, eps: float) -> nn.Module:
    """A norm by its name in the config; None is no norm."""
    if kind is None:
        return nn.Identity()
    return LlamaRMSNorm(size, eps) if NORM_KINDS[kind] == "rms" else nn.LayerNorm(size, eps)


class SoLU(nn.Module):
    """x softmax(x) over the neurons (Elhage et al. 2022, transformer-circuits.pub/2022/solu)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., d_mlp] of the same."""
        return x * torch.softmax(x, -1)


class HookedMlp(nn.Module):
    """An MLP of two layers; behind SoLU there may be a norm."""

    def __init__(self, config: HookedTransformerConfig) -> None:
        super().__init__()
        inner, kind = config.n_inner or 4 * config.n_embd, config.activation_function
        self.c_fc = Conv1D(inner, config.n_embd)
        self.act = SoLU() if kind in (SOLU, SOLU_NORMED) else ACT2FN[kind]
        self.ln = nn.LayerNorm(inner, config.layer_norm_epsilon) if kind == SOLU_NORMED else nn.Identity()
        self.c_proj = Conv1D(config.n_embd, inner)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, d_model] of the same."""
        return self.c_proj(self.ln(self.act(self.c_fc(x))))


class HookedAttention(GPT2Attention):
    """GPT-2's attention with heads of any width."""

    def __init__(self, config: HookedTransformerConfig, layer: int) -> None:
        super().__init__(of_one_head(config), layer_idx=layer)
        size = config.head_dim or config.n_embd // config.n_head
        self.config, self.num_heads, self.head_dim = config, config.n_head, size
        self.split_size = inner = config.n_head * size
        scale = size**0.5 if config.attn_scale is None else config.attn_scale
        self.scaling = 1 / scale / (layer + 1 if config.scale_attn_by_inverse_layer_idx else 1)
        self.c_attn, self.c_proj = Conv1D(3 * inner, config.n_embd), Conv1D(config.n_embd, inner)


class HookedBlock(nn.Module):
    """A layer: attention, and an MLP unless the model has none."""

    def __init__(self, config: HookedTransformerConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = make_norm(config.normalization, config.n_embd, config.layer_norm_epsilon)
        self.attn = HookedAttention(config, layer)
        if not config.attn_only:
            self.ln_2 = make_norm(config.normalization, config.n_embd, config.layer_norm_epsilon)
            self.mlp = HookedMlp(config)

    def forward(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        """[batch, seq, d_model] of the same; further arguments are those of GPT-2's attention."""
        x = x + self.attn(self.ln_1(x), *arguments, **keywords)[0]
        return x + self.mlp(self.ln_2(x)) if hasattr(self, "mlp") else x


def rebuild(model: PreTrainedModel, config: HookedTransformerConfig) -> None:
    """Give a model of GPT-2 without layers those of a config, and its last norm."""
    stack: Any = model.transformer
    model.config = stack.config = config
    stack.h = nn.ModuleList(HookedBlock(config, layer) for layer in range(config.n_layer))
    stack.ln_f = make_norm(config.final_normalization, config.n_embd, config.layer_norm_epsilon)


class HookedTransformerForCausalLM(GPT2LMHeadModel):
    """GPT-2's model with these layers, and an unembedding with a bias."""

    config_class = HookedTransformerConfig
    _tied_weights_keys = None

    def __init__(self, config: HookedTransformerConfig) -> None:
        super().__init__(of_one_head(config, n_layer=0))
        rebuild(self, config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)


class HookedTransformerForTokenClassification(GPT2ForTokenClassification):
    """The same with an unembedding into something else than its tokens: a class at each of them."""

    config_class = HookedTransformerConfig

    def __init__(self, config: HookedTransformerConfig) -> None:
        super().__init__(of_one_head(config, n_layer=0))
        rebuild(self, config)


AutoConfig.register(HOOKED_TRANSFORMER, HookedTransformerConfig)
AutoModelForCausalLM.register(HookedTransformerConfig, HookedTransformerForCausalLM)
AutoModelForTokenClassification.register(HookedTransformerConfig, HookedTransformerForTokenClassification)
