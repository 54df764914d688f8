"""A tiny config of any decoder-only family of transformers: its own defaults with every size made small.

One layer of each kind that the default config has stays, two at least and four at most. Families of whose config a
size needs another value than its name says have an entry in `SPECIAL`.
"""

from __future__ import annotations

from typing import Any

from families import CONFIGS, VOCAB, WINDOW

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # widths
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_dim", "attention_hidden_size", "emb_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dim_ff", "ffn_hidden_size", "dff"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size"), 80),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 48),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "kv_channels"), 16),
    "rotary_dim": 8,
    "query_pre_attn_scalar": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 64,
    # latents
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "hidden_size_per_layer_input": 12,
    "laurel_rank": 6,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    # lengths
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "keep_window_size"), 64),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size", "sliding_window_size"), WINDOW),
}
# What a name in `SMALL` does not say: sizes that hang together, and switches of families that are off by default.
ROTATED = {"rope_type": "default", "rope_theta": 10000.0}
LATENT = [
    "axk1",
    "axk2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_linear",
    "minicpm3",
    "youtu",
]
SPECIAL: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    "hyperclovax": {"residual_multiplier": 0.5},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    **{key: {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]} for key in ("lfm2", "lfm2_moe")},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
    },
    "llama4_text": {"floor_scale": 4, "moe_layers": [1, 3]},
    **{key: {"num_key_value_heads": 4, "head_dim": 8} for key in LATENT},
    "longcat_flash": {"num_key_value_heads": 4, "head_dim": 8, "zero_expert_num": 2, "moe_topk": 3},
    "deepseek_v2": {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": None, "sliding_attention": ROTATED}},
    "gemma4_unified_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {1: {"head_dim": 32}},
    },
    **{
        key: {"shared_intermediate_size": 48, "residual_multiplier": 0.5}
        for key in ("granitemoe_swa", "granitemoeshared")
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
    },
}


def tiny_config(family: str) -> dict[str, Any]:
    """What to change in a family's default config: a table for `AutoConfig.for_model(family, **changes)`.

    A family of `families.CONFIGS` has that one.
    """
    from transformers import AutoConfig

    if family in CONFIGS:
        return CONFIGS[family]
    defaults = AutoConfig.for_model(family).to_dict()
    found = {name: SMALL[name] for name, value in defaults.items() if name in SMALL and _counts(name, value)}
    depth = next(name for name in LAYERS if name in defaults)
    kept = _kinds(defaults, defaults[depth])
    by_layer = {name: [value[i] for i in kept] for name, value in _lists(defaults, defaults[depth]).items()}
    shrunk = {name: [SMALL[name]] * len(kept) if name in SMALL else value for name, value in by_layer.items()}
    return {**found, **shrunk, depth: len(kept), **SPECIAL.get(family, {})}


def _counts(name: str, value: Any) -> bool:
    """Whether a default is a size: one that is off stays off."""
    return name.endswith("_token_id") or (isinstance(value, int) and not isinstance(value, bool) and value > 0)


def _lists(defaults: dict[str, Any], depth: int) -> dict[str, list[Any]]:
    """The entries that say something of every layer."""
    return {name: value for name, value in defaults.items() if isinstance(value, list) and len(value) == depth}


def _kinds(defaults: dict[str, Any], depth: int) -> list[int]:
    """The first layer of each kind, at most four of them and at least two layers."""
    lists = [value for value in _lists(defaults, depth).values() if not isinstance(value[0], list)]
    first: dict[tuple[Any, ...], int] = {}
    for layer in range(depth):
        first.setdefault(tuple(value[layer] for value in lists), layer)
    kept = [*first.values()][:4]
    return kept if len(kept) > 1 else [0, 1]
