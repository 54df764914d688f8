"""`Architecture`: how one of llama.cpp's architectures calls and orders what a family of transformers has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from exporters.gguf.facts import ModelFacts

LAYER_MODULES = {  # module of a layer, llama.cpp's name -> transformers' in most families
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
NORMS_BEHIND = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
MODULES_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
KEY_HEADS, MLP_WIDTH = "attention.head_count_kv", "feed_forward_length"
UNEMBEDDING = "lm_head.weight"
Config = dict[str, Any]


class Order(NamedTuple):
    """Where each row and column of a tensor in transformers stands in the file; None where they are in order."""

    rows: NDArray[np.int64] | None = None
    columns: NDArray[np.int64] | None = None


IN_ORDER = Order()


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    Attributes:
        config: what the config says beyond `architectures._common`, or beyond `sizes`.
        layer, outside: llama.cpp's name of a module, or of one weight of it -> transformers'; several with one name
            make one tensor, their rows one after another in this order. "{expert}" stands for the number of an expert.
        blocks: path of the layers in transformers.
        interleaved: rows of the query's and key's projections are stored for a rotation of neighbouring values.
        reordered: other tensors whose rows or columns stand in another order.
        norm_offset: what llama.cpp's files have added to the weights of norms, but for `plain_norms`.
        attending, fed: which layers attend, and which have an MLP or experts; None if all.
        rotates: whether queries and keys are rotated; if not, nothing is read of a rotation.
        sizes: the config's sizes where no layer attends.
        convolution: module of taps [channels, taps] in the file, [channels, 1, taps] in transformers.
        decays: modules of which the file has the decay where transformers has the logarithm of it.
        flat: modules of one axis in transformers and two in the file.
        further: whether layers that predict further tokens may stand behind the others; they are left out.
    """

    model_type: str
    config: Callable[[ModelFacts, Config], Config] = lambda facts, config: {}
    layer: Mapping[str, str] = field(default_factory=lambda: LAYER_MODULES)
    interleaved: bool = False
    norm_offset: float = 0.0
    outside: Mapping[str, str] = field(default_factory=lambda: MODULES_OUTSIDE)
    blocks: str = "model.layers"
    attending: Callable[[ModelFacts, int], list[bool]] | None = None
    fed: Callable[[ModelFacts, int], list[bool]] | None = None
    rotates: bool = True
    sizes: Callable[[ModelFacts], Config] | None = None
    convolution: str | None = None
    decays: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    plain_norms: tuple[str, ...] = ()
    reordered: Callable[[str, Config], Order] = lambda module, config: IN_ORDER
    further: bool = False

    @property
    def token_table(self) -> str:
        """Transformers' name of the embedding's weights."""
        return f"{self.outside['token_embd']}.weight"

    def order(self, module: str, config: Config) -> Order:
        """Where the rows and columns of a module's weights stand in the file."""
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(module)
        if not self.interleaved or heads is None:
            return self.reordered(module, config)
        # stored as [pair, half] for llama.cpp's rotation of neighbours; transformers rotates [half, pair]
        rows = np.arange(config[heads] * config["head_dim"]).reshape(config[heads], config["head_dim"] // 2, 2)
        return Order(rows.swapaxes(1, 2).ravel())


def by_heads(facts: ModelFacts, layers: int) -> list[bool]:
    """Which layers attend: the file states no heads for keys in the others."""
    return [count > 0 for count in facts.by_layer(KEY_HEADS, layers)]


def by_widths(facts: ModelFacts, layers: int) -> list[bool]:
    """Which layers have an MLP or experts: the file states no width in the others."""
    return [width > 0 for width in facts.by_layer(MLP_WIDTH, layers)]
