"""Taps inside attention: transformers' attention function, mask, cache and rotation with their hook points.

Every family that goes through transformers' `AttentionInterface` computes its scores, patterns and z here.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer
from transformers.masking_utils import causal_mask_function, eager_mask

from exporters.transformers.carried import parted
from exporters.transformers.encoder_families import reads_both_ways
from exporters.transformers.layout import Layout
from mionnx.errors import ExportError
from mionnx.graph.hook_points import HookPoint

ATTENTION_FUNCTION = "mionnx"
TAPS = "hook_taps"  # the attribute of modules by which functions registered with transformers find theirs

# (name, value, stream) -> the value to go on with. `stream` says that later readers of `value` itself, and not only of
# the returned tensor, must see a change: the residual stream between attention and MLP feeds a norm and a skip.
Listener = Callable[[str, Tensor, bool], Tensor]


@dataclass
class Taps:
    """One listener on one model, and what its layers have shown so far.

    Attributes:
        cache: takes keys and values; None in an encoder.
        layer: the layer that runs.
        tokens: batch and sequence axis of its MLP, which experts see merged.
        queried: layers whose queries were seen before their rotation.
        rotated: layers that rotate.
        patterns: layer -> its query and its pattern.
        read: layer -> keys and values of all tokens.
        mask: which tokens of the call are no padding, [batch, seq], and `columns`, which of them convolutions read
            (`recurrent.Columns`), where layers are recurrent.
        states, carried: layer -> columns of its convolution, and its state if it has one, before and after the call.
    """

    listen: Listener
    layout: Layout
    cache: "TappedCache | None" = None
    layer: int = 0
    queried: set[int] = field(default_factory=set)
    tokens: tuple[int, int] = (0, 0)
    rotated: set[int] = field(default_factory=set)
    patterns: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    read: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    mask: Any = None
    columns: Any = None
    states: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    carried: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    def at(self, point: HookPoint, value: Tensor, stream: bool = False) -> Tensor:
        """Pass a hook point's value through the listener."""
        return self.listen(str(point), value, stream)

    def keep(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Tap new keys and values, and put them into the cache, if any; returns those of all tokens."""
        if layer not in self.rotated:
            key = self.at(HookPoint.AttnK(layer), key)
        elif self.layout.rotation == "part":
            key = self.at(HookPoint.AttnRotK(layer), key)
        value = self.at(HookPoint.AttnV(layer), value)
        self.read[layer] = (key, value) if self.cache is None else DynamicCache.update(self.cache, key, value, layer)
        return self.read[layer]

    def state(self, key: Tensor, value: Tensor) -> Tensor:
        """The state before the running layer's first token, [batch, n_heads, key, value]; zeros at first."""
        if self.layer in self.states:
            return self.states[self.layer][-1]
        return value.new_zeros(key.shape[0], *key.shape[2:], value.shape[-1])

    def keep_state(self, state: Tensor) -> Tensor:
        """Carry the running layer's state to the next call."""
        self.carried[self.layer] = *self.carried.get(self.layer, ()), state  # behind its columns
        return state

    def at_tokens(self, point: HookPoint, value: Tensor) -> Tensor:
        """Pass a value through the listener, batch and sequence axes apart."""
        if value.dim() > 2:
            return self.at(point, value)
        return self.at(point, value.unflatten(0, self.tokens)).flatten(0, 1)


def taps_of(module: nn.Module) -> Taps:
    """The taps of the model that a module is part of; `attached` puts them there."""
    taps = vars(module).get(TAPS)
    if taps is None:
        raise ExportError("attention and experts of mionnx run only inside `attached`")
    return taps


def _attention(
    module: Any,
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

    query is [batch, n_heads, seq_q, head_dim], key [batch, n_kv_heads, seq_k, head_dim], value [batch, n_kv_heads,
    seq_k, value_dim], the mask is additive and [batch, 1, seq_q, seq_k]; the result is [batch, seq_q, n_heads,
    value_dim] and the pattern. Differential attention calls it twice with the same query: of one pattern.
    """
    taps = taps_of(module)
    layer = taps.layer  # an encoder's attention, or one that layers share, does not know it
    if layer in taps.patterns and taps.patterns[layer][0] is query:
        pattern = taps.patterns[layer][1]
    else:
        if taps.layout.keys == "latents" or taps.cache is None:
            key, value = taps.keep(key, value, layer)
        taps.read.setdefault(layer, (key, value))  # kept already, but by a layer that reads those of another
        pattern = _pattern(taps, layer, query, key, attention_mask, scaling, softcap, **options)
        taps.patterns[layer] = query, pattern
    z = _per_group(pattern, value).transpose(1, 2)
    if taps.layout.z == "heads":
        z = taps.at(HookPoint.AttnZ(layer), z)
    return z.contiguous(), pattern


def _pattern(
    taps: Taps,
    layer: int,
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> Tensor:
    if layer not in taps.rotated:
        query = taps.at(HookPoint.AttnQ(layer), query)
    elif taps.layout.rotation == "part":
        query = taps.at(HookPoint.AttnRotQ(layer), query)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = _per_group(query, key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores if position_bias is None else scores + position_bias  # T5's
    scores = taps.at(HookPoint.AttnScores(layer), scores + mask)
    pattern = _softmax(scores, s_aux).to(query.dtype)
    return taps.at(HookPoint.AttnPattern(layer), pattern)


def _per_group(left: Tensor, right: Tensor) -> Tensor:
    """The product of each head with the keys, or the values, that its group of heads shares.

    left is [batch, n_heads, seq_q, n], right [batch, n_kv_heads, n, m]; the heads of a group are rows of one product,
    and nothing is repeated.
    """
    groups = left.shape[1] // right.shape[1]
    if groups == 1:
        return torch.matmul(left, right)
    batch, heads, seq, _ = left.shape
    rows = left.reshape(batch, right.shape[1], groups * seq, left.shape[3])
    return torch.matmul(rows, right).reshape(batch, heads, seq, right.shape[3])


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The pattern; each row lacks the share of its head's sink [n_heads], a score of no key.

    In float32 at least, as transformers computes it; of float64, whose mask is no number in float32, in float64.
    """
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=dtype)
    column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], -1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1, dtype=dtype)[..., :-1]


