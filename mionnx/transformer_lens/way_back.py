"""`WayBack`: what torch's autograd sees of a pass: one node for each hooked value, and one for the logits.

Going back, a node asks the engine for one vector-Jacobian product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mionnx.errors import GradientError
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.transformer_lens.coordinates import Array
from mionnx.transformer_lens.lens_points import LENS_LOGITS, LensPoint

ROUNDING = 2e-6  # relative, of a sum of gradients


class GraphValue(torch.autograd.Function):
    """A value of the graph in torch's: its way back is a product that the engine computes."""

    @staticmethod
    def forward(ctx: Any, anchor: Any, back: WayBack, number: int, value: Array, *before: torch.Tensor) -> Any:
        """The value, as a tensor; `before` are the values after the hooks before it."""
        ctx.back, ctx.number, ctx.before = back, number, len(before)
        return torch.from_numpy(value)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Gradients of the values before."""
        gradients = ctx.back.through(ctx.number, cotangents[0].detach().numpy(), ctx.before)
        return (None, None, None, None, *(None if one is None else torch.from_numpy(one) for one in gradients))


class WayBack:
    """The way back of one pass: which values torch knows, and what hooks changed.

    Every product is taken as if hooks had only added what they changed; the gradient that torch gives a hooked value
    then differs from what later products told it by what its functions do to gradients, and only that goes on back.
    """

    def __init__(self, bridge: Any, ids: Array, mask: Array | None, spec: HookSpec) -> None:
        self.bridge, self.ids, self.mask, self.spec = bridge, ids, mask, spec
        self.past: Any = None  # keys and values of the tokens before
        self.points: list[tuple[LensPoint, Array]] = []  # with the source's value
        self.tensors: list[torch.Tensor] = []  # after their hooks
        self.changes: dict[str, Array] = {}  # by hook point of the graph
        self._passed: dict[int, Array] = {}
        # As in TransformerLens, a model of which every weight is frozen has no gradients but behind hooks' own tensors.
        free = any(weight.requires_grad for weight in bridge.original_model.parameters())
        self._anchor = torch.zeros(1, requires_grad=free)

    def node(self, point: LensPoint, value: Array, source: Array) -> torch.Tensor:
        """A value as a tensor that torch can go back from."""
        tensor = GraphValue.apply(self._anchor, self, len(self.points), value, *self.tensors)
        self.points.append((point, source))
        return tensor

    def through(self, number: int, cotangent: Array, before: int) -> Sequence[Array | None]:
        """Gradients of the values before one, of a cotangent of it."""
        point, source = self.points[number]
        if number == len(self.points) - 1:  # the logits, where a way back begins
            self._passed = {}
        earlier = self._passed.pop(number, None)
        rest = cotangent if earlier is None else cotangent - earlier
        if not before or np.abs(rest).max() <= ROUNDING * np.abs(cotangent).max():
            return [None] * before
        if point.read_by:
            raise GradientError(f"{point.name} is computed of {point.source}, and nothing goes back through it here")
        gradients = self._product(point, source.shape, rest, self.points[:before])
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._passed[index] = self._passed.get(index, np.float32(0)) + gradient
        return gradients

    def _product(
        self, point: LensPoint, shape: tuple[int, ...], cotangent: Array, before: Sequence[tuple[LensPoint, Array]]
    ) -> list[Array | None]:
        coordinates, leading = self.bridge.coordinates, self.bridge.leading(point.source)
        own = np.ascontiguousarray(coordinates.cotangent(point, cotangent, shape), np.float32)
        ends = {name for one, _ in before for name in (one.source, one.lands, one.beside, *dict(one.read_by))}
        names = [name for name in leading if name in ends and name != point.source]
        by_name: dict[str, Array] = {point.source: own}
        if names:
            spec = HookSpec().extend(self.spec)
            for name, change in self.changes.items():
                if name in leading and name != point.source:  # what is added behind changes no gradient before
                    spec.intervene(name, Intervention.Add(change))
            of = None if point.source == LENS_LOGITS.source else point.source
            if of is not None:
                spec.capture(of)
            spec.gradient(names).set_metric("cotangent", cotangent=own, of=of)
            options = {"attention_mask": self.mask, "cache": self.past}
            cache = self.bridge.engine.forward(self.ids, spec, logits=of is None, **options)
            grad: Any = cache.grad
            by_name |= {name: np.asarray(grad[name]) for name in names}
        return [self._of(one, value, by_name) for one, value in before]

    def _of(self, point: LensPoint, value: Array, by_name: dict[str, Array]) -> Array | None:
        if point.read_by:
            gradient = self.bridge.coordinates.gradient_of_readers(point, value, by_name)
            return None if gradient is None else np.ascontiguousarray(gradient, np.float32)
        own, landing = by_name.get(point.source), by_name.get(point.lands)
        if own is None or (landing is None and not point.replaces):
            return None
        coordinates = self.bridge.coordinates
        if coordinates.values and point.beside in by_name:
            own = coordinates.less_of_biases(point.layer, own, by_name[point.beside])
        return np.ascontiguousarray(coordinates.gradient(point, own, landing), np.float32)
