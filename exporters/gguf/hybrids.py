"""llama.cpp's architectures with recurrent layers: their configs, names and orders of rows.

Those with Mamba-2 and attention stand in `mamba2_hybrids`.
"""

from typing import Any

import numpy as np

from exporters.gguf.facts import ModelFacts
from exporters.gguf.layout import (
    IN_ORDER,
    LAYER_MODULES,
    MODULES_OUTSIDE,
    NORMS_BEHIND,
    Architecture,
    Config,
    Order,
    by_heads,
)

SIGMOID = 2  # llama.cpp's number of the function that makes weights of a router's logits
CONV, STATE_WEIGHTS = "ssm_conv1d", {"ssm_a": "A_log", "ssm_d": "D"}
ATTENDS = {True: "full_attention", False: "linear_attention"}
FINAL_LAYERNORM = {**MODULES_OUTSIDE, "output_norm": "model.final_layernorm"}
BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}


def mixer(path: str, **names: str) -> dict[str, str]:
    """Names of a Mamba mixer: in and out projections, convolution, A and D beside those that are given."""
    own = {"ssm_in": "in_proj", CONV: "conv1d", **STATE_WEIGHTS, "ssm_out": "out_proj", **names}
    return {name: f"{path}.{module}" for name, module in own.items()}


MAMBA_NAMES = {"ssm_x": "x_proj", "ssm_dt": "dt_proj"}
MAMBA2_NAMES = {"ssm_dt.bias": "dt_bias", "ssm_norm": "norm"}


def has_bias(facts: ModelFacts, module: str) -> bool:
    """Whether a module of the layers has a bias."""
    return any(name.endswith(f".{module}.bias") for name in facts.header.tensors)


def expand(facts: ModelFacts, config: Config) -> int:
    """How many times as wide as the stream a mixer is."""
    inner, hidden = facts.size("ssm.inner_size"), config["hidden_size"]
    if inner % hidden:
        raise facts.wrong("ssm.inner_size", inner, f"a multiple of {hidden}")
    return int(inner // hidden)


def _mamba_alone(facts: ModelFacts) -> Config:
    hidden, inner = facts.size("embedding_length"), facts.size("ssm.inner_size")
    if inner % hidden:
        raise facts.wrong("ssm.inner_size", inner, f"a multiple of {hidden}")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": facts.size("block_count"),
        "expand": inner // hidden,
        "state_size": facts.size("ssm.state_size"),
        "conv_kernel": facts.size("ssm.conv_kernel"),
        "layer_norm_epsilon": facts.number("attention.layer_norm_rms_epsilon"),
    }


def _biases(facts: ModelFacts) -> Config:
    return {"use_bias": has_bias(facts, "ssm_in"), "use_conv_bias": has_bias(facts, CONV)}


def mamba(facts: ModelFacts, config: Config) -> Config:
    """Mamba; with norms of dt, B and C it is Falcon-Mamba."""
    rank = {"time_step_rank": facts.size("ssm.time_step_rank")}
    family = {"model_type": "falcon_mamba"} if facts.flag("ssm.dt_b_c_rms") else {}
    return family | rank | _biases(facts)


