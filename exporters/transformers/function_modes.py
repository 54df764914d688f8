"""Function modes: what a block computes between its modules, tapped or replaced as torch's functions are called."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from exporters.transformers.attention import Taps, replace_for
from mionnx.graph.hook_points import HookPoint

ADDITIONS = (Tensor.add, Tensor.__add__, torch.add)


class KeepAxes(TorchFunctionMode):
    """Undo a block's `x.reshape(-1, width)`: batch and sequence axes stay apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.reshape and len(args) == 3 and args[1] == -1 and args[0].dim() == 3:
            return args[0]
        return func(*args, **(kwargs or {}))


class TapHalves(TorchFunctionMode):
    """Tap the two halves into which an MLP splits its fused gate-and-up projection."""

    def __init__(self, taps: Taps, layer: int) -> None:
        super().__init__()
        self.taps, self.layer = taps, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.chunk:
            return result
        points = HookPoint.MlpGate(self.layer), HookPoint.MlpUp(self.layer)
        return tuple(self.taps.at_tokens(point, half) for point, half in zip(points, result, strict=True))


class TapAdditions(TorchFunctionMode):
    """Tap the terms of a block's additions to the stream, and the stream after each."""

    def __init__(self, taps: Taps, layer: int, stream: Tensor) -> None:
        super().__init__()
        self.taps, self.layer, self.stream = taps, layer, stream
        self.points = [HookPoint.AttnOut(layer), HookPoint.MlpOut(layer)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ADDITIONS or not any(value is self.stream for value in args):
            return func(*args, **(kwargs or {}))
        point = self.points.pop(0)
        added = self.taps.at(point, args[1] if args[0] is self.stream else args[0])
        self.stream = self.stream + added
        if self.points:
            self.stream = self.taps.at(HookPoint.ResidMid(self.layer), self.stream, stream=True)
        return self.stream


class TapSum(TorchFunctionMode):
    """Tap the sum of what a layer's experts and the MLP beside them make."""

    def __init__(self, taps: Taps) -> None:
        super().__init__()
        self.taps, self.made = taps, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in ADDITIONS or self.made is None or not any(value is self.made for value in args):
            return result
        self.made = None
        return self.taps.at_tokens(HookPoint.MlpPost(self.taps.layer), result)


class InOrder(TorchFunctionMode):
    """Give the best experts in the order of their scores, where a router leaves the order open."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return func(*args, **({**given, "sorted": True} if func in (torch.topk, Tensor.topk) else given))


def choose_all(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand in for a choice of keys: the attention of mionnx reads all of them."""
    return hidden.new_zeros(0)


@contextmanager
def quantile(share: float) -> Iterator[None]:
    """Put a number in the place of a normal quantile, a function that no graph has."""
    value = NormalDist().inv_cdf(share)
    normal = SimpleNamespace(icdf=lambda given: torch.full_like(given, value))
    with ExitStack() as stack:
        replace_for(stack, torch.distributions.normal, "Normal", lambda *_: normal)
        yield
