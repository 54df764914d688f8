"""Taps: where the instrumented torch model hands each hook point's tensor to whoever listens.

The same taps serve tracing (a marker in the graph), recording (the value in eager mode) and editing (another value in
eager mode), so that the exported graph and the eager model mean the same thing by a hook point. Those inside attention
are in `attention`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from exporters.transformers.attention import ATTENTION, Listener, Taps, TapWhole, active, replace_for, tap_rotation
from exporters.transformers.experts import find_experts, shared_expert, tap_router
from exporters.transformers.families import Layout
from exporters.transformers.function_modes import (
    InOrder,
    KeepAxes,
    TapAdditions,
    TapHalves,
    TapSum,
    choose_all,
    quantile,
)
from exporters.transformers.own_attention import TapProducts, add_cache, plain_maximum, tap_split_heads
from exporters.transformers.own_embedding import TapEmbedding
from exporters.transformers.own_experts import mix_heads, tap_own_experts
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint


class Passed(nn.Module):
    """Stand-in for a layer that is not traced: it hands the stream on, and has its attributes."""

    def __init__(self, layer: nn.Module, returned: int) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, returned=returned)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The stream as it came, in the place where the layer returns it."""
        stream = args[0] if args else kwargs["hidden_states"]
        return (stream, *[None] * (self.returned - 1)) if self.returned else stream

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


def submodule(model: PreTrainedModel, path: str, root: nn.Module | None = None) -> nn.Module:
    """A module by its path.

    Args:
        model: the whole model.
        path: from the root on.
        root: a block of it; the model itself if None.

    Raises:
        ExportError: there is none.
    """
    try:
        return (model if root is None else root).get_submodule(path)
    except AttributeError as error:
        raise ExportError(
            f"{model.config.model_type!r} models have no module {path!r} where it was expected: "
            "the family needs an entry in exporters/transformers/families.py"
        ) from error


