"""Small random checkpoints of families with other modules than Llama's, and where eager torch shows their hook points.

An oracle that shares no code with the exporter, neither with its taps nor with its recogniser: modules by their paths,
softmax by `TorchFunctionMode`, keys and values by the cache's `update`. Every tap is a view of a tensor of the model,
in the axes of its hook point, so that an edit is a copy into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from families import VOCAB, WINDOW
from oracle import Edits, Inputs, Outcome, apply, spares, sparing
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

from mionnx import HookPoint

View = Callable[[Tensor], Tensor]
HEADS, WIDTH = 4, 16
SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)
BASE = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def heads(x: Tensor) -> Tensor:
    """[batch, seq, heads * width] as [batch, heads, seq, width]."""
    return x.view(*x.shape[:2], -1, WIDTH).transpose(1, 2)


def third(number: int) -> View:
    """Queries, keys or values of [batch, seq, heads, 3, width]."""
    return lambda x: x.view(*x.shape[:2], HEADS, 3, WIDTH)[..., number, :].transpose(1, 2)


def chunk(number: int) -> View:
    """Queries, keys or values that stand one after the other."""
    return lambda x: heads_of_slice(x.chunk(3, dim=2)[number])


def heads_of_slice(x: Tensor) -> Tensor:
    """`heads` of a slice, as a view."""
    return x.unflatten(2, (-1, WIDTH)).transpose(1, 2)


@dataclass(frozen=True)
class Unlisted:
    """A family: its config, and the modules of one block; "<" before a path takes what the module reads.

    Attributes:
        kind: the `model_type`.
        config: what is not the default of it.
        blocks: path of the blocks.
        taps: short hook name -> module, and the view of its tensor.
        final: path of the final norm; None without one.
        rotary: whether what the cache takes is rotated.
        unseen: hook points of which a tap is no view, so that an edit there would not be seen.
    """

    kind: str
    config: dict[str, Any]
    blocks: str
    taps: dict[str, tuple[str, View]]
    final: str | None
    rotary: bool = False
    unseen: tuple[str, ...] = ()


def plain(x: Tensor) -> Tensor:
    """A tensor as it is."""
    return x


def by_head(x: Tensor) -> Tensor:
    """[batch, seq, heads * width] as [batch, seq, heads, width]."""
    return x.view(*x.shape[:2], -1, WIDTH)


def usual(
    attention: str, dense: str, up: str, down: str, mid: str | None = None, **others: tuple[str, View]
) -> dict[str, tuple[str, View]]:
    """The taps that nearly every family has."""
    found = {
        "attn.hook_z": (f"<{attention}{dense}", by_head),
        "hook_attn_out": (f"{attention}{dense}", plain),
        "mlp.hook_pre": (f"<{up}", plain),
        "mlp.hook_up": (up, plain),
        "mlp.hook_act": (f"<{down}", plain),
        "mlp.hook_post": (down, plain),
        "hook_mlp_out": (down, plain),
        **({"hook_resid_mid": (f"<{mid}", plain)} if mid else {}),
    }
    return found | {f"attn.hook_{name}": (f"{attention}{path}", view) for name, (path, view) in others.items()}


def grouped(first: int | None, last: int | None) -> View:
    """Some of the heads of falcon's groups, repeated as its cache has them; no view."""
    return lambda x: (
        x.view(*x.shape[:2], 2, 4, WIDTH)[:, :, :, first:last].expand(-1, -1, 2, 2, WIDTH).flatten(2, 3).transpose(1, 2)
    )


