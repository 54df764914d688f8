"""`Sizes` of a model, and the sizes that they give the axes of hook points."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mionnx.errors import ModelError
from mionnx.graph.folder_file import inside, read_json
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.layers import Heads, Recurrence


@dataclass(frozen=True)
class Sizes:
    """The sizes a user asks for.

    `max_positions` is None where a sequence may be of any length; of a mixture of experts `n_experts` is how many a
    layer has, `n_chosen` how many a token goes through, `d_expert` the neurons of each. None without experts.
    `embedding_size` is the width of embeddings that are projected to the hidden size (ALBERT); None where it is that.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None = None
    n_experts: int | None = None
    n_chosen: int | None = None
    d_expert: int | None = None
    embedding_size: int | None = None


# Names of the context length in configs, in the order in which they count.
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "context_length", "ctx_len", "max_seq_len")


def context_length(config: Mapping[str, Any]) -> int | None:
    """The context length that a checkpoint's config names; None if it names none."""
    inner = config.get("text_config")
    lengths = [config.get(name) for name in CONTEXT_NAMES] + (
        [context_length(inner)] if isinstance(inner, dict) else []
    )
    return next((length for length in lengths if type(length) is int and length > 0), None)


# Files of sentence-transformers' settings, by the architectures of its first versions.
ARCHITECTURES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TEXT_SETTINGS = tuple(f"sentence_{name}_config.json" for name in ARCHITECTURES)
NO_LIMIT = 2**31  # transformers writes 10**30 for a tokenizer that cuts nothing


def text_limit(folder: Path) -> int | None:
    """Tokens at which sentence-transformers cuts a text, or a checkpoint's tokenizer; None where neither says."""
    # sentence-transformers writes the tokenizer's alone since 6.0
    named = [*((name, "max_seq_length") for name in TEXT_SETTINGS), ("tokenizer_config.json", "model_max_length")]
    for name, key in named:
        with suppress(ModelError, AttributeError):  # no such file, or no table
            limit = read_json(inside(folder, name)).get(key)
            if type(limit) is int and 0 < limit < NO_LIMIT:
                return limit
    return None


def cut_side(folder: Path) -> Literal["left", "right"]:
    """The end at which longer texts are cut, by the tokenizer's settings."""
    with suppress(ModelError, AttributeError):
        if read_json(inside(folder, "tokenizer_config.json")).get("truncation_side") == "left":
            return "left"
    return "right"


EXPERT_SIZES = ("n_experts", "n_chosen", "d_expert")  # of `Sizes`; axes bear the same names
OPTIONAL_SIZES = (*EXPERT_SIZES, "embedding_size")  # not written where there are none
EMBEDDINGS = ("Embed", "PosEmbed", "TokenTypeEmbed")  # hook points before the projection to the hidden size


def axis_sizes(point: HookPoint, sizes: Sizes, heads: Heads, recurrence: Recurrence | None = None) -> dict[str, int]:
    """Axis name -> size, of the axes of a hook point that are as long in every pass."""
    # heads, recurrence: of its layer
    count, size, value_size = heads
    named = {"hidden": sizes.hidden_size, "n_heads": sizes.num_heads, "vocab": sizes.vocab_size}
    named |= {axis: own for axis in EXPERT_SIZES if (own := getattr(sizes, axis)) is not None}
    named |= {"n_kv_heads": count} if count else {}
    if sizes.embedding_size is not None and point.variant in EMBEDDINGS:
        named["hidden"] = sizes.embedding_size
    if recurrence is not None and ".ssm." in point.name:
        heads = (recurrence.n_heads, recurrence.key_dim, recurrence.value_dim)
        own = (*(heads if recurrence.has_state else (1, 0, recurrence.channels)), recurrence.channels)
        return named | dict(zip(("n_heads", "key_dim", "value_dim", "channels"), own, strict=True))
    if recurrence is not None and ".rwkv." in point.name:
        return named | {"head_dim": size, "key_dim": recurrence.key_dim, "value_dim": recurrence.value_dim}
    width = value_size if point.variant in ("AttnV", "AttnZ") else size
    return named | dict.fromkeys(("head_dim", "key_dim", "value_dim"), width)
