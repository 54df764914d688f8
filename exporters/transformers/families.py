"""Layouts of decoder-only transformer families: the modules at hook points.

Nearly every family is the default `Layout` or a few words away from it; a family is an entry here, never a copy of
modelling code.  Names are `torch.nn.Module` paths as in the transformers library: relative to the model for
`embedding`, `positions`, `blocks` and `final_norm`, relative to one block for all others.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Module paths of one family.

    `attention_added` and `mlp_added` are the modules whose output joins the residual stream (a post-norm where there is
    one). `middle` is the module that first reads the stream between attention and MLP, None in parallel blocks.
    `gate_and_up` is one fused projection whose output is split in two, instead of `gate` and `up`.
    `latents` are the norms of the latents of queries, and of keys and values, inside the attention.
    `rotates_part` says that attention cuts queries and keys before rotating a part of them, `rotates_heads_last` that
    it rotates [batch, seq, n_heads, head_dim], `rotates_pairs` that it does so by complex numbers, `rotates_singly`
    that it rotates queries and keys in two calls.
    `z_at_projection` says that a gate or a norm stands between the heads' outputs and the output projection: `hook_z`
    is then what the projection reads.
    `adds_products` says that the block multiplies what it adds to the stream, or adds it in parts.
    `streams` is the module that predicts several streams before a layer and corrects them after it; hook points of the
    stream are those of the active one, between the two.
    `experts` says that blocks may hold experts in the place of an MLP; neurons are tapped in the others only.
    `own_attention` says that attention is computed in the family's own code, which is tapped as it runs; `splits_heads`
    that its `_split_heads` gives queries and keys before they are rotated, `cacheless` that it knows no past.
    `mixed_heads` is the module whose experts are projections of queries and of heads' outputs, chosen by each token.
    `limited` says that a table has a row for each position, where there is no module `positions`.
    `embeds_in_code` is the module whose own code scales embeddings and takes positions out of a table.
    `normed_stream` says that the stream is normed between additions, and is no sum of what layers add.
    `shared` is an MLP beside the experts' module that the block adds to it; `gate_and_up` and `down` are its own.
    `sparse` says that an indexer in the attention chooses keys: it is left out, as it chooses all of a text of up to
    `index_topk` tokens (`sizes.py` has the limit).
    `flattens` says that the block merges the batch and sequence axes on its way; the tracing keeps them apart.
    `halves` are the layers that one block holds, each with an attention and an MLP of its own; `{half}` in a path is
    the number of one, and `begins` the module that first reads the stream before one. `shortcut` is a mixture of
    experts that reads what the first half's MLP reads, and joins the stream where the last half's MLP does.
    """

    embedding: str | None = None
    positions: str | None = None
    blocks: str = "model.layers"
    final_norm: str | None = "model.norm"
    attention: str = "self_attn"
    output_projection: str | None = "self_attn.o_proj"
    attention_added: str = "self_attn"
    middle: str | None = "post_attention_layernorm"
    mlp_input: str = "mlp"
    mlp_output: str = "mlp"
    mlp_added: str = "mlp"
    gate: str | None = "mlp.gate_proj"
    up: str | None = "mlp.up_proj"
    gate_and_up: str | None = None
    down: str | None = "mlp.down_proj"
    latents: tuple[str, ...] = ()
    rotates_part: bool = False
    rotates_heads_last: bool = False
    rotates_pairs: bool = False
    rotates_singly: bool = False
    z_at_projection: bool = False
    adds_products: bool = False
    streams: str | None = None
    experts: bool = False
    own_attention: bool = False
    splits_heads: bool = False
    cacheless: bool = False
    mixed_heads: str | None = None
    limited: bool = False
    embeds_in_code: str | None = None
    normed_stream: bool = False
    shared: str | None = None
    sparse: bool = False
    flattens: bool = False
    halves: int = 1
    begins: str | None = None
    shortcut: str | None = None

    def half(self, number: int) -> "Layout":
        """The layout of one of the layers that a block holds."""
        named = {name: value for name, value in asdict(self).items() if isinstance(value, str) and "{half}" in value}
        return replace(self, **{name: path.format(half=number) for name, path in named.items()})


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
LATENTS = replace(LLAMA, latents=("q_a_layernorm", "kv_a_layernorm"), rotates_part=True)
LATENT_EXPERTS = replace(LATENTS, experts=True)
SPARSE_LATENTS = replace(LATENT_EXPERTS, sparse=True)
SCALED = replace(LLAMA, adds_products=True)
GATED_HEADS = replace(LLAMA, z_at_projection=True)
GEMMA4 = replace(POST_NORMS, rotates_heads_last=True, rotates_singly=True)
FC = replace(PLAIN_MLP, up="mlp.fc1", down="mlp.fc2")
GRANITE_EXPERTS = replace(SCALED, mlp_input="block_sparse_moe", mlp_output="block_sparse_moe", experts=True)
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


