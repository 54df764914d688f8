"""Taps in attention that a family computes in code of its own, past transformers' `AttentionInterface`.

Its code runs as it is: the first product of queries and keys and the softmax are seen as they are called, keys and
values as the cache takes them, z as the output projection reads it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from exporters.transformers.attention import Taps
from mionnx.graph.hook_points import HookPoint

TORCH_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
ADDED_PRODUCTS = (torch.baddbmm, Tensor.baddbmm)
SOFTMAX = (torch.softmax, nn.functional.softmax, Tensor.softmax)


class TapProducts(TorchFunctionMode):
    """Tap the queries, scores and pattern of one layer; batch and heads may be one axis.

    Args:
        stream: what the attention reads, [batch, seq, hidden].
        table: the attention's own causal mask, [1, 1, length, length]; None where it has none.
    """

    def __init__(self, taps: Taps, layer: int, heads: int, stream: Tensor, table: Tensor | None = None) -> None:
        super().__init__()
        self.taps, self.layer, self.heads, self.stream, self.table = taps, layer, heads, stream, table
        self.query: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is Tensor.__getitem__ and args[0] is self.table:
            return _picked(*args)
        if func in SOFTMAX:
            return self._pattern(func(self._at(HookPoint.AttnScores(self.layer), args[0]), *args[1:], **options))
        if self.query is not None:
            return func(*args, **options)
        if func in ADDED_PRODUCTS:
            added, *batches = args
            if "batch1" in options:
                return func(*args, **{**options, "batch1": self._queries(options["batch1"])})
            return func(added, self._queries(batches[0]), *batches[1:], **options)
        if func in TORCH_PRODUCTS and args[1].dim() > 2:  # two axes: a weight
            return func(self._queries(args[0]), *args[1:], **options)
        return func(*args, **options)

    def _queries(self, value: Tensor) -> Tensor:
        taps, layer = self.taps, self.layer
        self.query = value
        if layer not in taps.rotated:
            return self._at(HookPoint.AttnQ(layer), value)
        return self._at(HookPoint.AttnRotQ(layer), value) if taps.layout.rotation == "part" else value

    def _pattern(self, value: Tensor) -> Tensor:
        pattern = self._at(HookPoint.AttnPattern(self.layer), value.to(self.stream.dtype))
        self.taps.patterns[self.layer] = self._four_axes(self.query), self._four_axes(pattern)
        return pattern

    def _at(self, point: HookPoint, value: Tensor) -> Tensor:
        tapped = self.taps.at(point, self._four_axes(value))
        return tapped if value.dim() == 4 else tapped.flatten(0, 1)

    def _four_axes(self, value: Tensor) -> Tensor:
        return value if value.dim() == 4 else value.unflatten(0, (self.stream.shape[0], self.heads))


def _picked(table: Tensor, index: tuple[slice, ...]) -> Tensor:
    """Pick rows and columns of a mask by their numbers.

    A slice of so many is as long as the table at most, which torch writes into the lengths of all later layers.
    """
    for axis, part in enumerate(index[2:], 2):
        first = part.start or 0
        table = table.index_select(axis, torch.arange(part.stop - first, device=table.device) + first)
    return table


@contextmanager
def plain_maximum(module: nn.Module) -> Iterator[None]:
    """Let `max(0, size)` in the modelling code of a module compare sizes: torch's own leaves a maximum.

    Slices do not follow that.
    """
    code = vars(sys.modules[type(module).__module__])
    if "max" in code:
        yield
        return
    code["max"] = _maximum
    try:
        yield
    finally:
        del code["max"]


def _maximum(*values: Any) -> Any:
    one, *others = values if len(values) > 1 else values[0]
    for other in others:
        one = other if other > one else one
    return one
