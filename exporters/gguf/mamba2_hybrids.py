"""llama.cpp's architectures with Mamba-2 and attention: Granite 4, Nemotron-H and Falcon-H1."""

from dataclasses import replace

from exporters.gguf.facts import ModelFacts
from exporters.gguf.hybrids import (
    ATTENDS,
    CONV,
    FINAL_LAYERNORM,
    MAMBA2_NAMES,
    STATE_WEIGHTS,
    expand,
    expert_counts,
    has_bias,
    mixer,
    sigmoid_experts,
)
from exporters.gguf.layout import KEY_HEADS, LAYER_MODULES, MLP_WIDTH, Architecture, Config, by_heads, by_widths
from mionnx.errors import ExportError


def granite_hybrid(facts: ModelFacts, config: Config) -> Config:
    """Granite 4: Mamba-2 and attention without a rotation, each with an MLP, and experts beside it or none."""
    if facts.flag("rope.scaling.finetuned"):
        raise facts.wrong("rope.scaling.finetuned", True, "False: a hybrid that rotates is Bamba, which is not read")
    experts, heads = expert_counts(facts), facts.size("ssm.time_step_rank")
    scales = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {
        **{key: facts.number(name) for key, name in scales.items()},
        "layer_types": [ATTENDS[one] for one in by_heads(facts, config["num_hidden_layers"])],
        "num_local_experts": experts["count"],
        "num_experts_per_tok": experts["chosen"],
        "shared_intermediate_size": facts.size("expert_shared_feed_forward_length", config["intermediate_size"]),
        "position_embedding_type": "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": facts.size("ssm.inner_size") // heads,
        "mamba_n_groups": facts.size("ssm.group_count"),
        "mamba_d_state": facts.size("ssm.state_size"),
        "mamba_d_conv": facts.size("ssm.conv_kernel"),
        "mamba_expand": expand(facts, config),
        "mamba_conv_bias": has_bias(facts, CONV),
        "mamba_proj_bias": has_bias(facts, "ssm_in"),
        "attention_bias": has_bias(facts, "attn_q"),
    }


def nemotron_h(facts: ModelFacts, config: Config) -> Config:
    """Nemotron-H: each layer is a mixer, attention or an MLP behind one norm; no rotation."""
    _check_output(facts, "transformers' Nemotron-H has no table that is embedding and unembedding in one")
    heads = facts.size("ssm.time_step_rank")
    return {
        "layers_block_type": _halves(facts, config["num_hidden_layers"]),
        "layer_norm_epsilon": facts.number("attention.layer_norm_rms_epsilon"),
        "mamba_num_heads": heads,
        "mamba_head_dim": _head_size(facts, heads),
        "n_groups": facts.size("ssm.group_count"),
        "ssm_state_size": facts.size("ssm.state_size"),
        "conv_kernel": facts.size("ssm.conv_kernel"),
        "use_conv_bias": has_bias(facts, CONV),
        "use_bias": has_bias(facts, "ssm_in"),
        "attention_bias": has_bias(facts, "attn_q"),
        "mlp_bias": has_bias(facts, "ffn_up"),
    }


def routed_nemotron_h(facts: ModelFacts, config: Config) -> Config:
    """The same with experts, and one beside them, in place of MLPs."""
    latent, experts = facts.count("moe_latent_size"), sigmoid_experts(facts)
    if latent:
        raise facts.wrong("moe_latent_size", latent, "0: experts on a narrower stream (latent) are not read")
    groups = facts.count("expert_group_count") or 1
    return nemotron_h(facts, config) | {
        "n_routed_experts": experts["count"],
        "num_experts_per_tok": experts["chosen"],
        "moe_intermediate_size": facts.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": facts.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": facts.flag("expert_weights_norm"),
        "routed_scaling_factor": experts["scale"],
        "n_group": groups,
        "topk_group": facts.size("expert_group_used_count", 1 if groups == 1 else None),
    }


def _halves(facts: ModelFacts, layers: int) -> list[str]:
    """What each layer is: it attends where it has heads for keys, is an MLP or experts where it has their width."""
    attends, fed = by_heads(facts, layers), by_widths(facts, layers)
    if any(both == (True, True) for both in zip(attends, fed, strict=True)):
        raise facts.wrong(KEY_HEADS, [int(one) for one in attends], f"0 where {MLP_WIDTH} is not: a layer is one half")
    routed = [f"blk.{i}.ffn_gate_inp.weight" in facts.header.tensors for i in range(layers)]
    mlps = [("moe" if one else "mlp") for one in routed]
    return [mlps[i] if fed[i] else ATTENDS[attends[i]] for i in range(layers)]


