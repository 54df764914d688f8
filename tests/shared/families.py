"""One small random checkpoint of every family: configs, and how to make them. torch is imported when one is made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 101
WINDOW = 8
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GROUPS = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
GEMMA = {**TINY, "head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": VOCAB, "n_positions": 64},
    "gpt_neox": NO_GROUPS,
    "opt": {**NO_GROUPS, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "llama": TINY,
    "mistral": {**TINY, "sliding_window": WINDOW},
    "qwen2": TINY,
    "qwen3": {**TINY, "head_dim": 32},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": TINY,
    "olmo2": TINY,
    "cohere": {**TINY, "logit_scale": 0.25},
    "mixtral": {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Only where a test names it: attention alone, of heads that are narrower than the stream.
ATTENTION_ONLY = {"hooked_transformer": {**CONFIGS["gpt2"], "attn_only": True, "head_dim": 12}}

REPRESENTATIVE = ("gpt2", "llama", "gemma2")  # the families of the default run; a test of any other one is slow
# A property test draws its family from `families`.
drawn_families = pytest.mark.parametrize(
    "families",
    [pytest.param(REPRESENTATIVE, id="representative"), pytest.param((*CONFIGS,), id="all", marks=pytest.mark.slow)],
)


def single_threaded() -> None:
    """Let torch run on one thread: the workers of a run have a core each."""
    import torch

    torch.set_num_threads(1)


def make_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model of a family, in eager attention; norms are perturbed too, so that no two weights are equal."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import exporters.transformers.hooked_transformer  # noqa: F401 - transformers learns of the family

    single_threaded()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**{**CONFIGS, **ATTENTION_ONLY}.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model


def make_checkpoint(family: str, folder: Path, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Save `make_model`'s model as a checkpoint."""
    model = make_model(family, seed, **changes)
    model.save_pretrained(folder)
    return model
