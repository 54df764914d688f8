"""Sizes of a config.json, checked before a model is made by them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mionnx.errors import ExportError

# What configs call a size -> the least and the largest of any model; entries of lists are checked one by one.
SIZE_LIMITS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), (1, 2**14)),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), (1, 2**16)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), (1, 2**22)),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), (1, 2**26)),
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok"), (0, 2**16)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 2**31)),
    "vocab_size": (1, 2**28),
    "sliding_window": (0, 2**31),
}
FRACTIONS: dict[str, tuple[float, float]] = {  # above the first, up to the second
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"), (0.0, 1.0)),
    "rope_theta": (0.0, 1e15),
}


def check_sizes(config: Mapping[str, Any], file: Path) -> None:
    """Refuse a config with a size that no model has."""
    tables = [config, *(inner for inner in config.values() if isinstance(inner, dict))]  # text_config and the like
    for table in tables:
        for key, (least, largest) in SIZE_LIMITS.items():
            entries = table[key] if isinstance(table.get(key), list) else [table.get(key)]
            for value in entries:
                # `type`, not isinstance: True is an int
                if value is not None and (type(value) is not int or not least <= value <= largest):
                    raise _wrong(file, key, value, f"an integer of {least} to {largest:,}")
        for key, (above, most) in FRACTIONS.items():
            value = table.get(key)
            if value is not None and not is_between(value, above, most):
                raise _wrong(file, key, value, f"a number above {above:g}, up to {most:g}")
        heads, groups = (table.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
        if type(heads) is type(groups) is int and heads % groups:
            raise _wrong(file, "num_key_value_heads", groups, f"a divisor of the {heads} heads")


def is_between(value: Any, above: float, most: float) -> bool:
    """Whether a value is a number in a range."""
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value <= most


def _wrong(file: Path, key: str, value: Any, requirement: str) -> ExportError:
    return ExportError(f"{file}: {key} has to be {requirement}; it says {repr(value)[:60]}")