def _mask(local_size: int | None = None, **options: Any) -> Tensor:
    """Eager attention's mask in transformers' calling convention.

    It is [batch, 1, seq_q, seq_k], 0 or the dtype's lowest number. A sliding window, or a chunk, of `local_size` keys
    counts the tokens of each row's own text. transformers counts columns, which is the same where no padding stands
    between tokens; it does where texts padded on the right are continued. Windows on both sides are transformers' own.
    """
    options["allow_is_bidirectional_skip"] = False  # no mask where nothing is padded
    if local_size is None or reads_both_ways(options["config"]):
        return eager_mask(**options)
    places = options["attention_mask"].cumsum(dim=1)
    chunked = getattr(options.get("config"), "attention_chunk_size", None) == local_size

    def near(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        own = places.index_select(1, query.flatten())[:, None, :, None]
        other = places.index_select(1, key.flatten())[:, None, None, :]
        within = _chunk(other, local_size) == _chunk(own, local_size) if chunked else other > own - local_size
        return causal_mask_function(batch, head, query, key) & within

    return eager_mask(**{**options, "mask_function": near})


def _chunk(places: Tensor, size: int) -> Tensor:
    """The chunk in which the n-th token stands, n from 1."""
    return torch.div(places - 1, size, rounding_mode="floor")


AttentionInterface.register(ATTENTION_FUNCTION, _attention)
AttentionMaskInterface.register(ATTENTION_FUNCTION, _mask)


CACHE_WORDS = ("cache", "past_key_values")  # of a model's arguments and outputs: since transformers 5.24, and before


def cache_word(model: nn.Module) -> str:
    """The name of a model's cache among its arguments; empty without one."""
    takes = signature(model.forward).parameters
    return next((word for word in CACHE_WORDS if word in takes), "")


class TappedCache(DynamicCache):
    """A full-length key/value cache that taps values (and unrotated keys); of recurrent layers columns and states.

    transformers is told that there is no state yet, so that a single token takes the way of many.
    """

    def __init__(self, past: list[tuple[Tensor, ...]], listen: Listener, layout: Layout) -> None:
        super().__init__()
        parts = [*map(parted, past)]
        self.layers: list[Any] = [filled(*read) if read else LinearAttentionLayer() for read, _ in parts]
        self.layer_class_to_replicate = None if past else DynamicLayer
        self.taps = Taps(listen, layout, self)
        self.taps.states |= {i: state for i, (_, state) in enumerate(parts) if state}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: see above."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: see above."""

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Tensor:
        """Past columns and those of the call, [batch, channels, kernel - 1 + seq]; the last ones are carried on."""
        taps, kernel = self.taps, self.taps.columns.kernel
        nothing = conv_states.new_zeros(*conv_states.shape[:2], kernel - 1)
        past = taps.states[layer_idx][0] if layer_idx in taps.states else nothing
        columns = torch.cat([past, conv_states * taps.mask[:, None].to(conv_states.dtype)], -1)
        carried = taps.columns.of(layer_idx, columns)[-1]
        last = columns.transpose(1, 2).flatten(0, 1).index_select(0, carried)
        last = last.reshape(columns.shape[0], kernel - 1, columns.shape[1]).transpose(1, 2)
        taps.carried[layer_idx] = (last,)
        return columns

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Taps have carried it on already."""
        return recurrent_states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep a layer's keys and values; latents later, as keys and values."""
        if self.taps.layout.keys == "latents":
            return key_states, value_states
        return self.taps.keep(key_states, value_states, layer_idx)

    def present(self, layers: Iterable[int]) -> list[tuple[Tensor, ...]]:
        """What layers carry on: keys and values of no head in one with those of another, nothing of an MLP alone."""
        taps = self.taps
        return [(*(self._read(i) if i in taps.read else ()), *taps.carried.get(i, ())) for i in layers]

    def _read(self, layer: int) -> tuple[Tensor, Tensor]:
        key, value = self.taps.read[layer]
        own = self.layers[layer] if layer < len(self.layers) and self.layers[layer].keys is key else None
        return (own.keys, own.values) if own else (key[:, :0], value[:, :0])


def filled(key: Tensor, value: Tensor) -> Any:
    """A layer of a cache that holds keys and values already, of any length."""
    layer: Any = DynamicLayer()
    layer.keys, layer.values = key, value
    layer.dtype, layer.device, layer.is_initialized = key.dtype, key.device, True
    # An empty past is empty along one axis only: the sequence length is then read from the shape, not guessed.
    layer.get_seq_length = lambda: layer.keys.shape[-2]
    return layer


class Calls(TorchFunctionMode):
    """Hands every call of torch inside to a function: (operator, arguments, keywords) -> what it gives."""

    def __init__(self, answer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer(func, args, kwargs or {})


def replace_for(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack unwinds."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


ROTATIONS = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")


def tap_rotation(stack: ExitStack, taps: Taps, attention: nn.Module) -> None:
    """Wrap the family's rotation functions: queries and keys, before and after."""
    modeling = sys.modules[type(attention).__module__]
    for name in ROTATIONS:
        if hasattr(modeling, name):
            rotate = getattr(modeling, name)
            arguments = [*signature(rotate).parameters]
            if "freqs_cis" in arguments:  # a product of complex numbers, which no graph has
                replace_for(stack, torch, "polar", _polar)
                rotate = _rotate_pairs(2 if taps.layout.rotation == "heads last" else 1)
            singly = arguments[1] in ("cos", "sin")  # and not the keys
            replace_for(stack, modeling, name, _rotation(taps, rotate, singly))


def _polar(_lengths: Tensor, angles: Tensor) -> Tensor:
    return torch.stack((torch.cos(angles), torch.sin(angles)), -1)


def _rotate_pairs(heads: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Rotation by complex numbers, in pairs of real ones; `heads` is the axis of the heads."""

    def rotated(value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, y = value.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((x * cos - y * sin, x * sin + y * cos), -1).flatten(-2).type_as(value)

    def rotate(query: Tensor, key: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = frequencies.unsqueeze(heads).unbind(-1)
        return rotated(query, cos, sin), rotated(key, cos, sin)

    return rotate


def _rotation(taps: Taps, rotate: Callable[..., Any], singly: bool) -> Callable[..., Any]:
    """Wrap a rotation function of queries and keys, or of one of the two at a time."""

    def heads_first(point: HookPoint, value: Tensor) -> Tensor:
        if taps.layout.rotation == "heads last":
            return taps.at(point, value.transpose(1, 2)).transpose(1, 2)
        return taps.at(point, value)

    def tapped(*args: Any, **kwargs: Any) -> Any:
        i = taps.layer
        taps.rotated.add(i)
        if taps.layout.rotation == "part":
            return rotate(*args, **kwargs)
        points = [(HookPoint.AttnQ(i), HookPoint.AttnRotQ(i)), (HookPoint.AttnK(i), HookPoint.AttnRotK(i))]
        if singly:
            points = points[1:] if i in taps.queried else points[:1]
            taps.queried.add(i)
        values = [heads_first(before, value) for (before, _), value in zip(points, args, strict=False)]
        rotated = rotate(*values, *args[len(points) :], **kwargs)
        if singly:
            return heads_first(points[0][1], rotated)
        return tuple(heads_first(after, value) for (_, after), value in zip(points, rotated, strict=True))

    return tapped


def tap_whole(taps: Taps, layer: int, width: int | None = None) -> Calls:
    """Tap queries and keys, of `width` if not None, before a partial rotation cuts them."""
    points = [HookPoint.AttnQ(layer), HookPoint.AttnK(layer)][: 1 if taps.layout.keys == "latents" else 2]
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def tapped(value: Tensor) -> Tensor:
        fits = value.dim() == 4 and width in (None, value.shape[-1])
        if fits and id(value) not in seen and len(seen) < len(points):
            seen[id(value)] = value, taps.at(points[len(seen)], value)
        return seen.get(id(value), (value, value))[1]

    def answer(func: Any, args: Any, options: Any) -> Any:
        cuts = func in (torch.split, Tensor.split)
        if func is Tensor.__getitem__ and isinstance(args[1], tuple) and len(args[1]) == 2:  # `[..., first:last]`
            cuts = args[1][0] is Ellipsis and isinstance(args[1][1], slice)
        return func(tapped(args[0]), *args[1:], **options) if cuts else func(*args, **options)

    return Calls(answer)
