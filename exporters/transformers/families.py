"""Layouts of decoder-only transformer families: the modules at hook points, and the kind of attention and stream.

Nearly every family is the default `Layout` or a few words away from it; a family is an entry here, or in
`encoder_families`, never a copy of modelling code. What a family does that no word says is a row of `quirks.QUIRKS`.
What a model shows by itself is no word: experts, indexers, tables of positions that a layer keeps, the arguments of a
rotation. Families that no export takes stand in `refused`, with the reason.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from exporters.hooked_transformer.settings import HOOKED_TRANSFORMER
from exporters.transformers.encoder_families import ENCODERS, is_encoder
from exporters.transformers.layout import IN_CODE, Layout

LLAMA = Layout()
NEOX_MLP: dict[str, Any] = {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}
IN_H: dict[str, Any] = {"blocks": "transformer.h", "final_norm": "transformer.ln_f"}
IN_BLOCKS: dict[str, Any] = {"blocks": "transformer.blocks", "final_norm": "transformer.norm_f"}


def normed_after(attention: str, middle: str, mlp: str) -> dict[str, Any]:
    """The fields of norms behind the attention, before the MLP and behind it."""
    return {"attention_added": attention, "middle": middle, "mlp_added": mlp}


GLM_NORMS = normed_after("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
POST_NORMS = replace(
    LLAMA, **normed_after("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
)
POST_NORMS_ONLY = replace(POST_NORMS, middle="mlp")
FUSED_GATE = replace(LLAMA, gate=None, up=None, gate_and_up="gate_up_proj")
PARALLEL = replace(LLAMA, middle=None)
PLAIN_MLP = replace(LLAMA, gate=None)
LATENTS = replace(LLAMA, keys="latents", rotation="part")
SCALED = replace(LLAMA, stream="products")
GRANITE = replace(SCALED, embedding=IN_CODE)
GATED_HEADS = replace(LLAMA, z="projection")
FC = replace(PLAIN_MLP, up="fc1", down="fc2")
GPT2 = replace(
    PLAIN_MLP,
    **IN_H,
    attention="attn",
    output_projection="c_proj",
    up="c_fc",
    down="c_proj",
    positions="transformer.wpe",
    middle="ln_2",
)
OWN_ATTENTION = replace(PLAIN_MLP, keys="own", z="projection")
BLOOM = replace(
    OWN_ATTENTION,
    **IN_H,
    **NEOX_MLP,
    attention="self_attention",
    output_projection="dense",
    attention_added="self_attention.dense",
    mlp_output="dense_4h_to_h",
    embedding="transformer.word_embeddings_layernorm",
)
GPTJ = replace(
    PLAIN_MLP,
    **IN_H,
    attention="attn",
    output_projection="out_proj",
    up="fc_in",
    down="fc_out",
    middle=None,
    rotation="part",
    positions=IN_CODE,
)
RECURRENT = replace(
    LLAMA, keys="none", recurrent="mixer", blocks="backbone.layers", final_norm="backbone.norm_f", middle=None, mlp=None
)
LFM2 = replace(
    LLAMA,
    recurrent="conv",
    output_projection="out_proj",
    mlp="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
    final_norm="model.embedding_norm",
    middle="ffn_norm",
)
JAMBA = replace(
    LLAMA, recurrent="mamba", mlp="feed_forward", final_norm="model.final_layernorm", middle="pre_ff_layernorm"
)
ZAMBA = replace(
    LLAMA,
    recurrent="mamba",
    final_norm="model.final_layernorm",
    attention="shared_transf.self_attn",
    output_projection=None,
    middle=None,
    mlp="shared_transf.feed_forward",
)
KIMI = replace(LLAMA, keys="latents", recurrent="self_attn", mixer_output="o_proj")
DELTA_NET = replace(GATED_HEADS, recurrent="linear_attn")
MLP_IN_BLOCK = replace(FC, output_projection="out_proj", middle="final_layer_norm", mlp="", mlp_output="fc2")


def bloom(config: Any) -> Layout:
    """BLOOM: the stream skips each half, normed first where the config says so."""
    return replace(BLOOM, stream="normed" if config.apply_residual_connection_post_layernorm else "sum")


def falcon(config: Any) -> Layout:
    """Falcon: parallel blocks, or sequential ones where the config says so."""
    parallel = config.new_decoder_architecture or config.parallel_attn
    return replace(BLOOM, embedding=None, middle=None if parallel else BLOOM.middle)


def gpt_neox(config: Any) -> Layout:
    """GPT-NeoX and Pythia: parallel blocks, or sequential ones where the config says so."""
    return replace(
        PLAIN_MLP,
        **NEOX_MLP,
        attention="attention",
        output_projection="dense",
        blocks="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        middle=None if config.use_parallel_residual else "post_attention_layernorm",
    )


def granite_hybrid(config: Any) -> Layout:
    """Granite 4: experts beside an MLP, or the MLP alone where the config has none."""
    hybrid = replace(GRANITE, recurrent="mamba", mlp="block_sparse_moe")
    if config.num_local_experts:
        return hybrid
    return replace(hybrid, mlp="shared_mlp", gate=None, up=None, gate_and_up="input_linear", down="output_linear")


def hooked_transformer(config: Any) -> Layout:
    """TransformerLens' own: GPT-2, or its attention alone."""
    return replace(GPT2, middle=None, mlp=None) if config.attn_only else GPT2


