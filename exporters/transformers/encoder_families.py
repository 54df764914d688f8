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
T5 = replace(
    PRE_NORM,
    **PLACES,
    embedding="encoder.embed_tokens",
    blocks="encoder.block",
    final_norm="encoder.final_layer_norm",
    attention="layer.0.SelfAttention",
    output_projection="o",
    attention_added="layer.0.SelfAttention",
    middle="layer.1",
    mlp="layer.1.DenseReluDense",
    mlp_output="",
    up="wi",
    down="wo",
)


def t5(config: Any) -> Layout:
    """The encoder of T5: its MLP may have a gate."""
    return replace(T5, gate="wi_0", up="wi_1") if config.is_gated_act else T5


def esm(config: Any) -> Layout:
    """ESM-2: rotated queries and keys, or learned positions."""
    rotary = config.position_embedding_type == "rotary"
    return replace(
        PRE_NORM,
        types=None,
        positions=None if rotary else BERT.positions,
        offset=0 if rotary else None,
        final_norm="encoder.emb_layer_norm_after",
        middle="LayerNorm",
    )


def inside(prefix: str, layout: Layout) -> Layout:
    """A layout whose blocks hold everything in one module."""
    names = ("attention", "attention_added", "middle", "mlp_output", "up", "down", "mid_norm", "post_norm")
    paths: dict[str, Any] = {name: f"{prefix}.{getattr(layout, name)}" for name in names}
    return replace(layout, **paths)


DISTILBERT = replace(
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
)
XLM = replace(
    DISTILBERT,
    **OWN,
    embedding="embeddings",
    positions="position_embeddings",
    blocks="layers",
    attention="attentions",
    attention_added="attentions",
    middle="ffns",
    mlp="ffns",
    mid_norm="layer_norm1",
    post_norm="layer_norm2",
    parts=("attentions", "layer_norm1", "ffns", "layer_norm2"),
)


def flaubert(config: Any) -> Layout:
    """XLM's layout; norms may stand before both halves."""
    return replace(XLM, **NO_NORMS, middle="layer_norm2") if config.pre_norm else XLM


ENCODERS: dict[str, Layout | Callable[[Any], Layout]] = {
    **dict.fromkeys(("bert", "electra", "ernie", "layoutlm", "roc_bert", "splinter"), BERT),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "xlm-roberta"), ROBERTA),
    **dict.fromkeys(("eurobert", "openai_privacy_filter", "ultrabert"), LIKE_LLAMA),
    **dict.fromkeys(("gte", "nomic_bert"), ROTATED),
    **dict.fromkeys(("mt5", "t5", "umt5"), t5),
    "albert": replace(
        inside("albert_layers.0", replace(BERT, middle="ffn", mlp_output="ffn_output", up="ffn", down="ffn_output")),
        blocks="encoder.albert_layer_groups",
        output_projection="dense",
        attention_added="albert_layers.0.attention.dense",
        mid_norm="albert_layers.0.attention.LayerNorm",
        post_norm="albert_layers.0.full_layer_layer_norm",
        shared="encoder.albert_layer_groups",
    ),
    "clip_text_model": replace(
        PRE_NORM,
        embedding="embeddings.token_embedding",
        positions="embeddings.position_embedding",
        types=None,
        blocks="encoder.layers",
        final_norm="final_layer_norm",
        attention="self_attn",
        output_projection="out_proj",
        attention_added="self_attn",
        middle="layer_norm2",
        mlp="mlp",
        mlp_output="",
        up="fc1",
        down="fc2",
    ),
    "convbert": replace(BERT, **OWN),
    **dict.fromkeys(("deberta", "deberta-v2"), replace(BERT, keys="split", z="projection")),
    "distilbert": DISTILBERT,
    "esm": esm,
    "esmc": replace(LIKE_LLAMA, stream="products"),
    "flaubert": flaubert,
    "jina_embeddings_v3": replace(ROTATED, gate=None, up="fc1", down="fc2"),
    **dict.fromkeys(("ibert", "luke"), replace(ROBERTA, **OWN)),
    "megatron-bert": replace(PRE_NORM, **OWN, final_norm="encoder.ln", middle="ln"),
    "mobilebert": replace(
        BERT,
        embedding="embeddings.embedding_transformation",
        output_projection=None,
        mlp_added="output.bottleneck.dense",
        post_norm="output.bottleneck.LayerNorm",
    ),
    "modernbert": replace(
        PRE_NORM,
        **PLACES,
        embedding="embeddings.tok_embeddings",
        blocks="layers",
        final_norm="final_norm",
        attention="attn",
        output_projection="Wo",
        attention_added="attn",
        middle="mlp_norm",
        mlp="mlp",
        mlp_output="",
        gate_and_up="Wi",
        up=None,
        down="Wo",
    ),
    "mpnet": replace(
        BERT,
        **OWN,
        offset=2,  # whatever token pads
        types=None,
        attention="attention.attn",
        output_projection="o",
        attention_added="attention.attn",
        mid_norm="attention.LayerNorm",
    ),
    "rembert": replace(BERT, **OWN),
    "roberta-prelayernorm": replace(PRE_NORM, offset=None, final_norm="LayerNorm", middle="intermediate.LayerNorm"),
    "roformer": replace(BERT, **OWN, positions=None),
    "squeezebert": replace(
        BERT,
        **OWN,
        blocks="encoder.layers",
        output_projection="",
        attention_added="post_attention.conv1d",
        mlp_output="output.conv1d",
        up="intermediate.conv1d",
        down="output.conv1d",
        mid_norm="post_attention.layernorm",
        post_norm="output.layernorm",
        channels_first=True,
    ),
    "xlm": XLM,
    "xlm-roberta-xl": replace(PRE_NORM, offset=None, final_norm="encoder.LayerNorm", middle="LayerNorm"),
}


LEFT = ("clip_text_model",)  # families without a cache whose tokens read those to the left alone


def is_encoder(config: Any) -> bool:
    """Whether a config is that of an encoder; its family may be made to attend to the left alone."""
    return config.model_type in ENCODERS and not getattr(config, "is_decoder", False)


def reads_both_ways(config: Any) -> bool:
    """Whether tokens read those behind them: encoders, and decoders that a config makes such."""
    # Gemma 4 has "all", or "vision": image tokens alone, of which a text has none
    both = getattr(config, "use_bidirectional_attention", False) in (True, "all")
    causal = getattr(config, "is_causal", True) and not both
    return (is_encoder(config) and config.model_type not in LEFT) or not causal
