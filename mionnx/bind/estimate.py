"""What captures will cost, before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from mionnx.bind import plan
from mionnx.graph.axes import heads_axis, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.rewrite.plan import CaptureNode


@dataclass(frozen=True)
class Estimate:
    """What a spec's captures will cost, in bytes.

    Attributes:
        captures: name of the capture -> bytes.
    """

    captures: dict[str, int]

    @property
    def total(self) -> int:
        """All captures together."""
        return sum(self.captures.values())

    @property
    def peak(self) -> int:
        """What is held at once while they are computed: a value gathered token by token is held twice at the end."""
        gathered = [size for name, size in self.captures.items() if HookPoint.parse(name).on_request]
        return self.total + max(gathered, default=0)


def estimate_of(model: HookedModel, captures: plan.Captures, dims: Mapping[str, int]) -> Estimate:
    """What captures will cost in a call of these sizes (see `axes.dynamic_sizes`)."""
    found = {}
    for want, request in captures.items():
        axes, size = _entry(model, want)
        shape = [axis if isinstance(axis, int) else dims.get(axis, 1) for axis in axes]
        if request.positions is not None:
            shape[sequence_axis(want.axes) or 0] = len(request.positions)
        if request.heads is not None:
            shape[heads_axis(want.axes) or 0] = len(request.heads)
        found[want.output] = size * prod(shape)
    return Estimate(found)


def _entry(model: HookedModel, want: CaptureNode) -> tuple[Sequence[str | int], int]:
    """The axes of a value, and the bytes of one of its numbers."""
    if want.inner is not None:
        return want.inner.dims, np.dtype(want.inner.dtype).itemsize
    if want.hook not in model.entries:
        point = HookPoint.parse(want.hook)
        model.entries[want.hook] = model.axes(point), np.dtype(model.dtype(point)).itemsize
    return model.entries[want.hook]
