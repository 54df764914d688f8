"""Taps: where the instrumented torch model hands each hook point's tensor to whoever listens.

The same taps serve tracing (a marker in the graph), recording (the value in eager mode) and editing (another value in
eager mode), so that the exported graph and the eager model mean the same thing by a hook point.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import causal_mask_function, eager_mask

from exporters.transformers.families import Layout
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint

ATTENTION = "mionnx"

# (name, value, stream) -> the value to go on with. `stream` says that later readers of `value` itself, and not only of
# the returned tensor, must see a change: the residual stream between attention and MLP feeds a norm and a skip.
Listener = Callable[[str, Tensor, bool], Tensor]


@dataclass
class Taps:
    """One listener on one model, and what the current layer has shown so far."""

    listen: Listener
    layer: int = 0
    rotated: set[int] = field(default_factory=set)

    def at(self, point: HookPoint, value: Tensor, stream: bool = False) -> Tensor:
        """Pass a hook point's value through the listener."""
        return self.listen(str(point), value, stream)


_active: list[Taps] = []


def _taps() -> Taps:
    if not _active:
        raise ExportError("the 'mionnx' attention runs only inside `attached`")
    return _active[-1]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Eager attention in transformers' calling convention, with its hook points.

    query is [batch, n_heads, seq_q, head_dim], key and value [batch, n_kv_heads, seq_k, head_dim], the mask is additive
    and [batch, 1, seq_q, seq_k]; the result is [batch, seq_q, n_heads, head_dim] and the pattern.
    """
    if options.get("s_aux") is not None:
        raise ExportError("attention sinks are not supported: their scores have one column more than there are keys")
    taps, layer = _taps(), module.layer_idx
    if layer not in taps.rotated:
        query = taps.at(HookPoint.AttnQ(layer), query)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = taps.at(HookPoint.AttnScores(layer), scores + attention_mask)
    pattern = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    pattern = taps.at(HookPoint.AttnPattern(layer), pattern)
    z = taps.at(HookPoint.AttnZ(layer), torch.matmul(pattern, value).transpose(1, 2))
    return z.contiguous(), pattern


def _mask(local_size: int | None = None, **options: Any) -> Tensor:
    """Eager attention's mask in transformers' calling convention.

    It is [batch, 1, seq_q, seq_k], 0 or the dtype's lowest number. A sliding window of `local_size` keys counts the
    tokens of each row's own text. transformers counts columns, which is the same where no padding stands between
    tokens; it does where texts padded on the right are continued.
    """
    if local_size is None:
        return eager_mask(**options)
    places = options["attention_mask"].cumsum(dim=1)

    def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = places.index_select(1, query.flatten())[:, None, :, None]
        within = places.index_select(1, key.flatten())[:, None, None, :] > own - local_size
        return causal_mask_function(batch, head, query, key) & within

    return eager_mask(**{**options, "mask_function": near})


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)


class TappedCache(DynamicCache):
    """A full-length key/value cache in every layer that taps values (and unrotated keys)."""

    def __init__(self, past: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layers = [filled(key, value) for key, value in past]
        self.layer_class_to_replicate = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        taps = _taps()
        if layer_idx not in taps.rotated:
            key_states = taps.at(HookPoint.AttnK(layer_idx), key_states)
        value_states = taps.at(HookPoint.AttnV(layer_idx), value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def filled(key: Tensor, value: Tensor) -> DynamicLayer:
    """A layer of a cache that holds keys and values already, of any length."""
    layer = DynamicLayer()
    layer.keys, layer.values = key, value
    layer.dtype, layer.device, layer.is_initialized = key.dtype, key.device, True
    # An empty past is empty along one axis only: the sequence length is then read from the shape, not guessed.
    layer.get_seq_length = lambda: layer.keys.shape[-2]
    return layer


class _KeepAxes(TorchFunctionMode):
    """Undo a block's `x.reshape(-1, width)`: batch and sequence axes stay apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.reshape and len(args) == 3 and args[1] == -1 and args[0].dim() == 3:
            return args[0]
        return func(*args, **(kwargs or {}))


class _TapHalves(TorchFunctionMode):
    """Tap the two halves into which an MLP splits its fused gate-and-up projection."""

    def __init__(self, taps: Taps, layer: int) -> None:
        super().__init__()
        self.taps, self.layer = taps, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.chunk:
            return result
        gate, up = result
        return self.taps.at(HookPoint.MlpGate(self.layer), gate), self.taps.at(HookPoint.MlpUp(self.layer), up)


