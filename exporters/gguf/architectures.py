"""llama.cpp's architectures: which family of transformers each is, and how its config and tensors are called there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from exporters.gguf.facts import ModelFacts, rope, special_ids
from exporters.gguf.header import Header
from mionnx.errors import ExportError, boundary, nearest

LAYER = {  # module of a layer, llama.cpp's name -> transformers' in most families
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
MODULES_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
KEY_HEADS = "attention.head_count_kv"
TOKEN_TABLE, UNEMBEDDING = "model.embed_tokens.weight", "lm_head.weight"
SPECIAL_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures."""

    model_type: str
    config: Callable[[ModelFacts, Config], Config] = lambda facts, config: {}  # what the config says beyond `_common`
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    # Rows of the query's and key's projections are stored for a rotation of neighbouring values.
    interleaved: bool = False
    norm_offset: float = 0.0  # what llama.cpp's files have added to the weights of norms
    outside: Mapping[str, str] = field(default_factory=lambda: MODULES_OUTSIDE)
    # A mixer of layers without attention, of which the file says that they have no heads for keys.
    mixer: str | None = None
    convolution: str | None = None  # [hidden, taps] in the file, [hidden, 1, taps] in transformers


def _llama(facts: ModelFacts, config: Config) -> Config:
    names = facts.header.tensors
    # no key says it: transformers' config has to, and the tensors tell
    biased = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {key: name in names for key, name in biased.items()}


def _granite(facts: ModelFacts, config: Config) -> Config:
    scales = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return _llama(facts, config) | {key: facts.number(name) for key, name in scales.items()}


def _starcoder2(facts: ModelFacts, config: Config) -> Config:
    window = facts.maybe("attention.sliding_window") or None
    return {"norm_epsilon": facts.number("attention.layer_norm_epsilon"), "sliding_window": window, "use_bias": True}