class _Attachment:
    """The hooks of one `attached` context, collected so that all of them come off together."""

    def __init__(self, model: PreTrainedModel, layout: Layout, taps: Taps, stack: ExitStack) -> None:
        self.model, self.layout, self.taps, self.stack = model, layout, taps, stack

    def module(self, path: str, root: nn.Module | None = None) -> nn.Module:
        return submodule(self.model, path, root)

    def has(self, path: str | None, root: nn.Module) -> bool:
        """Whether there is such a module."""
        return path is not None and path in dict(root.named_modules())

    def before(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if args:
                return (function(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}

        self.stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, _args: tuple, output: Any) -> Any:
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
        at, layout = self.taps.at, self.layout

        def final(x: Tensor) -> Tensor:  # a model may norm its embeddings by the same module
            return at(HookPoint.FinalNorm, x) if self.taps.read else x

        if layout.embeds_in_code:
            rows = self.model.config.max_position_embeddings
            self.enter_around(self.module(layout.embeds_in_code), lambda _: TapEmbedding(self.taps, rows))
        else:
            embedding = self.module(layout.embedding) if layout.embedding else self.model.get_input_embeddings()
            self.after(embedding, lambda x: at(HookPoint.Embed, x))
        if layout.positions:
            self.after(self.module(layout.positions), lambda x: at(HookPoint.PosEmbed, x))
        if layout.final_norm:
            self.after(self.module(layout.final_norm), final)

    def block(self, i: int, block: nn.Module) -> None:
        at, layout = self.taps.at, self.layout
        if layout.streams:
            self.streams(i, self.module(layout.streams, block))
            if share := getattr(self.module(layout.mlp_input, block), "activation_sparsity", 0.0):
                self.enter_around(self.module(layout.mlp_input, block), lambda _: quantile(share))
        else:
            self.stream_before(i, block)
        self.rope(self.module(layout.attention, block), i)
        self.heads(i, block)
        if layout.adds_products:
            self.enter_around(block, lambda stream: TapAdditions(self.taps, i, stream))
        else:
            self.after(self.module(layout.attention_added, block), lambda x: at(HookPoint.AttnOut(i), x))
            if layout.middle:
                self.before(self.module(layout.middle, block), lambda x: at(HookPoint.ResidMid(i), x, stream=True))
        self.mlp(i, block)
        if not layout.adds_products:
            self.after(self.module(layout.mlp_added, block), lambda x: at(HookPoint.MlpOut(i), x))
        if not layout.streams and (i + 1) % layout.halves == 0:
            self.after(block, lambda x: at(HookPoint.ResidPost(i), x))
        if layout.flattens:
            self.enter_around(block, lambda _: KeepAxes())

    def stream_before(self, i: int, block: nn.Module) -> None:
        """Tap the stream before a layer; inside a block, also as that after the layer before."""
        at = self.taps.at
        if i % self.layout.halves == 0:
            self.before(block, lambda x: at(HookPoint.ResidPre(i), x))
            return
        begins = self.module(str(self.layout.begins), block)
        for point in (HookPoint.ResidPost(i - 1), HookPoint.ResidPre(i)):
            self.before(begins, lambda x, point=point: at(point, x, stream=True))

    def streams(self, i: int, module: Any) -> None:
        """Tap the active stream of several, as predicted and before the correction."""
        at, active = self.taps.at, self.model.config.altup_active_idx
        predict, correct = module.predict, module.correct

        def predicted(streams: Tensor) -> Tensor:
            found = list(predict(streams).unbind(0))
            found[active] = at(HookPoint.ResidPre(i), found[active])
            return torch.stack(found)

        replace_for(self.stack, module, "predict", predicted)
        replace_for(self.stack, module, "correct", lambda made, own: correct(made, at(HookPoint.ResidPost(i), own)))

    def heads(self, i: int, block: nn.Module) -> None:
        """Tap latents, queries and keys before they are cut, and gated outputs of heads."""
        at, layout = self.taps.at, self.layout
        attention = self.module(layout.attention, block)
        for path, point in zip(layout.latents, (HookPoint.AttnQLatent(i), HookPoint.AttnKvLatent(i)), strict=False):
            if self.has(path, attention):  # a model may project its queries without a latent
                self.after(self.module(path, attention), lambda x, point=point: at(point, x))
        if layout.own_attention:
            self.own_attention(i, attention)
        if layout.rotates_part and not layout.splits_heads:
            widths = (getattr(attention, name, None) for name in ("qk_head_dim", "head_size"))
            width = next((width for width in widths if width is not None), None)
            self.enter_around(attention, lambda _: TapWhole(self.taps, i, width))
        if layout.sparse and self.has("indexer", attention):
            replace_for(self.stack, self.module("indexer", attention), "forward", choose_all)

        def z(x: Tensor) -> Tensor:
            query, _ = self.taps.patterns[i]
            return at(HookPoint.AttnZ(i), x.unflatten(-1, (query.shape[1], -1))).flatten(2)

        if layout.mixed_heads:
            mix_heads(self.stack, self.module(layout.mixed_heads, block))
        if layout.z_at_projection and layout.output_projection:
            self.before(self.module(layout.output_projection, block), z)

    def own_attention(self, i: int, attention: nn.Module) -> None:
        """Tap attention that is computed in the family's own code."""
        heads = self.model.config.num_attention_heads
        if self.layout.splits_heads:
            tap_split_heads(self.stack, self.taps, attention, i)
        if self.layout.cacheless:
            add_cache(self.stack, self.taps, attention, i)
        table = None if self.layout.cacheless else getattr(attention, "bias", None)
        self.enter_around(attention, lambda stream: TapProducts(self.taps, i, heads, stream, table))

    def mlp(self, i: int, block: nn.Module) -> None:
        at, layout = self.taps.at, self.layout
        if layout.shortcut:  # several modules read what this norm makes
            self.after(self.module(str(layout.middle), block), lambda x: at(HookPoint.MlpPre(i), self.note(i, x)))
        else:
            self.before(self.module(layout.mlp_input, block), lambda x: at(HookPoint.MlpPre(i), self.note(i, x)))
        found = find_experts(block) if layout.experts else None
        if found is not None:
            self.experts(i, block, found)
        elif not layout.experts or self.has(layout.down, block):
            self.neurons(i, block)
        if layout.shortcut and (i + 1) % layout.halves == 0:
            self.shortcut(i, block)
        if layout.shared:
            self.shared(i, block)
        else:
            self.after(self.module(layout.mlp_output, block), lambda x: self.taps.at_tokens(HookPoint.MlpPost(i), x))

    def shortcut(self, i: int, block: nn.Module) -> None:
        """Compute a mixture where it joins the stream, beside the last half's MLP."""
        mixture: Any = self.module(str(self.layout.shortcut), block)
        tap_own_experts(self.stack, self.taps, mixture)
        tap_router(self.stack, self.taps, mixture)
        compute, read = mixture.forward, []

        def postpone(x: Tensor) -> int:
            read[:] = [x]
            return 0  # which the block adds in its place

        def added(x: Tensor) -> Tensor:
            with InOrder():
                return x + compute(read.pop())

        replace_for(self.stack, mixture, "forward", postpone)
        self.after(self.module(self.layout.mlp_output, block), added)

    def shared(self, i: int, block: nn.Module) -> None:
        """Tap an MLP beside the experts: it reads what they read, and the block adds the two."""
        layout, mode = self.layout, TapSum(self.taps)
        beside = self.module(str(layout.shared), block)
        read: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            read[:] = [x]
            return x

        def made(x: Tensor) -> Tensor:
            mode.made = x
            return x

        self.before(self.module(layout.mlp_input, block), keep)  # after the hook point there
        self.before(beside, lambda _: read.pop())
        self.after(self.module(layout.mlp_output, block), made)
        self.enter_around(block, lambda _: mode)
        self.neurons(i, beside, alone=True)

    def note(self, i: int, x: Tensor) -> Tensor:
        """Note whose MLP runs, and its axes."""
        self.taps.layer, self.taps.tokens = i, (x.shape[0], x.shape[1])
        return x

    def experts(self, i: int, block: nn.Module, parent: nn.Module) -> None:
        """Tap a layer's router and shared expert; chosen experts are tapped where they are computed."""
        tap_own_experts(self.stack, self.taps, parent)
        tap_router(self.stack, self.taps, parent)
        self.enter_around(self.module(self.layout.mlp_input, block), lambda _: InOrder())
        shared = shared_expert(parent)
        if shared is not None:
            self.neurons(i, shared, alone=True)

    def neurons(self, i: int, root: nn.Module, alone: bool = False) -> None:
        """Tap gate, up and activation in a block, or in an MLP that stands `alone`, beside experts."""
        layout = self.layout
        gate, up, both, down = (
            path.rpartition(".")[2] if path and alone else path
            for path in (layout.gate, layout.up, layout.gate_and_up, layout.down)
        )
        for path, point in ((gate, HookPoint.MlpGate(i)), (up, HookPoint.MlpUp(i))):
            if path:
                self.after(self.module(path, root), lambda x, point=point: self.taps.at_tokens(point, x))
        if both:
            self.module(both, root)
            mlp = root if alone else self.module(layout.mlp_input, root)
            self.enter_around(mlp, lambda _: TapHalves(self.taps, i))
        if down:
            self.before(self.module(down, root), lambda x: self.taps.at_tokens(HookPoint.MlpAct(i), x))

    def rope(self, attention: nn.Module, i: int) -> None:
        """Let the family's rotation function know which layer calls it."""

        def enter(_module: nn.Module, _args: tuple) -> None:
            self.taps.layer = i

        self.stack.callback(attention.register_forward_pre_hook(enter).remove)


@contextmanager
def attached(model: PreTrainedModel, layout: Layout, listen: Listener) -> Iterator[Taps]:
    """Instrument a causal language model: `listen` gets each hook point's tensor.

    Args:
        model: a transformers causal language model.
        layout: where its family keeps its modules.
        listen: called as (hook name, tensor, stream); what it returns is what the model goes on with.

    Raises:
        ExportError: the model has no module where the layout says it has.
    """
    taps = Taps(listen, layout)
    with ExitStack() as stack:
        attachment = _Attachment(model, layout, taps, stack)
        blocks = attachment.module(layout.blocks)
        attachment.outside_blocks()
        layers = [(block, half) for block in blocks for half in range(layout.halves)]
        for i, (block, half) in enumerate(layers):
            if not isinstance(block, Passed):
                _Attachment(model, layout.half(half), taps, stack).block(i, block)
        if layout.own_attention:
            stack.enter_context(plain_maximum(model))
        tap_rotation(stack, taps, attachment.module(layout.half(0).attention, blocks[0]))
        replace_for(stack, model.config, "_attn_implementation", ATTENTION)
        stack.callback(active.remove, taps)
        active.append(taps)
        yield taps