def opt(config: Any) -> Layout:
    """OPT: norms before each half (after it at 350M); an MLP without module, on merged axes."""
    before = config.do_layer_norm_before
    projected = config.word_embed_proj_dim != config.hidden_size
    return replace(
        MLP_IN_BLOCK,
        embedding="model.decoder.project_in" if projected else None,
        positions="model.decoder.embed_positions",
        blocks="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm" if before and not config._remove_final_layer_norm else None,
        middle="final_layer_norm" if before else "fc1",
        stream="sum" if before else "normed",
    )


def stablelm(config: Any) -> Layout:
    """StableLM: sequential blocks, or parallel ones where the config says so."""
    return replace(LLAMA, rotation="part", middle=None if config.use_parallel_residual else LLAMA.middle)


LIKE_LLAMA = """aria_text cwm doge dots1 ernie4_5 ernie4_5_moe exaone_moe gemma glm4_moe gpt_oss helium hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 llama mellum mimo_v2_flash minimax_m2 ministral ministral3 mistral mixtral olmo olmoe phimoe
    qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open"""
FAMILIES: dict[str, Layout | Callable[[Any], Layout]] = {
    **dict.fromkeys(LIKE_LLAMA.split(), LLAMA),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe", "cohere_compass_text"), PARALLEL),
    **dict.fromkeys(("arcee", "jais2", "nemotron"), PLAIN_MLP),
    **dict.fromkeys(("glm", "minimax_m3_vl_text", "phi3"), FUSED_GATE),
    **dict.fromkeys(("bitnet", "diffllama", "laguna"), GATED_HEADS),
    **dict.fromkeys(("granite", "granite_swa", "hyperclovax"), GRANITE),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoeshared"), replace(GRANITE, mlp="block_sparse_moe")),
    **dict.fromkeys(("gemma2", "gemma3_text"), POST_NORMS),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), replace(POST_NORMS, rotation="heads last")),
    **dict.fromkeys(("exaone4", "flex_olmo", "olmo2", "olmo3"), POST_NORMS_ONLY),
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), LATENTS),
    **dict.fromkeys(("glm_moe_dsa", "youtu"), LATENTS),
    **dict.fromkeys(("gpt-sw3", "gpt2", "gpt_bigcode"), GPT2),
    **dict.fromkeys(("codegen", "gptj"), GPTJ),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), RECURRENT),
    **dict.fromkeys(("lfm2", "lfm2_moe"), LFM2),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), DELTA_NET),
    "bamba": replace(JAMBA, rotation="part"),
    "kimi_linear": KIMI,
    "bailing_hybrid": replace(KIMI, rotation="part", z="projection"),
    "olmo_hybrid": replace(POST_NORMS_ONLY, recurrent="linear_attn", mixer_output="o_proj", mixer_norms="before"),
    "lfm3": replace(
        LFM2,
        attention_added="post_operator_norm",
        mlp_added="post_ffn_norm",
        output_projection="o_proj",
        z="projection",
    ),
    "recurrent_gemma": replace(
        LLAMA,
        embedding=IN_CODE,
        attention="temporal_block",
        recurrent="temporal_block",
        mixer_output="linear_out",
        middle="channel_pre_norm",
        mlp="mlp_block",
        final_norm="model.final_norm",
    ),
    "afmoe": replace(POST_NORMS, middle="pre_mlp_layernorm", mlp_added="post_mlp_layernorm", z="projection"),
    "apertus": replace(PLAIN_MLP, middle="feedforward_layernorm"),
    "axk2": replace(LATENTS, z="projection"),
    "biogpt": replace(
        MLP_IN_BLOCK, positions="biogpt.embed_positions", blocks="biogpt.layers", final_norm="biogpt.layer_norm"
    ),
    "bloom": bloom,
    "ctrl": replace(
        PLAIN_MLP,
        attention="multi_head_attention",
        output_projection="dense",
        mlp="ffn",
        up="0",
        down="2",
        blocks="transformer.h",
        final_norm="transformer.layernorm",
        middle="layernorm2",
        positions=IN_CODE,
    ),
    "dbrx": replace(
        LLAMA,
        **IN_BLOCKS,
        attention="norm_attn_norm.attn",
        output_projection="out_proj",
        middle="norm_attn_norm.norm_2",
        mlp="ffn",
    ),
    "falcon": falcon,
    "falcon_h1": replace(JAMBA, embedding=IN_CODE),
    "glm4": replace(FUSED_GATE, **GLM_NORMS),
    "gpt_neo": replace(GPT2, attention="attn.attention", output_projection="out_proj", keys="own", z="projection"),
    "gpt_neox": gpt_neox,
    "gpt_neox_japanese": replace(
        OWN_ATTENTION,
        **NEOX_MLP,
        attention="attention",
        output_projection="dense",
        blocks="gpt_neox_japanese.layers",
        final_norm="gpt_neox_japanese.final_layer_norm",
        rotation="part",
        stream="products",
    ),
    "granitemoehybrid": granite_hybrid,
    HOOKED_TRANSFORMER: hooked_transformer,
    "jamba": JAMBA,
    "jetmoe": replace(LLAMA, attention="self_attention", output_projection=None),
    "kolibri1": replace(POST_NORMS, **GLM_NORMS),
    "llama4_text": replace(SCALED, mlp="feed_forward", rotation="heads last"),
    "longcat_flash": replace(
        LATENTS,
        attention="self_attn.{number}",
        middle="post_attention_layernorm.{number}",
        mlp="mlps.{number}",
        layers=2,
    ),
    "minimax": replace(LLAMA, recurrent="self_attn", stream="normed"),
    "minicpm3": replace(LATENTS, stream="products"),
    "mpt": replace(
        OWN_ATTENTION,
        **IN_BLOCKS,
        attention="attn",
        output_projection="out_proj",
        mlp="ffn",
        mlp_output="down_proj",
        middle="norm_2",
        positions=IN_CODE,
    ),
    "modernbert-decoder": replace(
        FUSED_GATE,
        attention="attn",
        output_projection="Wo",
        final_norm="model.final_norm",
        middle="mlp_norm",
        gate_and_up="Wi",
        down="Wo",
    ),
    "nanochat": FC,
    "nemotron_h": replace(
        PLAIN_MLP, attention="mixer", recurrent="mixer", mlp="mixer", middle=None, final_norm="model.norm_f"
    ),
    "openai-gpt": replace(
        GPT2,
        positions="transformer.positions_embed",
        final_norm=None,
        attention_added="attn.c_proj",
        middle="mlp",
        keys="own",
        z="projection",
        stream="normed",
    ),
    "opt": opt,
    "persimmon": replace(
        PLAIN_MLP, **NEOX_MLP, final_norm="model.final_layernorm", output_projection="dense", rotation="part"
    ),
    "phi": replace(FC, final_norm="model.final_layernorm", output_projection="dense", middle=None, rotation="part"),
    "stablelm": stablelm,
    "starcoder2": replace(PLAIN_MLP, up="c_fc", down="c_proj"),
    "zamba": ZAMBA,
    "zamba2": replace(
        ZAMBA,
        attention="shared_transformer.self_attn",
        mlp="shared_transformer.feed_forward",
        gate=None,
        up=None,
        gate_and_up="gate_up_proj",
    ),
    "vaultgemma": replace(LLAMA, middle="pre_feedforward_layernorm"),
    "xglm": replace(
        MLP_IN_BLOCK,
        positions="model.embed_positions",
        final_norm="model.layer_norm",
        keys="own",
        z="projection",
    ),
}


