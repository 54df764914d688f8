"""The models that are measured: configs of transformers, each with a tiny one of the same family.

The large ones get random weights where they are measured; their graphs are exported beforehand, without weights.
"""

from typing import Any

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "1B": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
        },
    ),
    "4B": (  # the sizes of Qwen3-4B
        "llama",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "head_dim": 16,
}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 128}),
    "1B": ("llama", SMALL),
    "4B": ("llama", {**SMALL, "tie_word_embeddings": True}),
}
DTYPES = {"gpt2": ("float32", "bfloat16"), "1B": ("float32", "bfloat16"), "4B": ("bfloat16",)}


def dtypes_of(tiny: bool) -> dict[str, tuple[str, ...]]:
    """Name -> its dtypes, the important one first; tiny ones are for the CPU."""
    return dict.fromkeys(DTYPES, ("float32",)) if tiny else DTYPES


def shapes(tiny: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> family and config."""
    return TINY if tiny else SHAPES