FALCON = {"hidden_size": 64, "num_attention_heads": HEADS, "num_hidden_layers": 2, "ffn_hidden_size": 96}
LINES = {"n_embd": 64, "n_head": HEADS, "n_layer": 2, "n_positions": 64}
FUSED = ("self_attention.", "dense")
FAMILIES = {
    "bloom": Unlisted(
        "bloom",
        {"hidden_size": 64, "n_head": HEADS, "n_layer": 2},
        "transformer.h",
        usual(
            *FUSED,
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            "post_attention_layernorm",
            q=("query_key_value", third(0)),
        ),
        "transformer.ln_f",
    ),
    "falcon": Unlisted(
        "falcon",
        FALCON,
        "transformer.h",
        usual(
            *FUSED,
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            q=("query_key_value", lambda x: heads_of_slice(x)[:, :-2]),
            k=("query_key_value", lambda x: heads_of_slice(x)[:, -2:-1]),
        ),
        "transformer.ln_f",
        rotary=True,
    ),
    "falcon, new decoder": Unlisted(
        "falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        "transformer.h",
        usual(
            *FUSED,
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            q=("query_key_value", grouped(None, -2)),
            k=("query_key_value", grouped(-2, -1)),
        ),
        "transformer.ln_f",
        rotary=True,
        unseen=("attn.hook_q", "attn.hook_k"),
    ),
    "falcon, alibi": Unlisted(
        "falcon",
        {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        "transformer.h",
        usual(
            *FUSED,
            "mlp.dense_h_to_4h",
            "mlp.dense_4h_to_h",
            "post_attention_layernorm",
            q=("query_key_value", third(0)),
        ),
        "transformer.ln_f",
    ),
    "mpt": Unlisted(
        "mpt",
        {"d_model": 64, "n_heads": HEADS, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2},
        "transformer.blocks",
        usual("attn.", "out_proj", "ffn.up_proj", "ffn.down_proj", "norm_2", q=("Wqkv", chunk(0))),
        "transformer.norm_f",
    ),
    "gptj": Unlisted(
        "gptj",
        {**LINES, "rotary_dim": 8},
        "transformer.h",
        usual("attn.", "out_proj", "mlp.fc_in", "mlp.fc_out", q=("q_proj", heads), k=("k_proj", heads)),
        "transformer.ln_f",
        rotary=True,
    ),
    "codegen": Unlisted(
        "codegen",
        {**LINES, "n_ctx": 64, "rotary_dim": 8},
        "transformer.h",
        usual("attn.", "out_proj", "mlp.fc_in", "mlp.fc_out", q=("qkv_proj", third(0)), k=("qkv_proj", third(2))),
        "transformer.ln_f",
        rotary=True,
    ),
    "gpt_neo": Unlisted(
        "gpt_neo",
        {
            **{"hidden_size": 64, "num_heads": HEADS, "num_layers": 2, "intermediate_size": 96},
            **{"max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
        },
        "transformer.h",
        usual("attn.attention.", "out_proj", "mlp.c_fc", "mlp.c_proj", "ln_2", q=("q_proj", heads)),
        "transformer.ln_f",
    ),
    "xglm": Unlisted(
        "xglm",
        {"d_model": 64, "attention_heads": HEADS, "num_layers": 2, "ffn_dim": 96, "max_position_embeddings": 64},
        "model.layers",
        usual(
            "self_attn.", "out_proj", "fc1", "fc2", "final_layer_norm", q=("q_proj", lambda x: heads(x) * WIDTH**-0.5)
        ),
        "model.layer_norm",
        unseen=("attn.hook_q",),
    ),
    "biogpt": Unlisted(
        "biogpt",
        {
            **{"hidden_size": 64, "num_attention_heads": HEADS, "num_hidden_layers": 2, "intermediate_size": 96},
            "max_position_embeddings": 64,
        },
        "biogpt.layers",
        usual("self_attn.", "out_proj", "fc1", "fc2", "final_layer_norm", q=("q_proj", heads)),
        "biogpt.layer_norm",
    ),
    "openai-gpt": Unlisted(
        "openai-gpt",
        LINES,
        "transformer.h",
        {
            **usual("attn.", "c_proj", "mlp.c_fc", "mlp.c_proj", q=("c_attn", chunk(0)), k=("c_attn", chunk(1))),
            "attn.hook_v": ("attn.c_attn", chunk(2)),
            "hook_resid_mid": ("ln_1", plain),
        },
        None,
    ),
    "ctrl": Unlisted(
        "ctrl",
        {**LINES, "dff": 96},
        "transformer.h",
        usual("multi_head_attention.", "dense", "ffn.0", "ffn.2", "layernorm2", q=("Wq", heads)),
        "transformer.layernorm",
    ),
}


def make(name: str) -> PreTrainedModel:
    """A random model in eager attention."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.kind, **{**BASE, **family.config})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    return model


class Watch(TorchFunctionMode):
    """Shows a listener every tap of one call; what it gives back is copied into the tensor."""

    def __init__(self, family: Unlisted, listen: Callable[[str, Tensor], Tensor], first: int = 0) -> None:
        super().__init__()
        self.family, self.listen, self.layer, self.first = family, listen, 0, first

    def show(self, name: str, tensor: Tensor, view: View = plain) -> None:
        seen = view(tensor)
        if self.first:  # tokens from there on are shown
            axes = HookPoint.parse(name).axes
            axis = axes.index("seq_q" if "seq_q" in axes else "seq")
            seen = seen.narrow(axis, self.first, seen.shape[axis] - self.first)
        changed = self.listen(name, seen)
        if changed is not seen:
            seen.copy_(changed)

    def inside(self, short: str, tensor: Tensor, view: View = plain) -> None:
        self.show(f"blocks.{self.layer}.{short}", tensor, view)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in SOFTMAX:
            return func(*args, **(kwargs or {}))
        scores = args[0].contiguous()
        self.inside("attn.hook_scores", scores, partial(four_axes, scores))
        pattern = func(scores, *args[1:], **(kwargs or {}))
        self.inside("attn.hook_pattern", pattern, partial(four_axes, pattern))
        return pattern


def four_axes(tensor: Tensor, _same: Tensor) -> Tensor:
    """Scores with an axis of heads."""
    return tensor if tensor.dim() == 4 else tensor.view(-1, HEADS, *tensor.shape[1:])


class WatchedCache(DynamicCache):
    """A cache that shows the keys and values of a call."""

    watch: Watch | None = None

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.watch is not None:
            key, value = key.clone(), value.clone()
            self.watch.inside("attn.hook_rot_k" if self.watch.family.rotary else "attn.hook_k", key)
            self.watch.inside("attn.hook_v", value)
        return super().update(key, value, layer_idx, *args, **kwargs)


def attach(model: PreTrainedModel, watch: Watch, stack: ExitStack) -> None:
    """Put the taps on a model, until the stack unwinds."""
    family = watch.family

    def before(module: torch.nn.Module, function: Callable[[Tensor], None]) -> None:
        def hook(_module: Any, args: tuple, kwargs: dict) -> None:
            function(args[0] if args else kwargs["hidden_states"])

        stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def alone(module: torch.nn.Module, function: Callable[[Tensor], None]) -> None:
        """What a module reads, for nobody else who reads it."""

        def hook(_module: Any, args: tuple) -> tuple:
            own = args[0].clone()
            function(own)
            return (own, *args[1:])

        stack.callback(module.register_forward_pre_hook(hook).remove)

    def after(module: torch.nn.Module, function: Callable[[Tensor], None]) -> None:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            function(output[0] if isinstance(output, tuple | list) else output)

        stack.callback(module.register_forward_hook(hook).remove)

    for i, block in enumerate(model.get_submodule(family.blocks)):
        before(block, lambda x, i=i: (setattr(watch, "layer", i), watch.inside("hook_resid_pre", x))[1])
        for short, (path, view) in family.taps.items():
            place = alone if short == "mlp.hook_pre" else before if path.startswith("<") else after
            place(block.get_submodule(path.removeprefix("<")), partial(watch.inside, short, view=view))
        after(block, partial(watch.inside, "hook_resid_post"))
    if family.final:
        after(model.get_submodule(family.final), partial(watch.show, "hook_final_norm"))


def run(name: str, model: PreTrainedModel, inputs: Inputs, edits: Edits = ()) -> Outcome:
    """One eager pass over the tokens after the past, as `oracle.run`; over all where a family knows no past."""
    family, outcome = FAMILIES[name], Outcome(None)
    ids, mask, positions = (torch.from_numpy(array) for array in (inputs.ids, inputs.mask, inputs.positions))
    rest = slice(inputs.past, None)
    here, keys = torch.where(mask[:, rest].bool(), positions[:, rest], -1), torch.where(mask.bool(), positions, -1)
    ends = mask.sum(1)

    def listen(name: str, value: Tensor) -> Tensor:
        changed = value
        for point, edit in edits:
            if point.name == name:
                edited = apply(changed, point, edit, here, ends, keys)
                changed = sparing(edited, changed, here, keys) if spares(point, edit) else edited
        outcome.values[name] = changed.numpy().copy()
        return changed

    takes = inspect.signature(model.forward).parameters
    word = "cache" if "cache" in takes else "past_key_values"  # since transformers 5.24, and before
    cache = WatchedCache()

    def call(part: slice) -> Any:
        given = {"position_ids": positions[:, part]} if "position_ids" in takes else {}
        given |= {word: cache, "use_cache": True} if word in takes else {}
        return model(input_ids=ids[:, part], attention_mask=mask[:, : part.stop or mask.shape[1]], **given).logits

    known = word in takes
    with torch.no_grad(), ExitStack() as stack:
        if inputs.past and known:
            call(slice(0, inputs.past))
        cache.watch = watch = Watch(family, listen, 0 if known else inputs.past)
        attach(model, watch, stack)
        stack.enter_context(watch)
        logits = call(rest if known else slice(None))
        watch.show(str(HookPoint.Logits), logits)
    outcome.logits = logits.numpy()[:, 0 if known else inputs.past :]
    return outcome
