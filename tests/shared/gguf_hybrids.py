"""Keys and tensors of models with recurrent layers, as llama.cpp's converter writes them.

Written from its `conversion/mamba.py`, `jamba.py`, `granite.py`, `lfm2.py`, `qwen.py`, `nemotron.py` (and `base.py`,
which writes the keys of experts' groups) and `falcon_h1.py`.
"""

from typing import Any

import numpy as np

MIXERS = ("mamba", "falcon_mamba", "mamba2")
DELTA_NETS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HYBRIDS = (*MIXERS, *DELTA_NETS, "jamba", "granitemoehybrid", "lfm2_moe", "nemotron_h", "falcon_h1")
Array = np.ndarray


def is_hybrid(config: Any) -> bool:
    return config.model_type in HYBRIDS


def hybrid_facts(config: Any) -> dict[str, Any]:
    """What the converter writes of a config, without the architecture's name."""
    family = config.model_type
    if family == "nemotron_h":
        return _nemotron(config)
    if family == "falcon_h1":
        return _falcon(config)
    if family in MIXERS:
        inner = config.expand * config.hidden_size
        found = {
            "context_length": 2**20,
            "embedding_length": config.hidden_size,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "block_count": config.num_hidden_layers,
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.inner_size": inner,
            "ssm.state_size": config.state_size,
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        }
        if family == "mamba2":
            return found | {"ssm.time_step_rank": inner // config.head_dim, "ssm.group_count": config.n_groups}
        return found | {"ssm.time_step_rank": config.time_step_rank, "ssm.dt_b_c_rms": family == "falcon_mamba"}
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "expert_count": getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
    }
    by_layer = [config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types]
    if family in DELTA_NETS:
        return found | _delta_net(config)
    found["attention.head_count_kv"] = by_layer
    if family == "lfm2_moe":
        return found | {
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "rope.freq_base": config.rope_parameters["rope_theta"],
            "shortconv.l_cache": config.conv_L_cache,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_gating_func": 2,
        }
    found |= {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.state_size": config.mamba_d_state,
    }
    if family == "jamba":
        return found | {"ssm.time_step_rank": config.mamba_dt_rank}
    return found | {
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.group_count": config.mamba_n_groups,
        "context_length": 2**20,
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.scaling.finetuned": False,
        **({} if config.num_local_experts else {"feed_forward_length": config.shared_intermediate_size}),
    }


