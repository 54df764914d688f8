"""Taps: where the instrumented torch model hands each hook point's tensor to whoever listens.

The same taps serve tracing (a marker in the graph), recording (the value in eager mode) and editing (another value in
eager mode), so that the exported graph and the eager model mean the same thing by a hook point. Those inside attention
are in `attention` and `own_attention`; families that need others are in `quirks`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exporters.transformers.attention import Calls, Taps, replace_for, tap_whole
from exporters.transformers.config import kept_keys
from exporters.transformers.experts import find_experts, in_order, shared_expert, tap_own_experts, tap_router
from exporters.transformers.layout import IN_CODE, Layout
from exporters.transformers.own_attention import tap_gate, tap_products
from exporters.transformers.recurrent import mixer_of, tap_recurrences
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint

ADDITIONS = (Tensor.add, Tensor.__add__, torch.add)
LATENTS = {"q_a_layernorm": HookPoint.AttnQLatent, "kv_a_layernorm": HookPoint.AttnKvLatent}


def tap_halves(taps: Taps, layer: int) -> Calls:
    """Tap the two halves into which an MLP splits its fused gate-and-up projection."""

    def answer(func: Any, args: Any, options: Any) -> Any:
        result = func(*args, **options)
        if func not in (Tensor.chunk, torch.chunk):
            return result
        points = HookPoint.MlpGate(layer), HookPoint.MlpUp(layer)
        return tuple(taps.at_tokens(point, half) for point, half in zip(points, result, strict=True))

    return Calls(answer)


def tap_additions(taps: Taps, layer: int, stream: Tensor) -> Calls:
    """Tap the terms of a block's additions to the stream, and the stream after each."""
    points = [HookPoint.AttnOut(layer), HookPoint.MlpOut(layer)]

    def answer(func: Any, args: Any, options: Any) -> Any:
        nonlocal stream
        if func not in ADDITIONS or not any(value is stream for value in args):
            return func(*args, **options)
        stream = stream + taps.at(points.pop(0), args[1] if args[0] is stream else args[0])
        if points:
            stream = taps.at(HookPoint.ResidMid(layer), stream, stream=True)
        return stream

    return Calls(answer)


