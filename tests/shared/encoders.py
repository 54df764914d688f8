"""Small random text encoders of every family, with every head; their batches, and eager torch as the oracle."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from families import single_threaded
from oracle import Outcome
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from exporters.probe import open_session
from exporters.transformers.heads import TaskHead, head_of
from exporters.transformers.trace import run_once
from mionnx import HookPoint, MIModel

VOCAB, SEQ, LAYERS = 99, 12, 2
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
T5_FAMILIES = ("mt5", "t5", "umt5")
# Families of which nothing predicts masked tokens, and the head that they are looked at with.
OTHER_HEADS = {
    **dict.fromkeys((*T5_FAMILIES, "clip_text_model", "splinter"), "none"),
    "openai_privacy_filter": "token_classes",
}
PROTEINS = {"pad_token_id": 1, "mask_token_id": 32}
T5 = {
    **{"d_model": 32, "num_layers": LAYERS, "num_heads": 4, "d_kv": 8, "d_ff": 48, "vocab_size": VOCAB},
    **{"pad_token_id": 0, "is_encoder_decoder": False, "use_cache": False},
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "distilbert": {
        "dim": 32,
        "n_layers": LAYERS,
        "n_heads": 4,
        "hidden_dim": 48,
        "vocab_size": VOCAB,
        "pad_token_id": 0,
    },
    **dict.fromkeys(("t5", "mt5", "umt5"), T5),
}
CHANGES: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 16},
    "camembert": {"pad_token_id": 1},
    "clip_text_model": {"bos_token_id": 1, "eos_token_id": 7},
    "convbert": {"embedding_size": 16, "conv_kernel_size": 5, "num_groups": 2},
    "deberta": {
        **{"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False},
        **{"type_vocab_size": 0, "max_relative_positions": -1},
    },
    "deberta-v2": {
        **{"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True},
        **{"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0},
        "max_relative_positions": -1,
    },
    "electra": {"embedding_size": 16},
    "esm": {**PROTEINS, "position_embedding_type": "rotary", "token_dropout": True, "emb_layer_norm_before": False},
    "esmc": PROTEINS,
    "eurobert": {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 24, "num_feedforward_networks": 3},
    "modernbert": {
        **{"local_attention": 8, "global_attn_every_n_layers": 2, "num_hidden_layers": 3},
        **{"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    },
    "mpnet": {"pad_token_id": 1},
    "ibert": {"pad_token_id": 1},
    "luke": {"pad_token_id": 1, "entity_vocab_size": 20, "entity_emb_size": 16, "use_entity_aware_attention": True},
    "openai_privacy_filter": {
        **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4},
        **{"num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roberta": {"pad_token_id": 1},
    "layoutlm": {"max_2d_position_embeddings": 16},
    "roc_bert": {
        **{"shape_embed_dim": 8, "shape_vocab_size": 20, "pronunciation_embed_dim": 8, "pronunciation_vocab_size": 20},
    },
    "roformer": {"embedding_size": 32},
    "splinter": {"question_token_id": 7},
    "squeezebert": {"embedding_size": 32},
    "ultrabert": {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "prediction_head_size": 16},
}
READ_NEIGHBOURS = (
    "convbert",
    "mobilebert",
)  # families whose tokens read those beside them, of padding too in transformers
MANY = ("hidden_states", "attentions")  # outputs of transformers that are one a layer
REPRESENTATIVE = ("bert", "modernbert")  # the families of the default run
PADDINGS = ("none", "right", "left")


def encoder_config(family: str, **changes: Any) -> Any:
    """The config of a small encoder."""
    kind = type(AutoConfig.for_model(family))
    return kind(**{**OWN_SIZES.get(family, SIZES), **CHANGES.get(family, {}), **changes})


def usual_head(family: str) -> str:
    """The head that a family is looked at with."""
    return OTHER_HEADS.get(family, "masked_lm")


def architecture(config: Any, head: str) -> str:
    """The name of transformers' class with a head."""
    if config.model_type in T5_FAMILIES and head in ("none", "embedding"):
        return modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)].__name__
    return TaskHead(head).model_class(config).__name__


