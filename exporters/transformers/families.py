"""Layouts of decoder-only transformer families: the modules at hook points, and the kind of attention and stream.

Nearly every family is the default `Layout` or a few words away from it; a family is an entry here, never a copy of
modelling code. What a family does that no word says is a row of `quirks.QUIRKS`. What a model shows by itself is no
word: experts, indexers, tables of positions that a layer keeps, the arguments of a rotation.

Names are `torch.nn.Module` paths as in the transformers library: relative to the model for `embedding`, `positions`,
`blocks` and `final_norm`; to the attention for `output_projection`; to the MLP for its parts; to one block for others.

Families that no export takes stand in `REASONS`, with the reason.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from mionnx.errors import ExportError

IN_CODE = "a table in the model's code"  # positions without a module; their number is a limit all the same


@dataclass(frozen=True)
class Layout:
    """Modules and words of one family.

    Attributes:
        attention_added, mlp_added: modules whose output joins the residual stream (a post-norm where there is one);
            None for the attention itself, and for the module whose output is the MLP's.
        middle: the module that first reads the stream between attention and MLP; None in parallel blocks.
        mlp: the MLP; "" where the block itself holds its parts, the first of which is `up`.
        mlp_output: the part of the MLP that gives its result; "" for the MLP itself.
        gate_and_up: one fused projection whose output is split in two, instead of `gate` and `up`.
        keys: "kept" as they are made, by transformers' `AttentionInterface`; made of "latents", kept as keys and values
            of that interface; or "own", by an attention in the family's own code, which is tapped as it runs.
        rotation: of queries and keys "whole", of a "part" that attention cuts off before, or of the whole with
            "heads last": [batch, seq, n_heads, head_dim].
        z: `hook_z` is the outputs of "heads"; with a gate or a norm behind these, it is what the "projection" reads.
        stream: the "sum" of what blocks add, of "products" that a block computes outside of modules (or in parts), or
            "normed" between additions, and so no sum of what layers add.
        layers: how many a block holds, each with an attention and an MLP; `{number}` in a path is the number of one.
    """

    embedding: str | None = None
    positions: str | None = None
    blocks: str = "model.layers"
    final_norm: str | None = "model.norm"
    attention: str = "self_attn"
    output_projection: str | None = "o_proj"
    attention_added: str | None = None
    middle: str | None = "post_attention_layernorm"
    mlp: str = "mlp"
    mlp_output: str = ""
    mlp_added: str | None = None
    gate: str | None = "gate_proj"
    up: str | None = "up_proj"
    gate_and_up: str | None = None
    down: str | None = "down_proj"
    keys: Literal["kept", "latents", "own"] = "kept"
    rotation: Literal["whole", "part", "heads last"] = "whole"
    z: Literal["heads", "projection"] = "heads"
    stream: Literal["sum", "products", "normed"] = "sum"
    layers: int = 1

    def layer(self, number: int) -> "Layout":
        """The layout of one of the layers that a block holds."""
        fields: dict[str, Any] = asdict(self)
        paths = {name: value for name, value in fields.items() if "{" in str(value)}
        return replace(self, **{name: path.format(number=number) for name, path in paths.items()})

    @property
    def projection(self) -> str | None:
        """The output projection, from the block on."""
        return self.output_projection and f"{self.attention}.{self.output_projection}"


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
    OWN_ATTENTION,
    **IN_H,
    attention="attn",
    output_projection="out_proj",
    up="fc_in",
    down="fc_out",
    middle=None,
    rotation="part",
    positions=IN_CODE,
)
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
    **dict.fromkeys(("granite", "granite_swa", "hyperclovax"), SCALED),
    **dict.fromkeys(("granitemoe", "granitemoe_swa", "granitemoeshared"), replace(SCALED, mlp="block_sparse_moe")),
    **dict.fromkeys(("gemma2", "gemma3_text"), POST_NORMS),
    **dict.fromkeys(("gemma3n_text", "gemma4_text", "gemma4_unified_text"), replace(POST_NORMS, rotation="heads last")),
    **dict.fromkeys(("exaone4", "flex_olmo", "olmo2", "olmo3"), POST_NORMS_ONLY),
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"), LATENTS),
    **dict.fromkeys(("glm_moe_dsa", "youtu"), LATENTS),
    **dict.fromkeys(("gpt-sw3", "gpt2", "gpt_bigcode"), GPT2),
    **dict.fromkeys(("codegen", "gptj"), GPTJ),
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
    entry = FAMILIES.get(config.model_type, LLAMA)
    return entry(config) if callable(entry) else entry


RECURRENT = "has state-space, recurrent, linear attention or convolution layers, which carry a state in place of keys"
ENCODER = "is an encoder, which the causal-LM mapping lists because it can be made to attend to the left"
STREAMS = "has several residual streams, mixed by each half of a layer (hyper-connections)"
# Words in the names of modules that carry a state.
STATES = (
    *("mamba", "rwkv", "xlstm", "linearattention", "lightningattention", "deltanet", "deltaattention", "recurrent"),
    *("shortconv", "kda", "bambamixer", "falconh1mixer"),
)
REASONS = {
    "beam": "rescales its residual stream at each addition, so that no value is what a layer adds to it",
    "bert-generation": ENCODER,
    "blt": "reads bytes in patches of varying length by three stacks of layers",
    "cpmant": "puts tokens of its own before each text and needs the whole text at every step",
    "deepseek_v4": STREAMS,
    "dots3_note_text": "has layers with different numbers of heads",
    "gemma4_assistant": "reads the keys and values of another model, for which it drafts tokens",
    "gemma4_unified_assistant": "reads the keys and values of another model, for which it drafts tokens",
    "hrm_text": "runs each of its layers several times, so that a layer has several values at each hook point",
    "hy_v4": STREAMS,
    "nemotron_h": RECURRENT,
    "qwen4_exp_text": RECURRENT,
    "reformer": "attends within buckets of hashed keys and keeps no keys and values",
    "rwkv": "is RWKV-4: mionnx takes RWKV-6 and RWKV-7",
    "trocr": "is the decoder of an encoder for images, and attends to it",
    "xlm": ENCODER,
    "xlnet": "attends to tokens in permuted order by two streams, and not to those on the left",
    "zamba": RECURRENT,
    "zaya": "has convolutions over queries and keys, which carry a state besides the cache",
}


def reason(config: Any) -> str | None:
    """Say why a family is not taken; None where nothing speaks against a try."""
    heads = {*(getattr(config, "num_attention_heads_per_layer", None) or ())}
    if config.model_type in REASONS:
        return REASONS[config.model_type]
    if len(heads) > 1:
        return f"has layers with different numbers of heads ({', '.join(map(str, sorted(heads)))})"
    if config.is_encoder_decoder:
        return "has an encoder and a decoder"
    return None


def refuse(config: Any) -> None:
    """Refuse a family that is not taken, with the reason."""
    listed = config.model_type in FAMILIES  # with keys and values in every layer: no model is made to look
    why = reason(config) or (RECURRENT if not listed and _carries_state(config) else None)
    if why is not None:
        raise ExportError(f"a {config.model_type!r} model {why}: mionnx does not export such models")


def _carries_state(config: Any) -> bool:
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:  # transformers' errors share no base class; the export itself says what does not build
        return False
    return carries_state(model)


def carries_state(model: nn.Module) -> bool:
    """Whether a module of a model is known to carry a state, by the name of its class."""
    kinds = {type(module).__name__.lower() for module in model.modules()}
    return any(word in kind for kind in kinds for word in STATES)