def replace_for(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack unwinds."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


class _Attachment:
    """The hooks of one `attached` context, collected so that all of them come off together."""

    def __init__(self, model: nn.Module, layout: Layout, taps: Taps, stack: ExitStack) -> None:
        self.model, self.layout, self.taps, self.stack = model, layout, taps, stack

    def module(self, path: str, root: nn.Module | None = None) -> nn.Module:
        try:
            found = (self.model if root is None else root).get_submodule(path)
        except AttributeError as error:
            family = self.model.config.model_type
            raise ExportError(
                f"{family!r} models have no module {path!r} where it was expected: "
                "the family needs an entry in exporters/transformers/families.py"
            ) from error
        return found

    def before(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if args:
                return (function(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}

        self.stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def after(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        def hook(_module: nn.Module, _args: tuple, output: Any) -> Any:
            return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)

        self.stack.callback(module.register_forward_hook(hook).remove)

    def enter_around(self, module: nn.Module, mode: Callable[[], Any]) -> None:
        """Run a module's forward inside a context of its own."""
        forward = module.forward

        def inside(*args: Any, **kwargs: Any) -> Any:
            with mode():
                return forward(*args, **kwargs)

        replace_for(self.stack, module, "forward", inside)

    def outside_blocks(self) -> None:
        at, layout = self.taps.at, self.layout
        embedding = self.module(layout.embedding) if layout.embedding else self.model.get_input_embeddings()
        self.after(embedding, lambda x: at(HookPoint.Embed, x))
        if layout.positions:
            self.after(self.module(layout.positions), lambda x: at(HookPoint.PosEmbed, x))
        if layout.final_norm:
            self.after(self.module(layout.final_norm), lambda x: at(HookPoint.FinalNorm, x))

    def block(self, i: int, block: nn.Module) -> None:
        at, layout = self.taps.at, self.layout
        self.before(block, lambda x: at(HookPoint.ResidPre(i), x))
        self.rope(self.module(layout.attention, block), i)
        self.after(self.module(layout.attention_added, block), lambda x: at(HookPoint.AttnOut(i), x))
        if layout.middle:
            self.before(self.module(layout.middle, block), lambda x: at(HookPoint.ResidMid(i), x, stream=True))
        self.mlp(i, block)
        self.after(block, lambda x: at(HookPoint.ResidPost(i), x))
        if layout.flattens:
            self.enter_around(block, _KeepAxes)

    def mlp(self, i: int, block: nn.Module) -> None:
        at, layout = self.taps.at, self.layout
        self.before(self.module(layout.mlp_input, block), lambda x: at(HookPoint.MlpPre(i), x))
        for path, point in ((layout.gate, HookPoint.MlpGate(i)), (layout.up, HookPoint.MlpUp(i))):
            if path:
                self.after(self.module(path, block), lambda x, point=point: at(point, x))
        if layout.gate_and_up:
            self.module(layout.gate_and_up, block)
            self.enter_around(self.module(layout.mlp_input, block), lambda: _TapHalves(self.taps, i))
        if layout.down:
            self.before(self.module(layout.down, block), lambda x: at(HookPoint.MlpAct(i), x))
        self.after(self.module(layout.mlp_output, block), lambda x: at(HookPoint.MlpPost(i), x))
        self.after(self.module(layout.mlp_added, block), lambda x: at(HookPoint.MlpOut(i), x))

    def rope(self, attention: nn.Module, i: int) -> None:
        """Let the family's rotation function know which layer calls it."""

        def enter(_module: nn.Module, _args: tuple) -> None:
            self.taps.layer = i

        self.stack.callback(attention.register_forward_pre_hook(enter).remove)

    def rotation(self, attention: nn.Module) -> None:
        """Wrap the family's `apply_rotary_pos_emb`: queries and keys, before and after."""
        modeling = sys.modules[type(attention).__module__]
        rotate = getattr(modeling, "apply_rotary_pos_emb", None)
        if rotate is None:
            return
        taps = self.taps

        def tapped(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            i = taps.layer
            q, k = taps.at(HookPoint.AttnQ(i), q), taps.at(HookPoint.AttnK(i), k)
            q, k = rotate(q, k, *args, **kwargs)
            taps.rotated.add(i)
            return taps.at(HookPoint.AttnRotQ(i), q), taps.at(HookPoint.AttnRotK(i), k)

        replace_for(self.stack, modeling, "apply_rotary_pos_emb", tapped)


@contextmanager
def attached(model: nn.Module, layout: Layout, listen: Listener) -> Iterator[Taps]:
    """Instrument a causal language model: `listen` gets each hook point's tensor.

    Args:
        model: a transformers causal language model.
        layout: where its family keeps its modules.
        listen: called as (hook name, tensor, stream); what it returns is what the model goes on with.

    Raises:
        ExportError: the model has no module where the layout says it has.
    """
    taps = Taps(listen)
    with ExitStack() as stack:
        attachment = _Attachment(model, layout, taps, stack)
        blocks = attachment.module(layout.blocks)
        attachment.outside_blocks()
        for i, block in enumerate(blocks):
            attachment.block(i, block)
        attachment.rotation(attachment.module(layout.attention, blocks[0]))
        replace_for(stack, model.config, "_attn_implementation", ATTENTION)
        stack.callback(_active.remove, taps)
        _active.append(taps)
        yield taps