OWN_ATTENTION = replace(PLAIN_MLP, own_attention=True, z_at_projection=True)
BLOOM = replace(
    OWN_ATTENTION,
    embedding="transformer.word_embeddings_layernorm",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    attention="self_attention",
    output_projection="self_attention.dense",
    attention_added="self_attention.dense",
    mlp_output="mlp.dense_4h_to_h",
    mlp_added="mlp.dense_4h_to_h",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
GPTJ = replace(
    OWN_ATTENTION,
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    attention="attn",
    output_projection="attn.out_proj",
    attention_added="attn",
    middle=None,
    up="mlp.fc_in",
    down="mlp.fc_out",
    rotates_part=True,
    splits_heads=True,
    limited=True,
)
MLP_IN_BLOCK = replace(
    PLAIN_MLP,
    output_projection="self_attn.out_proj",
    middle="final_layer_norm",
    mlp_input="fc1",
    mlp_output="fc2",
    mlp_added="fc2",
    up="fc1",
    down="fc2",
)


def bloom(config: Any) -> Layout:
    """BLOOM: the stream skips each half, normed first where the config says so."""
    return replace(BLOOM, normed_stream=config.apply_residual_connection_post_layernorm)


def falcon(config: Any) -> Layout:
    """Falcon: parallel blocks, or sequential ones where the config says so."""
    parallel = config.new_decoder_architecture or config.parallel_attn
    return replace(BLOOM, embedding=None, middle=None if parallel else BLOOM.middle)


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
        normed_stream=not before,
        flattens=True,
    )


def stablelm(config: Any) -> Layout:
    """StableLM: sequential blocks, or parallel ones where the config says so."""
    return replace(LLAMA, rotates_part=True, middle=None if config.use_parallel_residual else LLAMA.middle)


def granite_shared(config: Any) -> Layout:
    """Granite's experts, with an MLP of all tokens beside them where the config says so."""
    if not config.shared_intermediate_size:
        return GRANITE_EXPERTS
    return replace(
        GRANITE_EXPERTS, shared="shared_mlp", gate=None, up=None, gate_and_up="input_linear", down="output_linear"
    )


