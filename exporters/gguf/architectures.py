"""llama.cpp's architectures: which family of transformers each is, and how its config and tensors are called there."""

from dataclasses import replace

import numpy as np

from exporters.gguf.facts import ModelFacts, rope, special_ids
from exporters.gguf.header import Header
from exporters.gguf.hybrids import HYBRIDS
from exporters.gguf.layout import KEY_HEADS, LAYER_MODULES, MLP_WIDTH, NORMS_BEHIND, Architecture, Config
from exporters.gguf.mamba2_hybrids import MAMBA2_HYBRIDS
from mionnx.errors import ExportError, boundary, nearest

SPECIAL_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


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


LLAMA = Architecture("llama", _llama, interleaved=True)
GEMMA = Architecture("gemma", norm_offset=1.0)
POST_NORMS = {**LAYER_MODULES, **NORMS_BEHIND, "ffn_norm": "pre_feedforward_layernorm"}
PHI3_LAYER = {**LAYER_MODULES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
STARCODER2_LAYER = {**LAYER_MODULES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}

PLAIN = {
    "gemma": GEMMA,
    "gemma2": replace(GEMMA, model_type="gemma2", config=_gemma2, layer=POST_NORMS),
    "gemma3": replace(GEMMA, model_type="gemma3_text", config=_gemma3, layer=POST_NORMS),
    "granite": replace(LLAMA, model_type="granite", config=_granite),
    "llama": LLAMA,
    "olmo2": Architecture("olmo2", layer={**LAYER_MODULES, **NORMS_BEHIND}),
    "phi3": Architecture("phi3", _phi3, PHI3_LAYER),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "smollm3": replace(LLAMA, model_type="smollm3"),
    "starcoder2": Architecture("starcoder2", _starcoder2, STARCODER2_LAYER),
}
ARCHITECTURES = dict(sorted((PLAIN | HYBRIDS | MAMBA2_HYBRIDS).items()))
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
    special = special_ids(facts.header)
    sizes = _attention_sizes(facts, architecture) if architecture.sizes is None else architecture.sizes(facts)
    _check_layers(facts, sizes["num_hidden_layers"], architecture)
    table = tensors.get("token_embd.weight")
    if table is None or table.shape[-1] != sizes["hidden_size"]:
        raise _missized(facts.header, "token_embd.weight", sizes["hidden_size"])
    return {
        **sizes,
        "vocab_size": table.shape[0],
        # llama.cpp writes no second table where the two are one
        "tie_word_embeddings": "output.weight" not in tensors,
        **{name: special.get(key) for name, key in SPECIAL_IDS.items()},
    }


def _attention_sizes(facts: ModelFacts, architecture: Architecture) -> Config:
    heads, layers, hidden = (facts.size(key) for key in ("attention.head_count", "block_count", "embedding_length"))
    layers -= facts.count("nextn_predict_layers") if architecture.further else 0
    _check_layers(facts, layers, architecture)  # before anything has as many entries
    head_dim = facts.size("attention.key_length", hidden // heads)
    if facts.size("attention.value_length", head_dim) != head_dim:
        raise ExportError(f"{facts.header.file}: keys and values of different lengths are not supported")
    attends, fed = (
        [True] * layers if which is None else which(facts, layers)
        for which in (architecture.attending, architecture.fed)
    )
    key_heads = facts.of_some(KEY_HEADS, attends, "attends", heads)
    width = facts.of_some(MLP_WIDTH, fed, "has an MLP or experts")
    _check_sizes(facts, heads * head_dim, attends.index(True), width, fed.index(True))
    context = facts.size("context_length")
    epsilon = facts.maybe("attention.layer_norm_rms_epsilon")
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        **({"rope_parameters": rope(facts, head_dim, context)} if architecture.rotates else {}),
        **({} if epsilon is None else {"rms_norm_eps": epsilon}),
    }


def _check_layers(facts: ModelFacts, layers: int, architecture: Architecture) -> None:
    """Compare the stated number of layers with the tensors, before anything is made by it."""
    header, stated = facts.header, layers + (facts.count("nextn_predict_layers") if architecture.further else 0)
    numbers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(numbers) != stated or not all(number.isdigit() and int(number) < stated for number in numbers):
        raise ExportError(f"{header.file} states {stated} layers, and holds tensors of {len(numbers)}")


def _check_sizes(facts: ModelFacts, queries: int, attending: int, width: int, fed: int) -> None:
    """Compare the stated sizes with the tensors, before anything is made by them."""
    header = facts.header
    inner, routed = f"blk.{fed}.ffn_down.weight", f"blk.{fed}.ffn_down_exps.weight" in header.tensors
    widths = [(f"blk.{attending}.attn_output.weight", queries)]
    if inner in header.tensors or not routed:
        widths.append((inner, width))
    for name, size in widths:
        info = header.tensors.get(name)
        if info is None or len(info.shape) < 2 or info.shape[1] != size:
            raise _missized(header, name, size)


def _missized(header: Header, name: str, size: int) -> ExportError:
    info = header.tensors.get(name)
    has = "is missing" if info is None else f"is {list(info.shape)}"
    return ExportError(f"{header.file}: {name} {has}, its metadata mean {size} on axis 1")
