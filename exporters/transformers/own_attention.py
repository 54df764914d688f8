"""Taps in attention that a family computes in code of its own: past transformers' `AttentionInterface`, or behind it.

Keys and values are seen as the cache takes them, or without one at their products; z as the output projection reads it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from exporters.transformers.attention import Calls, Taps
from mionnx.graph.hook_points import HookPoint

TORCH_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
ADDED_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)
GATES = (torch.sigmoid, Tensor.sigmoid, nn.functional.softplus)
SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)


def tap_products(taps: Taps, layer: int, heads: int, stream: Tensor, table: Tensor | None = None) -> Calls:
    """Tap the queries, scores and pattern of one layer; `table` is the attention's own causal mask, if it has one."""
    query: Tensor | None = None
    seen = split = taps.layout.keys == "split"  # queries, keys and values, by `Attachment.split_heads`

    def four_axes(value: Tensor) -> Tensor:
        return value if value.dim() == 4 else value.unflatten(0, (stream.shape[0], heads))

    def at(point: HookPoint, value: Tensor) -> Tensor:
        tapped = taps.at(point, four_axes(value))
        return tapped if value.dim() == 4 else tapped.flatten(0, 1)

    def queries(value: Tensor) -> Tensor:
        nonlocal query
        query = value
        if layer not in taps.rotated:
            return at(HookPoint.AttnQ(layer), value)
        return at(HookPoint.AttnRotQ(layer), value) if taps.layout.rotation == "part" else value

    def product(func: Any, args: Any, options: Any) -> Any:
        """Product of queries and keys, or of a pattern and values, of attention without a cache."""
        nonlocal seen
        if query is None:
            first, key = queries(args[0]), args[1].transpose(-1, -2)
            key = key if layer in taps.rotated else at(HookPoint.AttnK(layer), key)
            return func(first, key.transpose(-1, -2), *args[2:], **options)
        if layer not in taps.patterns or seen:
            return func(*args, **options)
        seen = True
        value = at(HookPoint.AttnV(layer), args[1])
        taps.read[layer] = taps.patterns[layer][0], four_axes(value)  # as many keys as queries
        return func(args[0], value, *args[2:], **options)

    def answer(func: Any, args: Any, options: Any) -> Any:
        if func is Tensor.__getitem__ and args[0] is table:
            return _picked(*args)
        if func in SOFTMAX:
            weights = func(at(HookPoint.AttnScores(layer), args[0]), *args[1:], **options)
            pattern = at(HookPoint.AttnPattern(layer), weights.to(stream.dtype))
            full = four_axes(pattern)
            taps.patterns[layer] = full if query is None else four_axes(query), full
            return pattern
        if taps.cache is None and not seen and func in TORCH_PRODUCTS and args[1].dim() > 2:
            return product(func, args, options)
        # the first product is that of queries and keys
        if query is None and func in ADDED_PRODUCTS:
            if "batch1" in options:
                return func(*args, **{**options, "batch1": queries(options["batch1"])})
            return func(args[0], queries(args[1]), *args[2:], **options)
        if query is None and not split and func in TORCH_PRODUCTS and args[1].dim() > 2:  # two axes: a weight
            return func(queries(args[0]), *args[1:], **options)
        return func(*args, **options)

    return Calls(answer)


def _picked(table: Tensor, index: tuple[slice, ...]) -> Tensor:
    """Pick rows and columns of a mask by their numbers."""
    for axis, part in enumerate(index[2:], 2):
        # a slice of so many is as long as the table at most, which torch writes into the lengths of all later layers
        first = part.start or 0
        table = table.index_select(axis, torch.arange(part.stop - first, device=table.device) + first)
    return table


@contextmanager
def plain_maximum(module: nn.Module) -> Iterator[None]:
    """Let `max(0, size)` in the modelling code of a module compare sizes."""

    def maximum(*values: Any) -> Any:
        one, *others = values if len(values) > 1 else values[0]
        for other in others:
            one = other if other > one else one
        return one

    code = vars(sys.modules[type(module).__module__])
    if "max" in code:
        yield
        return
    code["max"] = maximum  # torch's own leaves a maximum, which slices do not follow
    try:
        yield
    finally:
        del code["max"]


def tap_gate(taps: Taps, layer: int) -> Calls:
    """Tap what the function of an output gate reads: the first of `GATES` behind the heads, by head."""

    def answer(func: Any, args: Any, options: Any) -> Any:
        if func not in GATES or layer not in taps.patterns:
            return func(*args, **options)
        heads = taps.patterns[layer][0].shape[1]
        gate = taps.at(HookPoint.AttnGate(layer), args[0].unflatten(-1, (heads, -1)))
        return func(gate.flatten(2), *args[1:], **options)

    return Calls(answer)