FAMILIES: dict[str, Layout | Callable[[Any], Layout]] = {
    "afmoe": replace(
        POST_NORMS, middle="pre_mlp_layernorm", mlp_added="post_mlp_layernorm", z_at_projection=True, experts=True
    ),
    "apertus": replace(PLAIN_MLP, middle="feedforward_layernorm"),
    "arcee": PLAIN_MLP,
    "aria_text": EXPERTS,
    "axk1": LATENT_EXPERTS,
    "biogpt": replace(
        MLP_IN_BLOCK, positions="biogpt.embed_positions", blocks="biogpt.layers", final_norm="biogpt.layer_norm"
    ),
    "axk2": replace(SPARSE_LATENTS, z_at_projection=True),
    "bitnet": GATED_HEADS,
    "bloom": bloom,
    "codegen": GPTJ,
    "cohere": PARALLEL,
    "cohere2": PARALLEL,
    "cohere_compass_text": PARALLEL,
    "cohere2_moe": replace(PARALLEL, experts=True),
    "ctrl": replace(
        PLAIN_MLP,
        blocks="transformer.h",
        final_norm="transformer.layernorm",
        attention="multi_head_attention",
        output_projection="multi_head_attention.dense",
        attention_added="multi_head_attention",
        middle="layernorm2",
        mlp_input="ffn",
        mlp_output="ffn",
        mlp_added="ffn",
        up="ffn.0",
        down="ffn.2",
        limited=True,
        embeds_in_code="transformer",
    ),
    "cwm": LLAMA,
    "dbrx": replace(
        EXPERTS,
        blocks="transformer.blocks",
        final_norm="transformer.norm_f",
        attention="norm_attn_norm.attn",
        output_projection="norm_attn_norm.attn.out_proj",
        attention_added="norm_attn_norm.attn",
        middle="norm_attn_norm.norm_2",
        mlp_input="ffn",
        mlp_output="ffn",
        mlp_added="ffn",
    ),
    "deepseek_v2": replace(LATENT_EXPERTS, rotates_pairs=True),
    "deepseek_v3": LATENT_EXPERTS,
    "deepseek_v32": SPARSE_LATENTS,
    "diffllama": GATED_HEADS,
    "doge": LLAMA,
    "dots1": EXPERTS,
    "ernie4_5": LLAMA,
    "ernie4_5_moe": EXPERTS,
    "exaone4": POST_NORMS_ONLY,
    "exaone_moe": EXPERTS,
    "falcon": falcon,
    "flex_olmo": replace(POST_NORMS_ONLY, experts=True),
    "gemma": LLAMA,
    "gemma2": POST_NORMS,
    "gemma3_text": POST_NORMS,
    "gemma3n_text": replace(POST_NORMS, rotates_heads_last=True, rotates_singly=True, streams="altup"),
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm": FUSED_GATE,
    "glm4": replace(
        FUSED_GATE,
        attention_added="post_self_attn_layernorm",
        middle="post_attention_layernorm",
        mlp_added="post_mlp_layernorm",
    ),
    "glm4_moe": EXPERTS,
    "glm4_moe_lite": LATENT_EXPERTS,
    "glm_moe_dsa": SPARSE_LATENTS,
    "gpt-sw3": GPT2,
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neo": replace(
        GPT2,
        attention="attn.attention",
        output_projection="attn.attention.out_proj",
        own_attention=True,
        z_at_projection=True,
    ),
    "gpt_neox": gpt_neox,
    "gpt_neox_japanese": replace(
        OWN_ATTENTION,
        blocks="gpt_neox_japanese.layers",
        final_norm="gpt_neox_japanese.final_layer_norm",
        attention="attention",
        output_projection="attention.dense",
        attention_added="attention",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        rotates_part=True,
        adds_products=True,
    ),
    "gpt_oss": EXPERTS,
    "gptj": GPTJ,
    "granite": SCALED,
    "granite_swa": SCALED,
    "granitemoe": GRANITE_EXPERTS,
    "granitemoe_swa": granite_shared,
    "granitemoeshared": granite_shared,
    "helium": LLAMA,
    "hunyuan_v1_dense": LLAMA,
    "hunyuan_v1_moe": EXPERTS,
    "hy_v3": EXPERTS,
    "hyperclovax": SCALED,
    "jais2": PLAIN_MLP,
    "jetmoe": replace(
        EXPERTS,
        attention="self_attention",
        output_projection=None,
        attention_added="self_attention",
        mixed_heads="self_attention.experts",
    ),
    "kolibri1": replace(
        POST_NORMS,
        attention_added="post_self_attn_layernorm",
        middle="post_attention_layernorm",
        mlp_added="post_mlp_layernorm",
        experts=True,
    ),
    "laguna": replace(EXPERTS, z_at_projection=True),
    "llama": LLAMA,
    "llama4_text": replace(
        LLAMA,
        adds_products=True,
        rotates_heads_last=True,
        rotates_pairs=True,
        mlp_input="feed_forward",
        mlp_output="feed_forward",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        experts=True,
    ),
    "longcat_flash": replace(
        LATENTS,
        halves=2,
        begins="input_layernorm.{half}",
        attention="self_attn.{half}",
        output_projection="self_attn.{half}.o_proj",
        attention_added="self_attn.{half}",
        middle="post_attention_layernorm.{half}",
        mlp_input="mlps.{half}",
        mlp_output="mlps.{half}",
        mlp_added="mlps.{half}",
        gate="mlps.{half}.gate_proj",
        up="mlps.{half}.up_proj",
        down="mlps.{half}.down_proj",
        shortcut="mlp",
    ),
    "mellum": EXPERTS,
    "mimo_v2_flash": EXPERTS,
    "minicpm3": replace(LATENTS, adds_products=True),
    "minimax_m2": EXPERTS,
    "minimax_m3_vl_text": replace(
        EXPERTS, gate=None, up=None, gate_and_up="mlp.gate_up_proj", down="mlp.down_proj", sparse=True
    ),
    "ministral": LLAMA,
    "ministral3": LLAMA,
    "mistral": LLAMA,
    "mixtral": EXPERTS,
    "mpt": replace(
        OWN_ATTENTION,
        blocks="transformer.blocks",
        final_norm="transformer.norm_f",
        attention="attn",
        output_projection="attn.out_proj",
        attention_added="attn",
        middle="norm_2",
        mlp_input="ffn",
        mlp_output="ffn.down_proj",
        mlp_added="ffn.down_proj",
        up="ffn.up_proj",
        down="ffn.down_proj",
        limited=True,
    ),
    "modernbert-decoder": replace(
        LLAMA,
        final_norm="model.final_norm",
        attention="attn",
        output_projection="attn.Wo",
        attention_added="attn",
        middle="mlp_norm",
        gate=None,
        up=None,
        gate_and_up="mlp.Wi",
        down="mlp.Wo",
    ),
    "nanochat": FC,
    "nemotron": PLAIN_MLP,
    "olmo": LLAMA,
    "olmo2": POST_NORMS_ONLY,
    "olmo3": POST_NORMS_ONLY,
    "olmoe": EXPERTS,
    "openai-gpt": replace(
        GPT2,
        positions="transformer.positions_embed",
        final_norm=None,
        attention_added="attn.c_proj",
        middle="mlp",
        own_attention=True,
        z_at_projection=True,
        cacheless=True,
        normed_stream=True,
    ),
    "opt": opt,
    "persimmon": replace(
        PLAIN_MLP,
        final_norm="model.final_layernorm",
        output_projection="self_attn.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        rotates_part=True,
    ),
    "phi": replace(
        FC, final_norm="model.final_layernorm", output_projection="self_attn.dense", middle=None, rotates_part=True
    ),
    "phi3": FUSED_GATE,
    "phimoe": EXPERTS,
    "qwen2": LLAMA,
    "qwen2_moe": EXPERTS,
    "qwen3": LLAMA,
    "qwen3_moe": EXPERTS,
    "seed_oss": LLAMA,
    "smollm3": LLAMA,
    "solar_open": EXPERTS,
    "stablelm": stablelm,
    "starcoder2": replace(PLAIN_MLP, up="mlp.c_fc", down="mlp.c_proj"),
    "vaultgemma": replace(LLAMA, middle="pre_feedforward_layernorm"),
    "xglm": replace(
        MLP_IN_BLOCK,
        positions="model.embed_positions",
        final_norm="model.layer_norm",
        own_attention=True,
        z_at_projection=True,
    ),
    "youtu": LATENTS,
}


def layout_of(config: Any) -> Layout:
    """The layout of a config's family; a family outside the table has Llama's.

    The tracing checks every module path against the model, so a wrong guess is an error that names the missing module.
    """
    entry = FAMILIES.get(config.model_type, LLAMA)
    return entry(config) if callable(entry) else entry
