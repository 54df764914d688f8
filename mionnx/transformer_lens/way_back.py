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
from mionnx.transformer_lens.coordinates import KINDS_OF_LOGITS, Array
from mionnx.transformer_lens.lens_points import LENS_LOGITS, LensPoint
from mionnx.transformer_lens.token_values import positions
from mionnx.transformer_lens.weight_gradients import WeightUse, gradients_of

WITH_MEANS = ("stream", "part", *KINDS_OF_LOGITS)
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
        return (
            torch.zeros(1),
            None,
            None,
            None,
            *(None if one is None else torch.from_numpy(one) for one in gradients),
        )


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
        self._rests: tuple[int, list[tuple[int, Array]]] = (-1, [])  # of a run of torch's, what goes back from nodes
        # As in TransformerLens, a model of which every weight is frozen has no gradients but behind hooks' own tensors.
        bridge.weight_views.refresh()
        self._anchor = WeightUse.apply(self, bridge.weight_views.leaf, *bridge.weight_views.views)
        self._placed = bridge.weight_views.placed

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
        if np.abs(rest).max() <= ROUNDING * np.abs(cotangent).max():
            return [None] * before
        if (run := torch._C._current_graph_task_id()) != self._rests[0]:
            self._rests = (run, [])
        self._rests[1].append((number, rest))
        if not before:
            return []
        if point.read_by:
            raise GradientError(f"{point.name} is computed of {point.source}, and nothing goes back through it here")
        gradients = self.product(point, source, rest, self.points[:before], self.tensors[:before])
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                self._passed[index] = self._passed.get(index, np.float32(0)) + self._told(index, gradient)
        return gradients

    def _told(self, index: int, gradient: Array) -> Array:
        """Of the gradient of a value after its hooks, what a product took, which knows the value before them."""
        point, value = self.points[index]
        if point.kind != "uncapped":
            return gradient
        return self.bridge.coordinates.passed_on(gradient, value, self._after(point, value))

    def _after(self, point: LensPoint, value: Array) -> Array:
        """A source's value after its hooks, where its gradient depends on that."""
        return value + self.changes.get(point.source, np.float32(0)) if point.kind == "uncapped" else value

    def of_weights(self, places: Sequence[int]) -> dict[int, torch.Tensor]:
        """Gradients of weights, by their places among the free ones."""
        gradients = gradients_of(self, [self._placed[index] for index in places], self._rests[1])
        return dict(zip(places, gradients, strict=True))

    def places(self) -> Array:
        """The position of each token in its text."""
        return positions(self.ids, self.mask)

    def product(
        self,
        point: LensPoint,
        source: Array,
        cotangent: Array,
        before: Sequence[tuple[LensPoint, Array]],
        after: Sequence[torch.Tensor] = (),
    ) -> list[Array | None]:
        """Gradients of the values at points, of a cotangent of one that depends on them.

        Args:
            point: the one; source: its source's value.
            before: the points, with their sources' values.
            after: what hooks left of the values at the points.
        """
        coordinates, leading = self.bridge.coordinates, self.bridge.leading(point.source)
        own = np.ascontiguousarray(coordinates.cotangent(point, cotangent, source), np.float32)
        ends = {name for one, _ in before for name in (one.source, one.lands, one.beside, *dict(one.read_by))}
        names = [name for name in leading if name in ends and name != point.source]
        # Means that weights do not pass on are no part of what goes back, and part of the value's own gradient.
        by_name: dict[str, Array] = {point.source: cotangent if point.kind in WITH_MEANS else own}
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
        left = [*after, *[None] * (len(before) - len(after))]
        return [self._of(one, value, by_name, shown) for (one, value), shown in zip(before, left, strict=True)]

    def _of(self, point: LensPoint, value: Array, by_name: dict[str, Array], left: Any) -> Array | None:
        if point.read_by:
            shown = left.detach().numpy() if left is not None and point.lands else None
            gradient = self.bridge.coordinates.gradient_of_readers(point, value, by_name, shown)
            return None if gradient is None else np.ascontiguousarray(gradient, np.float32)
        own, landing = by_name.get(point.source), by_name.get(point.lands)
        if own is None or (landing is None and not point.replaces):
            return None
        coordinates, after = self.bridge.coordinates, self._after(point, value)
        if coordinates.values and point.beside in by_name:
            own = coordinates.less_of_biases(point.layer, own, by_name[point.beside])
        return np.ascontiguousarray(coordinates.gradient(point, own, landing, after), np.float32)