def _head_size(facts: ModelFacts, heads: int) -> int:
    inner = facts.size("ssm.inner_size")
    if inner % heads:
        raise facts.wrong("ssm.inner_size", inner, f"a multiple of {heads}")
    return inner // heads


def falcon_h1(facts: ModelFacts, config: Config) -> Config:
    """Falcon-H1: a mixer and attention side by side in each layer. Its factors are in the weights of a file."""
    _check_factors(facts)
    _check_output(facts, "its embeddings have a factor in them which the logits do not have, and no key states either")
    heads = facts.size("ssm.time_step_rank")
    return {
        "mamba_d_ssm": facts.size("ssm.inner_size"),
        "mamba_n_heads": heads,
        "mamba_d_head": _head_size(facts, heads),
        "mamba_n_groups": facts.size("ssm.group_count"),
        "mamba_d_state": facts.size("ssm.state_size"),
        "mamba_d_conv": facts.size("ssm.conv_kernel"),
        "mamba_conv_bias": has_bias(facts, CONV),
        "mamba_proj_bias": has_bias(facts, "ssm_in"),
        "mamba_rms_norm": any(name.endswith(".ssm_norm.weight") for name in facts.header.tensors),
        "mamba_norm_before_gate": False,  # llama.cpp has no other, nor a key for it
        "projectors_bias": has_bias(facts, "ssm_out"),
        "attention_bias": has_bias(facts, "attn_q"),
        "mlp_bias": has_bias(facts, "ffn_up"),
    }


def _check_factors(facts: ModelFacts) -> None:
    """Refuse a file of whose weights it cannot be told which factors are in them."""
    before = f"{facts.architecture}."
    # a fork's converter stated them: https://github.com/tiiuae/llama.cpp-Falcon-H1/issues/2
    keys = [key for key in facts.header.metadata if key.startswith(before) and ("multiplier" in key or "mup" in key)]
    if keys:
        raise ExportError(
            f"{facts.header.file} states {', '.join(sorted(keys))}: llama.cpp's converter puts factors into the "
            f"weights and states none, so it cannot be told whether these weights have them"
        )


def _check_output(facts: ModelFacts, reason: str) -> None:
    if "output.weight" not in facts.header.tensors:
        raise ExportError(f"{facts.header.file} has no output.weight, and is not supported without: {reason}")


SHARED_MLP = {"ffn_gate": "shared_mlp.input_linear", "ffn_up": "shared_mlp.input_linear"}
GRANITE_HYBRID_LAYER = {
    **LAYER_MODULES,
    **mixer("mamba", **MAMBA2_NAMES),
    **SHARED_MLP,
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
NEMOTRON_H_LAYER = {
    "attn_norm": "norm",
    **mixer("mixer", **MAMBA2_NAMES),
    **{f"attn_{name}": f"mixer.{own}_proj" for name, own in {"q": "q", "k": "k", "v": "v", "output": "o"}.items()},
    **{f"ffn_{one}": f"mixer.{one}_proj" for one in ("up", "down")},
}
NEMOTRON_H_MOE_LAYER = {
    **NEMOTRON_H_LAYER,
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    **{f"ffn_{one}_shexp": f"mixer.shared_experts.{one}_proj" for one in ("up", "down")},
    **{f"ffn_{one}_exps": f"mixer.experts.{{expert}}.{one}_proj" for one in ("up", "down")},
}
FALCON_H1_LAYER = {
    **{key: name for key, name in LAYER_MODULES.items() if key.startswith("attn_")},
    **mixer("mamba", **MAMBA2_NAMES),
    # llama.cpp calls it so, without ".weight"
    **dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
    **{f"ffn_{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
}
MAMBA2 = Architecture(
    "granitemoehybrid",
    granite_hybrid,
    GRANITE_HYBRID_LAYER,
    interleaved=True,
    attending=by_heads,
    convolution=CONV,
    decays=("ssm_a",),
    flat=("ssm_norm", *STATE_WEIGHTS),
)
NEMOTRON_H = replace(
    MAMBA2,
    model_type="nemotron_h",
    config=nemotron_h,
    layer=NEMOTRON_H_LAYER,
    outside={"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"},
    fed=by_widths,
    rotates=False,
    further=True,
)
MAMBA2_HYBRIDS = {
    "falcon-h1": replace(
        MAMBA2,
        model_type="falcon_h1",
        config=falcon_h1,
        layer=FALCON_H1_LAYER,
        outside=FINAL_LAYERNORM,
        interleaved=False,
        attending=None,
    ),
    "granitehybrid": MAMBA2,
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": replace(NEMOTRON_H, config=routed_nemotron_h, layer=NEMOTRON_H_MOE_LAYER),
}
