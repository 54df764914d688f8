"""Taps inside attention: transformers' attention function, mask, cache and rotation with their hook points.

Every family that goes through transformers' `AttentionInterface` computes its scores, patterns and z here.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.masking_utils import causal_mask_function, eager_mask

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


active: list[Taps] = []


def _taps() -> Taps:
    if not active:
        raise ExportError("the 'mionnx' attention runs only inside `attached`")
    return active[-1]


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
        self.layer_class_to_replicate = None if past else DynamicLayer

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


def replace_for(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack unwinds."""
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def tap_rotation(stack: ExitStack, taps: Taps, attention: nn.Module) -> None:
    """Wrap the family's `apply_rotary_pos_emb`: queries and keys, before and after."""
    modeling = sys.modules[type(attention).__module__]
    rotate = getattr(modeling, "apply_rotary_pos_emb", None)
    if rotate is None:
        return

    def tapped(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        i = taps.layer
        q, k = taps.at(HookPoint.AttnQ(i), q), taps.at(HookPoint.AttnK(i), k)
        q, k = rotate(q, k, *args, **kwargs)
        taps.rotated.add(i)
        return taps.at(HookPoint.AttnRotQ(i), q), taps.at(HookPoint.AttnRotK(i), k)

    replace_for(stack, modeling, "apply_rotary_pos_emb", tapped)
