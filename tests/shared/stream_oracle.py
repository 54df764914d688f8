"""The end of a model and its residual stream in torch, from transformers' own modules and parameters."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from oracle import Inputs, run
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Stream:
    """One text in an eager model: every hook point's value, without the batch axis, and the end of the model.

    The norms and the head are the model's modules; `frozen` writes the linear maps that the norms become out again.
    """

    model: PreTrainedModel
    values: dict[str, np.ndarray]
    logits: np.ndarray

    @classmethod
    def of(cls, model: PreTrainedModel, ids: np.ndarray) -> "Stream":
        outcome = run(model, Inputs(ids[None], np.ones_like(ids)[None]))
        return cls(model, {name: value[0] for name, value in outcome.values.items()}, outcome.logits[0])

    @property
    def inner(self) -> Any:
        return self.model.transformer if self.model.config.model_type == "gpt2" else self.model.model

    @property
    def blocks(self) -> Any:
        return self.inner.h if self.model.config.model_type == "gpt2" else self.inner.layers

    @property
    def norm(self) -> torch.nn.Module:
        return self.inner.ln_f if self.model.config.model_type == "gpt2" else self.inner.norm

    @property
    def head(self) -> Tensor:
        """[vocab, hidden]."""
        return self.model.lm_head.weight.detach().double()

    def read(self, stream: np.ndarray, capped: bool = True) -> np.ndarray:
        """The logits of a residual stream [..., hidden]."""
        with torch.no_grad():
            logits = self.model.lm_head(self.norm(torch.from_numpy(np.array(stream))))
            cap = getattr(self.model.config, "final_logit_softcapping", None) if capped else None
            return (logits if cap is None else cap * torch.tanh(logits / cap)).numpy()

    def frozen(self, norm: torch.nn.Module, stream: np.ndarray, part: np.ndarray) -> Tensor:
        """What a part [..., hidden] of a stream [hidden] adds to a norm's output, its scale being the stream's."""
        whole, piece = (torch.from_numpy(np.array(one)).double() for one in (stream, part))
        weight = norm.weight.detach().double()
        if self.model.config.model_type == "gpt2":
            scale = torch.sqrt(whole.var(unbiased=False) + norm.eps)
            return weight * (piece - piece.mean(-1, keepdim=True)) / scale
        epsilon = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
        gain = 1 + weight if self.model.config.model_type == "gemma2" else weight
        return gain * piece / torch.sqrt((whole**2).mean() + epsilon)

    def shares(self, layer: int, position: int) -> np.ndarray:
        """[head, hidden]: what each head adds to the stream at a position."""
        z, block = torch.from_numpy(self.values[f"blocks.{layer}.attn.hook_z"][position]).double(), self.blocks[layer]
        if self.model.config.model_type == "gpt2":
            rows = block.attn.c_proj.weight.detach().double()
        else:
            rows = block.self_attn.o_proj.weight.detach().double().T
        shares = torch.einsum("hd,hdm->hm", z, rows.reshape(*z.shape, -1))
        if self.model.config.model_type != "gemma2":
            return shares.numpy()
        return self.frozen(block.post_attention_layernorm, shares.sum(0).numpy(), shares.numpy()).numpy()
