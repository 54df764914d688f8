"""One small random checkpoint of each family with recurrent layers, in which no decay is near 0 or 1."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from families import NO_GROUPS, TINY, VOCAB, single_threaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HYBRID = {**TINY, "num_hidden_layers": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ALONE = {key: value for key, value in NO_GROUPS.items() if key not in ("num_attention_heads", "intermediate_size")}
HEADS = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_chunk_size": 8}
DELTA_NET = {
    **HYBRID,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    # a norm behind the recurrence makes an output near 0 one of size 1, and its rounding with it
    "rms_norm_eps": 1e-2,
}
LFM2 = {
    **HYBRID,
    "block_auto_adjust_ff_dim": False,
    "conv_bias": True,
    "layer_types": ["conv", "full_attention", "conv"],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "lfm2": LFM2,
    "lfm2_moe": {**LFM2, **EXPERTS, "num_dense_layers": 1, "conv_bias": False},
    "mamba": {**ALONE, "state_size": 8, "intermediate_size": 128, "use_bias": True},
    "falcon_mamba": {**ALONE, "state_size": 8, "intermediate_size": 128},
    "mamba2": {**ALONE, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "bamba": {**HYBRID, **HEADS, "mamba_n_groups": 2, "attn_layer_indices": [1]},
    "jamba": {
        **HYBRID,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "granitemoehybrid": {
        **HYBRID,
        **HEADS,
        "mamba_n_groups": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "residual_multiplier": 0.5,
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention"],
    },
    "kimi_linear": {
        **HYBRID,
        "num_key_value_heads": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 20,
        "q_lora_rank": None,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "topk_group": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rms_norm_eps": 1e-2,
    },
    "bailing_hybrid": {
        **HYBRID,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rms_norm_eps": 1e-2,
    },
    "lfm3": {
        **HYBRID,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "conv_bias": True,
        "sliding_window": 6,
        "conv_L_cache": 4,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    },
    "olmo_hybrid": {
        **HYBRID,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rms_norm_eps": 1e-2,
    },
    "recurrent_gemma": {
        **HYBRID,
        "lru_width": 96,
        "attention_window_size": 8,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "minimax": {
        **HYBRID,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "block_size": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "full_attn_alpha_factor": 1.5,
        "full_attn_beta_factor": 0.5,
        "linear_attn_alpha_factor": 1.25,
        "linear_attn_beta_factor": 0.75,
        "mlp_alpha_factor": 1.5,
        "mlp_beta_factor": 1.25,
        "rms_norm_eps": 1e-2,
    },
    "zamba": {
        **HYBRID,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "linear_attention"],
        "rms_norm_eps": 1e-2,
    },
    "zamba2": {
        **HYBRID,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 8,
        "use_mem_rope": True,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
        "rms_norm_eps": 1e-2,
    },
    "nemotron_h": {
        **{key: value for key, value in HYBRID.items() if key != "num_hidden_layers"},
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
        "layer_norm_epsilon": 1e-2,
    },
    "falcon_h1": {
        **HYBRID,
        **HEADS,
        "head_dim": 16,
        "mamba_d_ssm": 128,
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.75,
        "key_multiplier": 1.25,
        "attention_in_multiplier": 0.875,
        "attention_out_multiplier": 1.125,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.625,
        "ssm_multipliers": [0.75, 1.25, 0.875, 1.125, 0.5],
        "mlp_multipliers": [1.25, 0.625],
        "rms_norm_eps": 1e-2,
    },
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 48},
}


def make_recurrent(family: str, folder: Path, **changes: Any) -> PreTrainedModel:
    """Save a random model of a family as a checkpoint, and return it in eager attention."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    single_threaded()
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**CONFIGS[family], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log") and (  # behind a strong decay a norm magnifies rounding
                "linear_attn" in name or family == "kimi_linear"
            ):
                weight.copy_(torch.log(torch.rand_like(weight) + 0.01))
            elif name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
                weight.add_(torch.randn_like(weight) * 0.2)
            elif weight.dim() > 1 and "conv" not in name:
                # norms behind each half magnify rounding
                size = 0.15 if "shared_transf" in name or ".qkv_proj" in name else 0.3
                weight.copy_(torch.randn_like(weight) * size / max(1.0, (weight.shape[-1] / 16) ** 0.5))
            else:
                weight.add_(torch.randn_like(weight) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zeros would leave equal scores to anyone's choice
                buffer.add_(torch.randn_like(buffer) * 0.2)
    model.save_pretrained(folder)
    return model


__all__ = ["CONFIGS", "VOCAB", "make_recurrent"]