def mamba2(facts: ModelFacts, config: Config) -> Config:
    """Mamba-2: the rank of a time step is the number of heads there."""
    heads, inner = facts.size("ssm.time_step_rank"), facts.size("ssm.inner_size")
    if inner % heads:
        raise facts.wrong("ssm.time_step_rank", heads, f"a divisor of {inner}")
    sizes = {"num_heads": heads, "head_dim": inner // heads}
    return sizes | {"n_groups": facts.size("ssm.group_count")} | _biases(facts)


def expert_counts(facts: ModelFacts) -> Config:
    """How many experts there are, and how many a token chooses; none where the file has none."""
    count = facts.count("expert_count")
    return {"count": count, "chosen": facts.size("expert_used_count") if count else 0}


def sigmoid_experts(facts: ModelFacts) -> Config:
    """The same of a router by sigmoids, and what its weights are multiplied by."""
    gating, scale = facts.maybe("expert_gating_func", SIGMOID), facts.maybe("expert_weights_scale")
    if gating != SIGMOID:
        raise facts.wrong("expert_gating_func", gating, f"{SIGMOID} (sigmoid)")
    return expert_counts(facts) | {"scale": scale or 1.0}


def jamba(facts: ModelFacts, config: Config) -> Config:
    """Jamba: which layers attend, and which have experts, is told by a period and an offset."""
    layers, experts = config["num_hidden_layers"], expert_counts(facts)
    period, offset = _period(facts, by_heads(facts, layers), "attention")
    expert_period, expert_offset = layers + 1, layers  # none
    if experts["count"] > 1:
        routed = [f"blk.{i}.ffn_gate_inp.weight" in facts.header.tensors for i in range(layers)]
        expert_period, expert_offset = _period(facts, routed, "experts")
    return {
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "num_experts": experts["count"] or 1,
        "num_experts_per_tok": experts["chosen"] or 1,
        "mamba_d_state": facts.size("ssm.state_size"),
        "mamba_d_conv": facts.size("ssm.conv_kernel"),
        "mamba_expand": expand(facts, config),
        "mamba_dt_rank": facts.size("ssm.time_step_rank"),
        "mamba_conv_bias": has_bias(facts, CONV),
        "mamba_proj_bias": has_bias(facts, "ssm_in"),
    }


def lfm2(facts: ModelFacts, config: Config) -> Config:
    """LFM2: short convolutions, and attention in the layers that have heads for keys."""
    names, kinds = facts.header.tensors, {True: "full_attention", False: "conv"}
    return {
        "layer_types": [kinds[one] for one in by_heads(facts, config["num_hidden_layers"])],
        "conv_L_cache": facts.size("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in names),
        "norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,  # the file states the width that it has
    }


def lfm2_moe(facts: ModelFacts, config: Config) -> Config:
    """The same with experts behind some layers of one MLP."""
    experts = sigmoid_experts(facts)
    return lfm2(facts, config) | {
        "moe_intermediate_size": facts.size("expert_feed_forward_length"),
        "num_dense_layers": facts.count("leading_dense_block_count"),
        "num_experts": experts["count"],
        "num_experts_per_tok": experts["chosen"],
        "use_expert_bias": has_bias(facts, "exp_probs_b"),
        "norm_topk_prob": True,
        "routed_scaling_factor": experts["scale"],
    }


def delta_net(facts: ModelFacts, config: Config) -> Config:
    """Qwen3-Next and Qwen3.5: gated DeltaNet, and gated attention in each layer of an interval."""
    heads, inner = facts.size("ssm.time_step_rank"), facts.size("ssm.inner_size")
    if inner % heads:
        raise facts.wrong("ssm.inner_size", inner, f"a multiple of {heads}")
    return {
        "layer_types": [ATTENDS[one] for one in by_interval(facts, config["num_hidden_layers"])],
        "linear_conv_kernel_dim": facts.size("ssm.conv_kernel"),
        "linear_key_head_dim": facts.size("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": facts.size("ssm.group_count"),
        "linear_num_value_heads": heads,
    }


def routed_delta_net(facts: ModelFacts, config: Config) -> Config:
    """The same with experts in each layer, and one beside them."""
    experts = expert_counts(facts)
    return delta_net(facts, config) | {
        "num_experts": experts["count"],
        "num_experts_per_tok": experts["chosen"],
        "moe_intermediate_size": facts.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": facts.size("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def by_interval(facts: ModelFacts, layers: int) -> list[bool]:
    """Which layers attend: the last of each interval."""
    interval = facts.size("full_attention_interval", 4)
    return [not (i + 1) % interval for i in range(layers)]


def _period(facts: ModelFacts, chosen: list[bool], what: str) -> tuple[int, int]:
    """Period and offset of layers of a kind; others are refused."""
    first = chosen.index(True) if True in chosen else len(chosen)
    rest = [i - first for i, one in enumerate(chosen) if one and i > first]
    period = rest[0] if rest else max(len(chosen), first + 1)
    if [i % period == first % period and i >= first for i in range(len(chosen))] != chosen or first >= period:
        raise facts.wrong(f"layers with {what}", [int(one) for one in chosen], "one in each period")
    return period, first


def _tiled(config: Config, size: int) -> Any:
    """Rows of values, each key's heads together, in a file that has the first head of each key first."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).ravel()


def value_order(module: str, config: Config) -> Order:
    """Qwen3.5's heads of values, of which several share a key."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys == values or values % keys:
        return IN_ORDER
    size = config["linear_value_head_dim"]
    if module in ("attn_qkv", CONV):
        before = 2 * keys * config["linear_key_head_dim"]
        return Order(np.concatenate([np.arange(before), before + _tiled(config, size)]))
    if module == "ssm_out":
        return Order(None, _tiled(config, size))
    if module in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt.bias"):
        return Order(_tiled(config, size if module == "attn_gate" else 1))
    return IN_ORDER


def projection_order(module: str, config: Config) -> Order:
    """Qwen3-Next's q, k, v and z of each key's head together, in a file that has all q, all k, all v, then z."""
    if module not in ("attn_qkv", "attn_gate"):
        return IN_ORDER
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width, size = keys * config["linear_key_head_dim"], values * config["linear_value_head_dim"]
    starts = ((0, width), (width, width), (2 * width, size), (2 * width + size, size))
    return Order(np.concatenate([start + np.arange(count).reshape(keys, -1) for start, count in starts], 1).ravel())


JAMBA_LAYER = {
    **{key: name for key, name in LAYER_MODULES.items() if key.startswith("attn_")},
    **mixer("mamba", **MAMBA_NAMES, **{f"ssm_{one}_norm": f"{one}_layernorm" for one in ("dt", "b", "c")}),
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{one}": f"feed_forward.{one}_proj" for one in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{one}_exps": f"feed_forward.experts.{{expert}}.{one}_proj" for one in ("gate", "up", "down")},
}
DELTA_NET_LAYER = {
    **LAYER_MODULES,
    **NORMS_BEHIND,
    CONV: "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
ROUTED = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
    **{f"ffn_{one}_exps": f"mlp.experts.{{expert}}.{one}_proj" for one in ("gate", "up", "down")},
}
QWEN35_LAYER = {
    **DELTA_NET_LAYER,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
QWEN3_NEXT_LAYER = {
    **DELTA_NET_LAYER,
    **ROUTED,
    **dict.fromkeys(("attn_qkv", "attn_gate"), "linear_attn.in_proj_qkvz"),
    "ssm_ba": "linear_attn.in_proj_ba",
}


LFM2_LAYER = {
    **{"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj"},
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    **{f"attn_{one}_norm": f"self_attn.{one}_layernorm" for one in "qk"},
    **{f"ffn_{name}": f"feed_forward.{own}" for name, own in {"gate": "w1", "down": "w2", "up": "w3"}.items()},
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
LFM2_MOE_LAYER = {
    **LFM2_LAYER,
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **{
        f"ffn_{name}_exps": f"feed_forward.experts.{{expert}}.{own}"
        for name, own in {"gate": "w1", "down": "w2", "up": "w3"}.items()
    },
}


def _lfm2(family: str, config: Any, layer: dict[str, str]) -> Architecture:
    # the norm behind the last layer bears either name there
    outside = {**MODULES_OUTSIDE, **dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")}
    return Architecture(family, config, layer, outside=outside, attending=by_heads, convolution="shortconv.conv")


def _mamba(family: str, config: Any, names: dict[str, str]) -> Architecture:
    return Architecture(
        family,
        config,
        {"attn_norm": "norm", **mixer("mixer", **names)},
        outside=BACKBONE,
        blocks="backbone.layers",
        sizes=_mamba_alone,
        convolution=CONV,
        decays=("ssm_a",),
        flat=("ssm_norm",) + (tuple(STATE_WEIGHTS) if family == "mamba2" else ()),
    )


def _delta_net(family: str, config: Any, layer: dict[str, str], order: Any) -> Architecture:
    return Architecture(
        family,
        config,
        layer,
        attending=by_interval,
        convolution=CONV,
        decays=("ssm_a",),
        norm_offset=1.0,
        plain_norms=("ssm_norm",),
        reordered=order,
        further=True,
    )


HYBRIDS = {
    "jamba": Architecture(
        "jamba",
        jamba,
        JAMBA_LAYER,
        outside=FINAL_LAYERNORM,
        attending=by_heads,
        convolution=CONV,
        decays=("ssm_a",),
    ),
    "lfm2": _lfm2("lfm2", lfm2, LFM2_LAYER),
    "lfm2moe": _lfm2("lfm2_moe", lfm2_moe, LFM2_MOE_LAYER),
    "mamba": _mamba("mamba", mamba, MAMBA_NAMES),
    "mamba2": _mamba("mamba2", mamba2, MAMBA2_NAMES),
    "qwen35": _delta_net("qwen3_5_text", delta_net, QWEN35_LAYER, value_order),
    "qwen35moe": _delta_net("qwen3_5_moe_text", routed_delta_net, {**QWEN35_LAYER, **ROUTED}, value_order),
    "qwen3next": _delta_net("qwen3_next", routed_delta_net, QWEN3_NEXT_LAYER, projection_order),
}