def _gemma2(facts: ModelFacts, config: Config) -> Config:
    return {
        # llama.cpp's own defaults, where an older file has no key
        "attn_logit_softcapping": facts.maybe("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.maybe("final_logit_softcapping", 30.0),
        "sliding_window": facts.size("attention.sliding_window", 4096),
        "layer_types": _layer_types(config, 2),
        "query_pre_attn_scalar": _query_scalar(config, 46),
    }


def _gemma3(facts: ModelFacts, config: Config) -> Config:
    # layers that slide rotate by a base of their own, without the scaling of the others
    local = {"rope_type": "default", "rope_theta": facts.maybe("rope.freq_base_swa", 10000.0)}
    return {
        "attn_logit_softcapping": facts.maybe("attn_logit_softcapping"),
        "final_logit_softcapping": facts.maybe("final_logit_softcapping"),
        "sliding_window": facts.size("attention.sliding_window"),
        "layer_types": _stated_types(facts, config),
        "query_pre_attn_scalar": _query_scalar(config, 62),
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


def _layer_types(config: Config, period: int) -> list[str]:
    """Every layer of a number slides but the last of each period."""
    layers = range(1, config["num_hidden_layers"] + 1)
    return ["sliding_attention" if layer % period else "full_attention" for layer in layers]


def _stated_types(facts: ModelFacts, config: Config) -> list[str]:
    """Layer types by a period, or by a flag for each layer."""
    flags = facts.header.metadata.get(f"{facts.architecture}.attention.sliding_window_pattern")
    if not isinstance(flags, np.ndarray):
        return _layer_types(config, facts.size("attention.sliding_window_pattern", 6))
    if len(flags) != config["num_hidden_layers"]:
        raise ExportError(
            f"{facts.header.file} says of {len(flags)} of {config['num_hidden_layers']} layers what slides"
        )
    return ["sliding_attention" if flag else "full_attention" for flag in flags.tolist()]


def _query_scalar(config: Config, largest: int) -> float:
    """The square of the number by which scores are divided."""
    # The 27B models have another one, and llama.cpp tells them by their layers.
    by_heads = config["num_hidden_layers"] == largest
    return config["hidden_size"] / config["num_attention_heads"] if by_heads else config["head_dim"]


def _phi3(facts: ModelFacts, config: Config) -> Config:
    original = facts.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = facts.maybe("attention.sliding_window") or None
    return {"original_max_position_embeddings": original, "sliding_window": window}


def _lfm2(facts: ModelFacts, config: Config) -> Config:
    names, kinds = facts.header.tensors, {True: "full_attention", False: "conv"}
    return {
        "layer_types": [kinds[count > 0] for count in facts.by_layer(KEY_HEADS, config["num_hidden_layers"])],
        "conv_L_cache": facts.size("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in names),
        "norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,  # the file states the width that it has
    }


LLAMA = Architecture("llama", _llama, interleaved=True)
GEMMA = Architecture("gemma", norm_offset=1.0)
POST_NORMS = {**LAYER, **AFTER, "ffn_norm": "pre_feedforward_layernorm"}
PHI3_LAYER = {**LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
LFM2_LAYER = {
    **{"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_output": "self_attn.out_proj"},
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    **{f"attn_{one}_norm": f"self_attn.{one}_layernorm" for one in "qk"},
    **{f"ffn_{name}": f"feed_forward.{own}" for name, own in {"gate": "w1", "down": "w2", "up": "w3"}.items()},
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
STARCODER2_LAYER = {**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}

ARCHITECTURES = {
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, model_type="gemma2", config=_gemma2, layer=POST_NORMS),
    "gemma3": replace(GEMMA, model_type="gemma3_text", config=_gemma3, layer=POST_NORMS),
    "granite": replace(LLAMA, model_type="granite", config=_granite),
    "lfm2": Architecture(
        "lfm2",
        _lfm2,
        LFM2_LAYER,
        # the norm behind the last layer bears this name there
        outside={**MODULES_OUTSIDE, **dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")},
        mixer="shortconv.out_proj",
        convolution="shortconv.conv",
    ),
    "llama": LLAMA,
    "olmo2": Architecture("olmo2", layer={**LAYER, **AFTER}),
    "phi3": Architecture("phi3", _phi3, PHI3_LAYER),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "smollm3": replace(LLAMA, model_type="smollm3"),
    "starcoder2": Architecture("starcoder2", _starcoder2, STARCODER2_LAYER),
}
OTHERS = {  # what a GGUF file may hold besides a language model
    "clip": "a projector of images (mmproj), which belongs to a language model in a file of its own",
    "controlvector": "a control vector: open it with mionnx.Directions.from_gguf",
    "imatrix": "an importance matrix of a quantiser",
    "adapter": "an adapter (LoRA): merge it into its model first",
    "mmproj": "a projector of images (mmproj), which belongs to a language model in a file of its own",
}


def architecture_of(header: Header) -> Architecture:
    """The architecture of a file: one that is known, of a whole generative language model."""
    with boundary(ExportError, f"{header.file} is damaged"):  # arrays where numbers belong
        return _architecture(header)


def _architecture(header: Header) -> Architecture:
    metadata, file = header.metadata, header.file
    name, kind = (str(metadata.get(f"general.{key}", "")) for key in ("architecture", "type"))
    for what in (name, kind):  # adapters bear the architecture of their model, and say their kind beside
        if what in OTHERS:
            raise ExportError(f"{file} holds {OTHERS[what]}")
    if metadata.get("split.count", 0) not in (0, 1):
        raise ExportError(
            f"{file} is one of {metadata['split.count']} parts of a split model: join them with "
            f"llama-gguf-split --merge, and give the whole file"
        )
    if metadata.get(f"{name}.pooling_type") or metadata.get(f"{name}.attention.causal") is False:
        raise ExportError(f"{file} holds an embedding model ({name}): it predicts no tokens")
    if name not in ARCHITECTURES:
        choices = ", ".join(ARCHITECTURES)
        raise ExportError(f"{file} holds the architecture {name!r}; known are {choices}{nearest(name, ARCHITECTURES)}")
    if not header.tensors:
        raise ExportError(f"{file} holds a vocabulary and no weights")
    return ARCHITECTURES[name]


def config_of(header: Header) -> Config:
    """The transformers config of a file, its sizes compared with those of its tensors."""
    architecture, facts = architecture_of(header), ModelFacts(header)
    with boundary(ExportError, f"{header.file} is damaged"):
        config = _common(facts, architecture)
        config |= architecture.config(facts, config)
        facts.check_all_read()
    return {"model_type": architecture.model_type, **config}


def _common(facts: ModelFacts, architecture: Architecture) -> Config:
    tensors = facts.header.tensors
    heads, layers, hidden = (facts.size(key) for key in ("attention.head_count", "block_count", "embedding_length"))
    head_dim = facts.size("attention.key_length", hidden // heads)
    if facts.size("attention.value_length", head_dim) != head_dim:
        raise ExportError(f"{facts.header.file}: keys and values of different lengths are not supported")
    inner, key_heads, first = facts.size("feed_forward_length"), 0, 0
    if architecture.mixer is None:
        key_heads = facts.size(KEY_HEADS, heads)
    else:
        counts = facts.by_layer(KEY_HEADS, layers)
        key_heads, first = max(counts), counts.index(max(counts))
        if not {*counts} <= {0, key_heads} or not key_heads:
            raise facts.wrong(KEY_HEADS, counts, "one number in each layer that attends, 0 in others")
    _check_sizes(facts.header, layers, hidden, heads * head_dim, inner, first)
    context = facts.size("context_length")
    epsilon = facts.maybe("attention.layer_norm_rms_epsilon")
    special = special_ids(facts.header)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "rope_parameters": rope(facts, head_dim, context),
        # llama.cpp writes no second table where the two are one
        "tie_word_embeddings": "output.weight" not in tensors,
        **({} if epsilon is None else {"rms_norm_eps": epsilon}),
        **{name: special.get(key) for name, key in SPECIAL_IDS.items()},
    }


def _check_sizes(header: Header, layers: int, hidden: int, queries: int, inner: int, attending: int) -> None:
    """Compare the stated sizes with the tensors, before anything is made by them."""
    layer_numbers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(layer_numbers) != layers or not all(number.isdigit() and int(number) < layers for number in layer_numbers):
        raise ExportError(f"{header.file} states {layers} layers, and holds tensors of {len(layer_numbers)}")
    for name, axis, size in (
        ("token_embd.weight", 1, hidden),
        (f"blk.{attending}.attn_output.weight", 1, queries),
        ("blk.0.ffn_down.weight", 1, inner),
    ):
        info = header.tensors.get(name)
        if info is None or len(info.shape) <= axis or info.shape[axis] != size:
            has = "is missing" if info is None else f"is {list(info.shape)}"
            raise ExportError(f"{header.file}: {name} {has}, its metadata mean {size} on axis {axis}")