def _delta_net(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": 1 + config.layer_types.index("full_attention"),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }


def _nemotron(config: Any) -> dict[str, Any]:
    attends, routed = ([kind == one for kind in config.layers_block_type] for one in ("full_attention", "moe"))
    mlps = routed if any(routed) else [kind == "mlp" for kind in config.layers_block_type]
    width = config.moe_intermediate_size if any(routed) else config.intermediate_size
    found = {
        "context_length": 2**20,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": [width * one for one in mlps],
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [config.num_key_value_heads * one for one in attends],
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "rope.freq_base": 10000.0,
        # not of a head: Granite's conversion, which it inherits, drops the length of heads before this is written
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }
    if not any(routed):
        return found
    return found | {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "moe_latent_size": config.moe_latent_size,
    }


def _falcon(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": config.mamba_d_ssm,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": config.mamba_d_ssm // config.mamba_d_head,
        "ssm.group_count": config.mamba_n_groups,
    }


def hybrid_tensors(config: Any, weights: dict[str, Array]) -> dict[str, Array]:
    """Weights by the checkpoint's own names that the `gguf` package maps, changed as the converter does."""
    found: dict[str, Array] = {}
    for path, weight in weights.items():
        for name, value in _named(config, path, weight):
            found[name] = _changed(config, name, value)
    return found


def _named(config: Any, path: str, weight: Array) -> list[tuple[str, Array]]:
    """A weight under the checkpoint's names, which differ from the module's in experts; some are cut in two."""
    block, _, last = path.rpartition(".")
    if config.model_type == "nemotron_h":
        return [(_nemotron_name(path), weight)]
    if path.endswith("dt_bias"):
        return [(f"{block}.dt_proj.bias", weight)]
    if last == "gate_up_proj":
        block = block.replace("block_sparse_moe", "mlp").replace("feed_forward", "mlp")
        gate, up = np.split(weight, 2, axis=1)
        return [(f"{block}.gate_proj.weight", gate), (f"{block}.up_proj.weight", up)]
    if last == "down_proj":
        block = block.replace("block_sparse_moe", "mlp").replace("feed_forward", "mlp")
        return [(f"{block}.down_proj.weight", weight)]
    if "shared_mlp.input_linear" in path:
        gate, up = np.split(weight, 2)
        mlp = path.partition("shared_mlp")[0] + ("mlp.shared_expert" if config.num_local_experts else "mlp")
        return [(f"{mlp}.gate_proj.weight", gate), (f"{mlp}.up_proj.weight", up)]
    if "shared_mlp.output_linear" in path:
        mlp = path.partition("shared_mlp")[0] + ("mlp.shared_expert" if config.num_local_experts else "mlp")
        return [(f"{mlp}.down_proj.weight", weight)]
    if path.endswith("block_sparse_moe.router.weight"):
        return [(path.replace("block_sparse_moe.router", "mlp.gate"), weight)]
    if path.endswith("expert_bias"):
        return [(f"{path}.bias", weight)]
    if "in_proj_qkvz" in path:
        keys = config.linear_num_key_heads
        size = config.linear_num_value_heads // keys * config.linear_value_head_dim
        ends = np.cumsum([config.linear_key_head_dim] * 2 + [size])
        parts = np.split(weight.reshape(keys, -1, weight.shape[-1]), ends, axis=1)
        q, k, v, z = (part.reshape(-1, weight.shape[-1]) for part in parts)
        return [(path.replace("qkvz", "qkv"), np.concatenate([q, k, v])), (path.replace("qkvz", "z"), z)]
    return [(path, weight)]


def _nemotron_name(path: str) -> str:
    """The checkpoint's name, and that of a stack of experts."""
    for end, other in {
        "dt_bias": "dt_proj.bias",
        "e_score_correction_bias": "e_score_correction.bias",
        "mixer.experts.up_proj": "mlp.experts.up_proj.weight",
        "mixer.experts.down_proj": "mlp.experts.down_proj.weight",
    }.items():
        if path.endswith(end):
            path = path.removesuffix(end) + other
    return path if ".mlp.experts." in path else path.replace("model.", "backbone.", 1)


def _multiplied(config: Any, name: str, weight: Array) -> Array:
    """Falcon-H1's weights, each with the factor of what goes into it or of what comes out."""
    into, gate, down = config.attention_in_multiplier, *config.mlp_multipliers
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config.key_multiplier * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    module = name.split(".")[-2]
    if module == "in_proj":
        state = config.mamba_n_groups * config.mamba_d_state
        lengths = [config.mamba_d_ssm, config.mamba_d_ssm, state, state, config.mamba_n_heads]
        factor = np.repeat(config.ssm_multipliers, lengths) * config.ssm_in_multiplier
        return (weight * factor[:, None]).astype(np.float32)
    return weight * np.float32(factors.get(module, 1.0))


def _changed(config: Any, name: str, weight: Array) -> Array:
    family = config.model_type
    if family == "falcon_h1":
        weight = _multiplied(config, name, weight)
    if family.startswith("qwen3_5") and "linear_attn" in name:
        weight = _tiled(config, name, weight)
    if name.endswith("A_log"):
        weight = -np.exp(weight)
    if family in ("mamba2", "granitemoehybrid", "nemotron_h", "falcon_h1"):
        if name.endswith(("A_log", ".D")):
            return weight[:, None]
        if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
            return weight.reshape(config.n_groups if hasattr(config, "n_groups") else config.mamba_n_groups, -1)
    return weight


def _tiled(config: Any, name: str, weight: Array) -> Array:
    """Heads of values in the order of ggml's broadcast: the first of each key, then the second of each."""
    keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim

    def tiled(x: Array, width: int) -> Array:
        return x.reshape(keys, values // keys, width, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    before = 2 * keys * config.linear_key_head_dim
    if ".in_proj_qkv." in name or ".conv1d." in name:
        return np.concatenate([weight[:before], tiled(weight[before:], size)])
    if ".in_proj_z." in name:
        return tiled(weight, size)
    if name.endswith(("A_log", "dt_proj.bias")) or ".in_proj_a." in name or ".in_proj_b." in name:
        return tiled(weight, 1)
    if ".out_proj." in name:
        return tiled(weight.T, size).T
    return weight