def choose_all(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand in for a choice of keys: the attention of mionnx reads all of them."""
    return hidden.new_zeros(0)


def submodule(model: PreTrainedModel, path: str, root: nn.Module | None = None) -> nn.Module:
    """A module by its path from a module of the model on, or from the model itself; "" is the root."""
    try:
        return (model if root is None else root).get_submodule(path)
    except AttributeError as error:
        raise ExportError(
            f"{model.config.model_type!r} models have no module {path!r} where it was expected: "
            "the family needs an entry in exporters/transformers/families.py"
        ) from error


class Attachment:
    """The hooks on a model; the stack takes all of them off together."""

    def __init__(self, model: PreTrainedModel, layout: Layout, taps: Taps, stack: ExitStack) -> None:
        self.model, self.layout, self.taps, self.stack = model, layout, taps, stack

    def module(self, path: str, root: nn.Module | None = None) -> nn.Module:
        return submodule(self.model, path, root)

    def has(self, path: str, root: nn.Module) -> bool:
        """Whether there is such a module."""
        return path in dict(root.named_modules())

    def before(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (function(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}

        self.stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            if isinstance(output, tuple | list):
                return type(output)([function(output[0]), *output[1:]])
            return function(output)

        self.stack.callback(module.register_forward_hook(hook).remove)

    def enter_around(self, module: nn.Module, mode: Callable[[Any], Any]) -> None:
        """Run a module's forward inside a context of its own, made of what it is given first."""
        forward = module.forward

        def inside(*args: Any, **kwargs: Any) -> Any:
            with mode(args[0] if args else kwargs.get("hidden_states")):
                return forward(*args, **kwargs)

        replace_for(self.stack, module, "forward", inside)

    def outside_blocks(self) -> None:
        def final(x: Tensor) -> Tensor:  # a model may norm its embeddings by the same module
            begun = self.taps.read or self.taps.carried
            return self.taps.at(HookPoint.FinalNorm, x) if begun else x

        self.embeddings()
        if self.layout.final_norm:
            self.after(self.module(self.layout.final_norm), final)

    def embeddings(self) -> None:
        layout = self.layout
        embedded = partial(self.taps.at, HookPoint.Embed)
        if layout.embedding == IN_CODE:
            self.before(self.module(f"{layout.blocks}.0"), embedded)
        else:
            table = self.module(layout.embedding) if layout.embedding else self.model.get_input_embeddings()
            self.after(table, embedded)
        if layout.positions not in (None, IN_CODE):
            self.after(self.module(str(layout.positions)), partial(self.taps.at, HookPoint.PosEmbed))
        if layout.types:
            self.after(self.module(layout.types), partial(self.taps.at, HookPoint.TokenTypeEmbed))

    def attends(self, block: nn.Module) -> bool:
        """Whether a block has attention."""
        return mixer_of(block, self.layout) is None

    def block(self, i: int, block: nn.Module) -> None:
        """Tap layer `i`, which a block holds, alone or among others."""
        layout = self.layout
        self.stream_before(i, block)
        for path, point in ((layout.mid_norm, HookPoint.ResidMidSum), (layout.post_norm, HookPoint.ResidPostSum)):
            if path:
                self.before(self.module(path, block), partial(self.taps.at, point(i)))
        mixer = mixer_of(block, layout)
        if mixer is None:
            self.name_layer(i, self.module(layout.attention, block))
            self.heads(i, block)
        else:
            self.name_layer(i, mixer)
            self.mixer(i, mixer)
        self.first_addition(i, block, mixer)
        if layout.mlp is not None:
            self.mlp(i, block)
            self.second_addition(i, block)
        self.stream_after(i, block)

    def first_addition(self, i: int, block: nn.Module, mixer: nn.Module | None) -> None:
        """Tap what attention or a mixer adds to the stream, and the stream behind it."""
        # Before the MLP's input, which may be the same value: the stream is what that one is made of.
        layout, at = self.layout, self.taps.at
        if layout.stream == "products":
            self.enter_around(block, lambda stream: tap_additions(self.taps, i, stream))
            return
        own = mixer if mixer is not None else self.module(layout.attention, block)
        added = self.module(layout.attention_added, block) if layout.attention_added else own
        self.after(added, partial(at, HookPoint.AttnOut(i)))
        if layout.middle:
            self.before(self.module(layout.middle, block), partial(at, HookPoint.ResidMid(i), stream=True))

    def second_addition(self, i: int, block: nn.Module) -> None:
        """Tap what an MLP adds to the stream."""
        layout = self.layout
        if layout.stream != "products":
            added = (
                self.module(layout.mlp_added, block) if layout.mlp_added else self.mlp_part(block, layout.mlp_output)
            )
            self.after(added, partial(self.taps.at, HookPoint.MlpOut(i)))

    def recurrences(self, mixer: nn.Module) -> None:
        """Tap the functions by which a family's mixers compute."""
        tap_recurrences(self.stack, self.taps, mixer)

    def mixer(self, i: int, mixer: nn.Module) -> None:
        """Tap what a recurrent mixer reads, and what its output projection reads; what is between is in functions."""

        def z(x: Tensor) -> Tensor:
            last = self.taps.carried[i][-1]  # a state, or the columns of a convolution
            heads = last.shape[1] if last.dim() == 4 else 1
            return self.taps.at(HookPoint.SsmZ(i), x.unflatten(-1, (heads, -1))).flatten(2)

        self.before(mixer, partial(self.taps.at, HookPoint.SsmPre(i)))
        self.before(self.module(self.layout.mixer_output, mixer), z)

    def stream_before(self, i: int, block: nn.Module) -> None:
        self.before(block, partial(self.taps.at, HookPoint.ResidPre(i)))

    def stream_after(self, i: int, block: nn.Module) -> None:
        self.after(block, partial(self.taps.at, HookPoint.ResidPost(i)))

    def name_layer(self, i: int, attention: nn.Module) -> None:
        """Let the family's rotation function know which layer calls it."""

        def enter(_module: nn.Module, _args: Any) -> None:
            self.taps.layer = i

        self.stack.callback(attention.register_forward_pre_hook(enter).remove)

    def heads(self, i: int, block: nn.Module) -> None:
        """Tap latents, queries and keys before they are cut, and gated outputs of heads."""
        at, layout = self.taps.at, self.layout
        attention = self.module(layout.attention, block)
        for path, point in LATENTS.items() if layout.keys == "latents" else ():
            if self.has(path, attention):  # a model may project its queries without a latent
                self.after(self.module(path, attention), partial(self.taps.at, point(i)))
        if layout.keys == "split":
            self.split_heads(i, attention.get_submodule("self"))
        if layout.keys in ("own", "split"):
            self.own_attention(i, attention, getattr(attention, "bias", None))
        if layout.rotation == "part":
            self.cut_heads(i, attention)
        if self.has("indexer", attention) and kept_keys(self.model.config):  # `Sizes.max_positions` is within these
            replace_for(self.stack, self.module("indexer", attention), "forward", choose_all)

        def z(x: Tensor) -> Tensor:
            query, _ = self.taps.patterns[i]
            return at(HookPoint.AttnZ(i), x.unflatten(-1, (query.shape[1], -1))).flatten(2)

        if layout.z == "projection":
            self.enter_around(attention, lambda _: tap_gate(self.taps, i))
            self.before(self.module(str(layout.projection), block), z)

    def own_attention(self, i: int, attention: nn.Module, mask: Tensor | None) -> None:
        """Tap attention in the family's own code, with its own causal mask, if any."""
        heads = self.model.config.num_attention_heads
        self.enter_around(attention, lambda stream: tap_products(self.taps, i, heads, stream, mask))

    def split_heads(self, i: int, attention: Any) -> None:
        """Tap queries, keys and values, [batch * n_heads, seq, head_dim], as `transpose_for_scores` gives them."""
        points, split = list[HookPoint](), attention.transpose_for_scores
        seen = list[Tensor]()

        def splitting(x: Tensor, count: int) -> Tensor:
            heads = split(x, count)
            if not points:
                return heads
            seen.append(self.taps.at(points.pop(0), heads.unflatten(0, (x.shape[0], count))))
            if not points:
                self.taps.read[i] = seen[1], seen[2]
            return seen[-1].flatten(0, 1)

        def begin(_module: nn.Module, _args: Any) -> None:
            points[:], seen[:] = [HookPoint.AttnQ(i), HookPoint.AttnK(i), HookPoint.AttnV(i)], []

        self.stack.callback(attention.register_forward_pre_hook(begin).remove)
        replace_for(self.stack, attention, "transpose_for_scores", splitting)

    def cut_heads(self, i: int, attention: nn.Module) -> None:
        """Tap queries and keys of which a part is cut off and rotated."""
        widths = (getattr(attention, name, None) for name in ("qk_head_dim", "head_size"))
        width = next((width for width in widths if width is not None), None)
        self.enter_around(attention, lambda _: tap_whole(self.taps, i, width))

    def mlp_part(self, block: nn.Module, part: str) -> nn.Module:
        """A part of the MLP of a block; the MLP itself where none is named."""
        return self.module(f"{self.layout.mlp}.{part}".strip("."), block)

    def mlp(self, i: int, block: nn.Module) -> None:
        layout = self.layout
        reader = self.mlp_part(block, "" if layout.mlp else str(layout.up))
        self.before(reader, lambda x: self.taps.at(HookPoint.MlpPre(i), self.note(i, x)))
        mixture = find_experts(block)
        if mixture is None:
            self.neurons(i, block, layout.mlp)
        else:
            self.experts(i, reader, mixture)
        self.mlp_result(i, block)

    def mlp_result(self, i: int, block: nn.Module) -> None:
        module = self.mlp_part(block, self.layout.mlp_output)
        self.after(module, partial(self.taps.at_tokens, HookPoint.MlpPost(i)))

    def note(self, i: int, x: Tensor) -> Tensor:
        """Note whose MLP runs, and its axes."""
        self.taps.layer, self.taps.tokens = i, (x.shape[0], x.shape[1])
        return x

    def experts(self, i: int, reader: nn.Module, mixture: nn.Module) -> None:
        """Tap a layer's router and shared expert; chosen experts are tapped where they are computed."""
        tap_own_experts(self.stack, self.taps, mixture)
        tap_router(self.stack, self.taps, mixture)
        self.enter_around(reader, lambda _: Calls(in_order))
        shared = shared_expert(mixture)
        if shared is not None:
            self.neurons(i, shared)

    def neurons(self, i: int, root: nn.Module, mlp: str = "") -> None:
        """Tap gate, up and activation of an MLP, by its path from a root."""
        layout, at = self.layout, self.taps.at_tokens

        def part(name: str) -> nn.Module:
            return self.module(f"{mlp}.{name}".strip("."), root)

        for name, point in ((layout.gate, HookPoint.MlpGate(i)), (layout.up, HookPoint.MlpUp(i))):
            if name:
                self.after(part(name), partial(at, point))
        if layout.gate_and_up:
            part(layout.gate_and_up)
            self.enter_around(part(""), lambda _: tap_halves(self.taps, i))
        if layout.down:
            self.before(part(layout.down), partial(at, HookPoint.MlpAct(i)))
