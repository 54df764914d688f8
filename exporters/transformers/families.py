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
NEOX_MLP = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
IN_H = {"blocks": "transformer.h", "final_norm": "transformer.ln_f"}
IN_BLOCKS = {"blocks": "transformer.blocks", "final_norm": "transformer.norm_f"}


def attending(module: str, projection: str, added: str | None = None) -> dict[str, Any]:
    """The fields of an attention of another name, whose output joins the stream behind `added`."""
    return {"attention": module, "output_projection": f"{module}.{projection}", "attention_added": added or module}


def thinking(module: str, up: str, down: str, gate: str | None = None, output: str = "") -> dict[str, Any]:
    """The fields of an MLP of another name, of which the module `output` makes the result."""
    made, gated = f"{module}.{output}".rstrip("."), gate and f"{module}.{gate}"
    fields = {"mlp_input": module, "mlp_output": made, "mlp_added": made}
    return {**fields, "gate": gated, "up": f"{module}.{up}", "down": f"{module}.{down}"}


def normed_after(attention: str, middle: str, mlp: str) -> dict[str, Any]:
    """The fields of norms behind the attention, before the MLP and behind it."""
    return {"attention_added": attention, "middle": middle, "mlp_added": mlp}


GLM_NORMS = normed_after("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
POST_NORMS = replace(
    LLAMA, **normed_after("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
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
    **IN_H,
    **attending("attn", "c_proj"),
    **thinking("mlp", "c_fc", "c_proj"),
    positions="transformer.wpe",
    middle="ln_2",
)
OWN_ATTENTION = replace(PLAIN_MLP, own_attention=True, z_at_projection=True)
BLOOM = replace(
    OWN_ATTENTION,
    **IN_H,
    **attending("self_attention", "dense", added="self_attention.dense"),
    **thinking("mlp", "dense_h_to_4h", "dense_4h_to_h", output="dense_4h_to_h"),
    embedding="transformer.word_embeddings_layernorm",
)
GPTJ = replace(
    OWN_ATTENTION,
    **IN_H,
    **attending("attn", "out_proj"),
    **thinking("mlp", "fc_in", "fc_out"),
    middle=None,
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
        **attending("attention", "dense"),
        **NEOX_MLP,
        blocks="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        middle=None if config.use_parallel_residual else "post_attention_layernorm",
    )


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


LIKE_LLAMA = """cwm doge ernie4_5 gemma helium hunyuan_v1_dense llama ministral ministral3 mistral olmo qwen2 qwen3
    seed_oss smollm3"""
LIKE_LLAMA_WITH_EXPERTS = """aria_text dots1 ernie4_5_moe exaone_moe glm4_moe gpt_oss hunyuan_v1_moe hy_v3 mellum
    mimo_v2_flash minimax_m2 mixtral olmoe phimoe qwen2_moe qwen3_moe solar_open"""
FAMILIES: dict[str, Layout | Callable[[Any], Layout]] = {
    **dict.fromkeys(LIKE_LLAMA.split(), LLAMA),
    **dict.fromkeys(LIKE_LLAMA_WITH_EXPERTS.split(), EXPERTS),
    **dict.fromkeys(("cohere", "cohere2", "cohere_compass_text"), PARALLEL),
    **dict.fromkeys(("arcee", "jais2", "nemotron"), PLAIN_MLP),
    **dict.fromkeys(("glm", "phi3"), FUSED_GATE),
    **dict.fromkeys(("bitnet", "diffllama"), GATED_HEADS),
    **dict.fromkeys(("granite", "granite_swa", "hyperclovax"), SCALED),
    **dict.fromkeys(("granitemoe_swa", "granitemoeshared"), granite_shared),
    **dict.fromkeys(("gemma2", "gemma3_text"), POST_NORMS),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA4),
    **dict.fromkeys(("exaone4", "olmo2", "olmo3"), POST_NORMS_ONLY),
    **dict.fromkeys(("axk1", "deepseek_v3", "glm4_moe_lite"), LATENT_EXPERTS),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), SPARSE_LATENTS),
    **dict.fromkeys(("gpt-sw3", "gpt2", "gpt_bigcode"), GPT2),
    **dict.fromkeys(("codegen", "gptj"), GPTJ),
    "afmoe": replace(
        POST_NORMS, middle="pre_mlp_layernorm", mlp_added="post_mlp_layernorm", z_at_projection=True, experts=True
    ),
    "apertus": replace(PLAIN_MLP, middle="feedforward_layernorm"),
    "axk2": replace(SPARSE_LATENTS, z_at_projection=True),
    "biogpt": replace(
        MLP_IN_BLOCK, positions="biogpt.embed_positions", blocks="biogpt.layers", final_norm="biogpt.layer_norm"
    ),
    "bloom": bloom,
    "cohere2_moe": replace(PARALLEL, experts=True),
    "ctrl": replace(
        PLAIN_MLP,
        **attending("multi_head_attention", "dense"),
        **thinking("ffn", "0", "2"),
        blocks="transformer.h",
        final_norm="transformer.layernorm",
        middle="layernorm2",
        limited=True,
        embeds_in_code="transformer",
    ),
    "dbrx": replace(
        EXPERTS,
        **IN_BLOCKS,
        **attending("norm_attn_norm.attn", "out_proj"),
        middle="norm_attn_norm.norm_2",
        mlp_input="ffn",
        mlp_output="ffn",
        mlp_added="ffn",
    ),
    "deepseek_v2": replace(LATENT_EXPERTS, rotates_pairs=True),
    "falcon": falcon,
    "flex_olmo": replace(POST_NORMS_ONLY, experts=True),
    "gemma3n_text": replace(GEMMA4, streams="altup"),
    "glm4": replace(FUSED_GATE, **GLM_NORMS),
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
        **attending("attention", "dense"),
        **NEOX_MLP,
        blocks="gpt_neox_japanese.layers",
        final_norm="gpt_neox_japanese.final_layer_norm",
        rotates_part=True,
        adds_products=True,
    ),
    "granitemoe": GRANITE_EXPERTS,
    "jetmoe": replace(
        EXPERTS,
        attention="self_attention",
        output_projection=None,
        attention_added="self_attention",
        mixed_heads="self_attention.experts",
    ),
    "kolibri1": replace(POST_NORMS, **GLM_NORMS, experts=True),
    "laguna": replace(EXPERTS, z_at_projection=True),
    "llama4_text": replace(
        SCALED,
        mlp_input="feed_forward",
        mlp_output="feed_forward",
        gate="feed_forward.gate_proj",
        up="feed_forward.up_proj",
        down="feed_forward.down_proj",
        rotates_heads_last=True,
        rotates_pairs=True,
        experts=True,
    ),
    "longcat_flash": replace(
        LATENTS,
        **attending("self_attn.{half}", "o_proj"),
        **thinking("mlps.{half}", gate="gate_proj", up="up_proj", down="down_proj"),
        halves=2,
        begins="input_layernorm.{half}",
        middle="post_attention_layernorm.{half}",
        shortcut="mlp",
    ),
    "minicpm3": replace(LATENTS, adds_products=True),
    "minimax_m3_vl_text": replace(FUSED_GATE, experts=True, sparse=True),
    "mpt": replace(
        OWN_ATTENTION,
        **IN_BLOCKS,
        **attending("attn", "out_proj"),
        **thinking("ffn", "up_proj", "down_proj", output="down_proj"),
        middle="norm_2",
        limited=True,
    ),
    "modernbert-decoder": replace(
        FUSED_GATE,
        **attending("attn", "Wo"),
        final_norm="model.final_norm",
        middle="mlp_norm",
        gate_and_up="mlp.Wi",
        down="mlp.Wo",
    ),
    "nanochat": FC,
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
        **NEOX_MLP,
        final_norm="model.final_layernorm",
        output_projection="self_attn.dense",
        rotates_part=True,
    ),
    "phi": replace(
        FC, final_norm="model.final_layernorm", output_projection="self_attn.dense", middle=None, rotates_part=True
    ),
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
