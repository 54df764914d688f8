"""Layouts of text encoders: transformers whose tokens read those behind them too, without a cache.

Nearly every family is BERT's layout or a few words away from it. Paths of modules outside the blocks are those of the
model without a head (`BertModel`): whatever head a checkpoint has, the layout is one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from exporters.transformers.layout import Layout

BERT = Layout(
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    blocks="encoder.layer",
    final_norm=None,
    attention="attention",
    output_projection="output.dense",
    attention_added="attention.output.dense",
    middle="intermediate",
    mlp="",
    mlp_output="output.dense",
    gate=None,
    up="intermediate.dense",
    down="output.dense",
    stream="normed",
    mid_norm="attention.output.LayerNorm",
    post_norm="output.LayerNorm",
)
NO_NORMS: dict[str, Any] = {"mid_norm": None, "post_norm": None, "stream": "sum"}
PLACES: dict[str, Any] = {"positions": None, "types": None}
OWN: dict[str, Any] = {"keys": "own", "z": "projection"}
SELF_ATTENTION: dict[str, Any] = {
    "blocks": "layers",
    "attention": "self_attn",
    "output_projection": "o_proj",
    "attention_added": "self_attn",
}
GATED: dict[str, Any] = {"mlp": "mlp", "mlp_output": "", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
ROBERTA = replace(BERT, offset=None)
PRE_NORM = replace(BERT, **NO_NORMS)
LIKE_LLAMA = replace(
    PRE_NORM,
    **SELF_ATTENTION,
    **GATED,
    **PLACES,
    embedding="embed_tokens",
    final_norm="norm",
    middle="post_attention_layernorm",
)
ROTATED = replace(
    BERT,
    **SELF_ATTENTION,
    **GATED,
    positions=None,
    middle="mlp",
    mid_norm="post_attention_layernorm",
    post_norm="post_mlp_layernorm",
)
ENCODERS: dict[str, Layout | Callable[[Any], Layout]] = {
    **dict.fromkeys(("bert", "electra", "ernie"), BERT),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "xlm-roberta"), ROBERTA),
    "distilbert": replace(
        BERT,
        types=None,
        blocks="transformer.layer",
        output_projection="out_lin",
        attention_added="attention",
        middle="ffn",
        mlp="ffn",
        mlp_output="",
        up="lin1",
        down="lin2",
        mid_norm="sa_layer_norm",
        post_norm="output_layer_norm",
    ),
    "mpnet": replace(
        ROBERTA,
        **OWN,
        types=None,
        attention="attention.attn",
        output_projection="o",
        attention_added="attention.attn",
        mid_norm="attention.LayerNorm",
    ),
}


def is_encoder(config: Any) -> bool:
    """Whether a config is that of an encoder; its family may be made to attend to the left alone."""
    return config.model_type in ENCODERS and not getattr(config, "is_decoder", False)


def reads_both_ways(config: Any) -> bool:
    """Whether tokens read those behind them: encoders, and decoders that a config makes such."""
    causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
    return is_encoder(config) or not causal
