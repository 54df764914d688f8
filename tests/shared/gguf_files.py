"""Small GGUF files of tiny random models, written as llama.cpp's converter writes them.

Tensor names come from the `gguf` package's own table; what the converter changes (rows of queries and keys for a
rotation of neighbours, weights of norms plus one) is written out here again.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from gguf_hybrids import hybrid_facts, hybrid_tensors, is_hybrid

LETTERS = "abcdefghijklmnopqrstuvwxyz"
ARCHITECTURE = {  # llama.cpp's name where it is another than transformers'
    "gemma3_text": "gemma3",
    "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
}
INTERLEAVED = ("llama", "granite", "smollm3", "granitemoehybrid", "nemotron_h")
PLUS_ONE = ("gemma", "gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
F32, Q4_K = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_K


def write_gguf(
    model: Any,
    path: Path,
    kind: GGMLQuantizationType = F32,
    extra: dict[str, Any] | None = None,
    factors: dict[str, np.ndarray] | None = None,
) -> Path:
    """A transformers model as a GGUF file, with a byte-level vocabulary of letters.

    Args:
        model: with its weights.
        path: of the file.
        kind: how matrices are stored.
        extra: metadata, by their whole keys; None leaves one out that is written otherwise.
        factors: tensors besides the model's.
    """
    config = model.config
    writer = GGUFWriter(path, architecture(config))
    known = hybrid_facts(config) if is_hybrid(config) else facts(config)
    keys = {
        **{f"{architecture(config)}.{key}": value for key, value in known.items()},
        **byte_vocabulary(config.vocab_size),
    }
    keys |= extra or {}
    for key, value in keys.items():
        if value is not None:
            add(writer, key, value)
    for name, weight in [*(factors or {}).items(), *tensors(model)]:
        put(writer, name, weight, kind)
    finish(writer)
    return path


def architecture(config: Any) -> str:
    """llama.cpp's name of what a config is of."""
    if config.model_type == "nemotron_h" and "moe" in config.layers_block_type:
        return "nemotron_h_moe"
    return ARCHITECTURE.get(config.model_type, config.model_type)


def write_small(path: Path, keys: dict[str, Any], weights: dict[str, np.ndarray] | None = None) -> Path:
    """A GGUF file of some metadata and float32 tensors, without a model."""
    writer = GGUFWriter(path, keys.pop("general.architecture", "llama"))
    for key, value in keys.items():
        add(writer, key, value)
    for name, weight in (weights or {}).items():
        writer.add_tensor(name, weight)
    finish(writer)
    return path


def finish(writer: GGUFWriter) -> None:
    """Write what was added, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a value of the type that it has in Python."""
    types = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    types.get(type(value), writer.add_array)(key, value)


def put(writer: GGUFWriter, name: str, weight: np.ndarray, kind: GGMLQuantizationType) -> None:
    """Add a tensor; vectors, the taps of convolutions and rows of no whole blocks stay float32."""
    vectors = (
        weight.ndim == 1
        or min(weight.shape) == 1
        or weight.shape[-1] % 32
        or name.endswith(("ssm_a", "ssm_norm.weight"))
    )
    if kind == F32 or vectors or "conv" in name.rpartition(".")[0].rpartition(".")[2]:
        writer.add_tensor(name, weight)
    else:
        writer.add_tensor(name, q4_k(weight) if kind == Q4_K else quantize(weight, kind), raw_dtype=kind)


def q4_k(weight: np.ndarray) -> np.ndarray:
    """Blocks of Q4_K with random bits, of about the weight's size: the `gguf` package makes none itself."""
    rows, columns = weight.shape
    random = np.random.default_rng(weight[0, :2].view(np.uint32))
    blocks = random.integers(0, 256, (rows * columns // 256, 144), np.uint8)
    steps = np.abs(weight).max() / random.uniform(1200, 2000, len(blocks))  # 15 times 63 of them at most
    sizes = np.stack([steps, 7.5 * steps], axis=1)  # of scales and of offsets, about zero
    blocks[:, :4] = sizes.astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


def facts(config: Any) -> dict[str, Any]:
    """What the converter writes of a config; keys of one family stand with all, as far as the config has them."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": getattr(config, "norm_epsilon", None),
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", None),
        "shortconv.l_cache": getattr(config, "conv_L_cache", None),
    }
    if config.model_type == "lfm2":  # whose layers of convolutions have no heads
        attends = [kind == "full_attention" for kind in config.layer_types]
        found["attention.head_count_kv"] = [config.num_key_value_heads * one for one in attends]
        found["attention.layer_norm_rms_epsilon"] = config.norm_eps
    return found


def byte_vocabulary(size: int) -> dict[str, Any]:
    """A byte-level vocabulary of letters, a space before one, and some tokens of control."""
    tokens = ["<unk>", "<s>", "</s>", "\u0120", *LETTERS, *(f"\u0120{letter}" for letter in LETTERS)]
    tokens += [f"<{index}>" for index in range(len(tokens), size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens[:size],
        "tokenizer.ggml.token_type": [3 if index < 3 or index > 55 else 1 for index in range(size)],
        "tokenizer.ggml.merges": [f"\u0120 {letter}" for letter in LETTERS],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}",
    }


def tensors(model: Any) -> list[tuple[str, np.ndarray]]:
    """Names and values as the converter writes them."""
    config = model.config
    family, found = config.model_type, []
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture(config))
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    weights = {path: parameter.detach().float().numpy() for path, parameter in model.state_dict().items()}
    for path, weight in (hybrid_tensors(config, weights) if is_hybrid(config) else weights).items():
        if path in tied:
            continue
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        module = path.split(".")[-2]
        if family in INTERLEAVED and module in heads:
            count = getattr(config, heads[module])
            pairs = weight.reshape(count, 2, -1, *weight.shape[1:])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        if family in PLUS_ONE and path.endswith("norm.weight") and "linear_attn" not in path:
            weight = weight + 1
        weight = weight.squeeze(1) if weight.ndim == 3 and weight.shape[1] == 1 else weight  # of a convolution
        found.append((names.get_name(path, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(weight)))
    return found