def layout_of(config: Any) -> Layout:
    """The layout of a config's family; a family outside the table has Llama's.

    The tracing checks every module path against the model, so a wrong guess is an error that names the missing module.
    """
    entry = ENCODERS[config.model_type] if is_encoder(config) else FAMILIES.get(config.model_type, LLAMA)
    return entry(config) if callable(entry) else entry


PATHS = ("embedding", "positions", "types", "blocks", "final_norm", "shared")  # of a layout, from the model on


def layout_in(model: PreTrainedModel) -> Layout:
    """The layout of a model, its paths from this model on: of one without head as of one with it.

    Modules that it has none of (a table of positions where they are rotated) are left out, but for its blocks.
    """
    layout, prefix = layout_of(model.config), model.base_model_prefix
    modules, places = dict(model.named_modules()), dict[str, Any]()
    for name in PATHS:
        path = getattr(layout, name)
        if path in (None, IN_CODE):
            continue
        inner = path.partition(".")[2]  # the base of a head for spans may have another name
        spellings = (path, f"{prefix}.{path}", path.removeprefix(f"{prefix}."), f"{prefix}.{inner}")
        optional = is_encoder(model.config) and name != "blocks"
        places[name] = next((one for one in spellings if modules.get(one) is not None), None if optional else path)
    if layout.offset is None:
        places["offset"] = model.config.pad_token_id + 1
    return replace(layout, **places)