def make_encoder(family: str, folder: Path, head: str = "masked_lm", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Save a random encoder as a checkpoint; norms are perturbed too."""
    single_threaded()
    torch.manual_seed(seed)
    labels = {"num_labels": 2 if head == "span" else 3}
    config = encoder_config(family, **labels, **changes)
    kind = getattr(transformers, architecture(config, head))
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def encoder_batch(padding: str) -> dict[str, np.ndarray]:
    """Texts of 12, 7 and 4 tokens, or of 12 each without padding, of two token types: ids, mask, positions, types."""
    ids = np.random.default_rng(0).integers(5, VOCAB - 1, (3, SEQ))
    mask = np.ones_like(ids)
    for row, length in enumerate((SEQ, 7, 4) if padding != "none" else ()):
        mask[row, slice(length, None) if padding == "right" else slice(None, SEQ - length)] = 0
    types = (np.arange(SEQ) > SEQ // 2).astype(np.int64)[None].repeat(3, 0)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "position_ids": np.maximum(mask.cumsum(1) - 1, 0),
        "token_type_ids": types,
    }


def run_encoder(
    model: PreTrainedModel, inputs: dict[str, np.ndarray], edit: tuple[str, float] | None = None, head: Any = None
) -> Outcome:
    """One eager pass with taps, the value at one hook point scaled."""
    outcome = Outcome(np.empty(0))

    def listen(name: str, value: torch.Tensor, stream: bool) -> torch.Tensor:
        if edit is not None and name == edit[0]:
            value = value.mul_(edit[1]) if stream else value * edit[1]
        outcome.values[name] = value.numpy().copy()
        return value

    chosen = head_of(model.config) if head is None else head
    given = tuple(torch.from_numpy(array) for array in inputs.values())
    outcome.logits = run_once(model, chosen, listen, given)[0].numpy()
    return outcome


def plain_outputs(
    model: PreTrainedModel, inputs: dict[str, np.ndarray], offset: int | None, attentions: bool = True
) -> Any:
    """transformers' own outputs, streams and patterns; positions are its own where `offset` is None."""
    model.config._attn_implementation = "eager"
    takes = signature(model.forward).parameters
    given = {name: torch.from_numpy(array) for name, array in inputs.items() if name in takes}
    if (getattr(model.config, "type_vocab_size", 0) or 0) < 2:
        given.pop("token_type_ids", None)
    if "position_ids" in given:
        if offset is None:
            del given["position_ids"]
        else:
            given["position_ids"] = given["position_ids"] + offset
    wanted = {"output_hidden_states": True, "output_attentions": attentions}
    if model.config.model_type in READ_NEIGHBOURS:
        return _alone(model, given, wanted)
    with torch.no_grad():
        output = model(**given, **wanted)
    if model.config.model_type == "squeezebert":  # which gives its scores as attentions
        output.attentions = tuple(scores.softmax(-1) for scores in output.attentions or ())
    return output


def _alone(model: PreTrainedModel, given: dict[str, torch.Tensor], wanted: dict[str, bool]) -> Any:
    """The outputs of each row without its padding, as which transformers takes zeros beyond a text."""
    whole: dict[str, Any] = {}
    for row, mask in enumerate(given["attention_mask"].bool()):
        own = {name: tensor[row : row + 1, mask] for name, tensor in given.items()}
        kernels = list[torch.Tensor]()
        with torch.no_grad(), _listening(model, kernels):
            output = model(**own, **wanted)
        if kernels:  # transformers gives the patterns of the heads that attend
            patterns = [_pattern_of_kernels(one, model.config.conv_kernel_size) for one in kernels]
            output.attentions = [torch.cat(pair, 1) for pair in zip(output.attentions, patterns, strict=True)]
        for name, value in output.items():
            several = isinstance(value, tuple | list)
            parts = [_spread(name, one, mask) for one in (value if several else [value])]
            kept = whole.setdefault(name, [[] for _ in parts])
            for rows, part in zip(kept, parts, strict=True):
                rows.append(part)
    joined = {name: [torch.cat(rows) for rows in lists] for name, lists in whole.items()}
    return type(output)(**{name: one if name in MANY else one[0] for name, one in joined.items()})


def _spread(name: str, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A value of a row with zeros in the place of its padding."""
    axes = {"attentions": (2, 3), "pooler_output": ()}.get(name, (1,))
    for axis in axes if name != "logits" or value.dim() > 2 else ():
        full = value.new_zeros(*value.shape[:axis], len(mask), *value.shape[axis + 1 :])
        value = full.index_copy(axis, mask.nonzero()[:, 0], value)
    return value


@contextmanager
def _listening(model: PreTrainedModel, kernels: list[torch.Tensor]) -> Iterator[None]:
    modules = [one for name, one in model.named_modules() if name.endswith("conv_kernel_layer")]
    hooks = [one.register_forward_hook(lambda _module, _args, output: kernels.append(output)) for one in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _pattern_of_kernels(weights: torch.Tensor, kernel: int) -> torch.Tensor:
    """[1, n_heads, seq, seq] of ConvBERT's kernels [1, seq, n_heads * kernel], one number after the other."""
    shares = weights.unflatten(-1, (-1, kernel)).softmax(-1)
    pattern = shares.new_zeros(1, shares.shape[2], shares.shape[1], shares.shape[1])
    for token in range(shares.shape[1]):
        for step in range(kernel):
            key = token + step - kernel // 2
            if 0 <= key < shares.shape[1]:
                pattern[:, :, token, key] = shares[:, token, :, step]
    return pattern


def graph_values(model: MIModel, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every hook point and output of an encoder's graph in one run of its file."""
    hooked = model.hooked
    main = hooked.proto.graph.output[0].name
    names = [*hooked.metadata.hooks, main]
    session = open_session(hooked.proto, hooked.folder, names)
    values = session.run(names, {entry.name: inputs[entry.name] for entry in session.get_inputs()})
    found = dict(zip(names, values, strict=True))
    return found | {hooked.metadata.output: found[main]}


def real_difference(name: str, one: np.ndarray, other: np.ndarray, mask: np.ndarray) -> float:
    """The largest difference at tokens that are no padding, and at keys that are not masked."""
    axes = HookPoint.parse(name).axes or ("batch", "seq")
    for axis in [place for place, axis in enumerate(axes) if axis in ("seq", "seq_q")]:
        one, other = (np.moveaxis(array, axis, 1)[mask.astype(bool)] for array in (one, other))
    seen = (one > -1e30) | (other > -1e30)
    return float(np.abs(one[seen] - other[seen]).max())


def heads_of_family(family: str) -> Iterator[str]:
    """The heads that transformers has for a family."""
    config = encoder_config(family)
    for head in ("masked_lm", "classes", "token_classes", "span", "none"):
        try:
            architecture(config, head)
        except Exception:
            continue
        yield head
