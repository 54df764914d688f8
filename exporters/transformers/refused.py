"""Families that no export takes, each with the reason."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from exporters.transformers.encoder_families import is_encoder
from exporters.transformers.families import FAMILIES
from exporters.transformers.heads import DECODER, TaskHead
from mionnx.errors import ExportError
from mionnx.graph.metadata import NEXT_TOKEN

HEADLESS = (
    "mionnx exports those that predict masked tokens, classes, tags, spans or embeddings, and those without a head"
)
RECURRENT = (
    "has state-space, recurrent, linear attention or convolution layers, which carry a state in place of keys, and its "
    "family is not one of those whose states mionnx knows (an entry in exporters/transformers/families.py with "
    "`recurrent`)"
)
ENCODER = "is an encoder, which the causal-LM mapping lists because it can be made to attend to the left"
STREAMS = "has several residual streams, mixed by each half of a layer (hyper-connections)"
# Words in the names of modules that carry a state.
STATES = (
    *("mamba", "rwkv", "xlstm", "linearattention", "lightningattention", "deltanet", "deltaattention", "recurrent"),
    *("shortconv", "kda", "bambamixer", "falconh1mixer"),
)
APPROXIMATE = "approximates attention, so that no pattern is a softmax over all tokens"
PLACES = "reads where words stand on a page besides tokens, for which a hooked model has no input"
XLM = (
    ("causal", False, "lets tokens read those to the left alone"),
    ("asm", False, "predicts tokens by an adaptive softmax, whose head is no product"),
    ("summary_type", "first", "classifies by another token than a text's first"),
)
# Family -> words of its config, the value that is taken, and what a model with another one does.
SETTINGS: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "convbert": (("head_ratio", 2, "makes another share than half of its heads by convolutions"),),
    "flaubert": XLM,
    "ibert": (("quant_mode", False, "computes in simulated integers"),),
    "mobilebert": (
        ("use_bottleneck", True, "has layers without bottlenecks"),
        ("trigram_input", True, "embeds tokens without those beside them"),
    ),
    "nemotron_h": (
        ("moe_latent_size", None, "has experts on a narrower stream, whose outputs are no part of the stream"),
    ),
    "squeezebert": (("post_attention_groups", 1, "projects the outputs of its heads in groups"),),
    "xlm": XLM,
}
REASONS = {
    "beam": "rescales its residual stream at each addition, so that no value is what a layer adds to it",
    "bert-generation": ENCODER,
    "big_bird": "attends to random blocks of tokens, so that no pattern is a softmax over all of them",
    "blt": "reads bytes in patches of varying length by three stacks of layers",
    "bros": PLACES,
    "canine": "reads characters, which it hashes and pools",
    "cpmant": "puts tokens of its own before each text and needs the whole text at every step",
    "deepseek_v4": STREAMS,
    "dots3_note_text": "has layers with different numbers of heads",
    "fnet": "mixes tokens by Fourier transforms, and has no attention",
    "funnel": "pools its tokens between blocks, so that its streams have several lengths",
    "gemma4_assistant": "reads the keys and values of another model, for which it drafts tokens",
    "gemma4_unified_assistant": "reads the keys and values of another model, for which it drafts tokens",
    "hrm_text": "runs each of its layers several times, so that a layer has several values at each hook point",
    "hy_v4": STREAMS,
    "inkling2_text": "has convolutions whose kernels each token makes, and attends to the residuals of earlier layers",
    "inkling_text": "has four convolutions in each layer, of keys, values and both outputs, which carry states "
    "beside the cache",
    "lilt": PLACES,
    "longformer": "attends within windows in chunks, so that no pattern is a softmax over all tokens",
    "markuplm": "reads tags of a page besides tokens, for which a hooked model has no input",
    "mra": APPROXIMATE,
    "nystromformer": APPROXIMATE,
    "perceiver": "reads bytes into a fixed number of latents",
    "qwen4_exp_text": STREAMS,
    "reformer": "attends within buckets of hashed keys and keeps no keys and values",
    "rwkv": "is RWKV-4, whose graph is made from the tensors of its checkpoint, not from a config alone",
    "tapas": "reads rows and columns of a table besides tokens, for which a hooked model has no input",
    "trocr": "is the decoder of an encoder for images, and attends to it",
    "xlnet": "attends to tokens in permuted order by two streams, and not to those on the left",
    "xlstm": "has a matrix memory whose scale each token moves (mLSTM), in a cache of its own",
    "xmod": "has adapters of each language, and no input that says which",
    "yoso": APPROXIMATE,
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


def refuse(config: Any, head: TaskHead = DECODER) -> None:
    """Refuse a family that is not taken, with the reason."""
    if head.kind == NEXT_TOKEN and is_encoder(config) and not config.is_encoder_decoder:
        what = head.architecture or "no architecture"
        raise ExportError(f"a {config.model_type!r} model with {what}: {HEADLESS}")
    for word, taken, what in SETTINGS.get(config.model_type, ()):
        if getattr(config, word) != taken:
            raise ExportError(f"a {config.model_type!r} model {what}: its config says {word}; mionnx takes {taken!r}")
    if is_encoder(config) and head.kind != NEXT_TOKEN:
        return
    if head.kind != NEXT_TOKEN and _carries_state(config):
        raise ExportError(
            f"a {config.model_type!r} model with {head.architecture}: of models whose layers carry a state mionnx "
            "takes those that write tokens"
        )
    listed = config.model_type in FAMILIES  # with all that its layers carry: no model is made to look
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
