"""What captures will cost, before anything runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from mionnx import bind
from mionnx.hooked_model import HookedModel
from mionnx.hookpoint import HookPoint
from mionnx.place import heads_axis
from mionnx.rewrite.intervene import sequence_axis


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


def estimate_of(model: HookedModel, captures: bind.Captures, dims: Mapping[str, int]) -> Estimate:
    """What captures will cost in a call of these sizes (see `bind.dimensions`)."""
    found = {}
    for want, request in captures.items():
        point, inner = HookPoint.parse(want.hook), want.inner
        axes = (
            model.axes(point)
            if inner is None
            else [axis if isinstance(axis, int) or axis in dims else 1 for axis in inner.dims]
        )
        shape = list(bind.shape_of(axes, dims))
        for given, axis in ((request.positions, sequence_axis), (request.heads, heads_axis)):
            if given is not None:
                shape[axis(want.axes) or 0] = len(given)
        found[want.output] = np.dtype(model.dtype(point) if inner is None else inner.dtype).itemsize * prod(shape)
    return Estimate(found)
