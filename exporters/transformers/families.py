"""Layouts of decoder-only transformer families: the modules at hook points.

Nearly every family is the default `Layout` or a few words away from it; a family is an entry here, never a copy of
modelling code.  Names are `torch.nn.Module` paths as in the transformers library: relative to the model for
`embedding`, `positions`, `blocks` and `final_norm`, relative to one block for all others.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Module paths of one family.

    `attention_added` and `mlp_added` are the modules whose output joins the residual stream (a post-norm where there is
    one). `middle` is the module that first reads the stream between attention and MLP, None in parallel blocks.
    `gate_and_up` is one fused projection whose output is split in two, instead of `gate` and `up`.
    `experts` says that blocks may hold experts in the place of an MLP; neurons are tapped in the others only.
    `flattens` says that the block merges the batch and sequence axes on its way; the tracing keeps them apart.
    """

    embedding: str | None = None
    positions: str | None = None
    blocks: str = "model.layers"
    final_norm: str | None = "model.norm"
    attention: str = "self_attn"
    output_projection: str = "self_attn.o_proj"
    attention_added: str = "self_attn"
    middle: str | None = "post_attention_layernorm"
    mlp_input: str = "mlp"
    mlp_output: str = "mlp"
    mlp_added: str = "mlp"
    gate: str | None = "mlp.gate_proj"
    up: str | None = "mlp.up_proj"
    gate_and_up: str | None = None
    down: str | None = "mlp.down_proj"
    experts: bool = False
    flattens: bool = False


LLAMA = Layout()
POST_NORMS = replace(
    LLAMA,
    attention_added="post_attention_layernorm",
    middle="pre_feedforward_layernorm",
    mlp_added="post_feedforward_layernorm",
)
POST_NORMS_ONLY = replace(POST_NORMS, middle="mlp")
EXPERTS = replace(LLAMA, experts=True)
FUSED_GATE = replace(LLAMA, gate=None, up=None, gate_and_up="mlp.gate_up_proj")
PARALLEL = replace(LLAMA, middle=None)
PLAIN_MLP = replace(LLAMA, gate=None)
GPT2 = replace(
    PLAIN_MLP,
    positions="transformer.wpe",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    attention="attn",
    output_projection="attn.c_proj",
    attention_added="attn",
    middle="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
)


def gpt_neox(config: Any) -> Layout:
    """GPT-NeoX and Pythia: parallel blocks, or sequential ones where the config says so."""
    return replace(
        PLAIN_MLP,
        blocks="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        attention="attention",
        output_projection="attention.dense",
        attention_added="attention",
        middle=None if config.use_parallel_residual else "post_attention_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )


def opt(config: Any) -> Layout:
    """OPT: norms before each half (after it at 350M); an MLP without module, on merged axes."""
    before = config.do_layer_norm_before
    projected = config.word_embed_proj_dim != config.hidden_size
    return replace(
        PLAIN_MLP,
        embedding="model.decoder.project_in" if projected else None,
        positions="model.decoder.embed_positions",
        blocks="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm" if before and not config._remove_final_layer_norm else None,
        output_projection="self_attn.out_proj",
        middle="final_layer_norm" if before else "fc1",
        mlp_input="fc1",
        mlp_output="fc2",
        mlp_added="fc2",
        up="fc1",
        down="fc2",
        flattens=True,
    )


FAMILIES: dict[str, Layout | Callable[[Any], Layout]] = {
    "arcee": PLAIN_MLP,
    "cohere": PARALLEL,
    "cohere2": PARALLEL,
    "ernie4_5": LLAMA,
    "exaone4": POST_NORMS_ONLY,
    "gemma": LLAMA,
    "gemma2": POST_NORMS,
    "gemma3_text": POST_NORMS,
    "glm": FUSED_GATE,
    "glm4": replace(
        FUSED_GATE,
        attention_added="post_self_attn_layernorm",
        middle="post_attention_layernorm",
        mlp_added="post_mlp_layernorm",
    ),
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": gpt_neox,
    "helium": LLAMA,
    "hunyuan_v1_dense": LLAMA,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": EXPERTS,
    "nemotron": PLAIN_MLP,
    "olmo": LLAMA,
    "olmo2": POST_NORMS_ONLY,
    "olmo3": POST_NORMS_ONLY,
    "opt": opt,
    "phi3": FUSED_GATE,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": EXPERTS,
    "seed_oss": LLAMA,
    "smollm3": LLAMA,
    "starcoder2": replace(PLAIN_MLP, up="mlp.c_fc", down="mlp.c_proj"),
}


def layout_of(config: Any) -> Layout:
    """The layout of a config's family; a family outside the table has Llama's.

    The tracing checks every module path against the model, so a wrong guess is an error that names the missing module.
    """
    entry = FAMILIES.get(config.model_type, LLAMA)
    return entry(config) if callable(entry) else entry
