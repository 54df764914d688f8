"""`WeightUse`: a pass as a function of its weights: `torch.autograd.grad(loss, weights)`.

The gradient of a matrix is what its product read, times the gradient of what it gave; both are values of hook points.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from mionnx.errors import GradientError
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.transformer_lens.coordinates import Array
from mionnx.transformer_lens.lens_points import LensPoint


class PlacedWeight(NamedTuple):
    """A weight of a bridge: its module, its name there, and whether the module holds it as [out, in]."""

    module: Any
    key: str
    parameter: torch.nn.Parameter
    turned: bool


class WeightUse(torch.autograd.Function):
    """What the nodes of a pass begin with; its gradients are those of the weights."""

    @staticmethod
    def forward(ctx: Any, back: Any, leaf: torch.Tensor, *views: torch.Tensor) -> Any:
        """Nothing but a place in torch's graph."""
        ctx.back, ctx.leaf, ctx.nodes = back, leaf, [view.grad_fn for view in views]
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Gradients of the weights that are asked for; `loss.backward()`, which names none, leaves theirs unset."""
        indices: list[int] = []
        if not _fills_every_leaf(ctx.leaf):
            indices = [index for index, node in enumerate(ctx.nodes) if torch._C._will_engine_execute_node(node)]
        gradients = ctx.back.of_weights(indices) if indices else {}
        return (None, None, *(gradients.get(index) for index in range(len(ctx.nodes))))


def _fills_every_leaf(leaf: torch.Tensor) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node))
    except RuntimeError:  # torch's answer to torch.autograd.grad, which fills no leaf
        return False


class WeightViews:
    """The free weights of a bridge as nodes of torch's graph, one for each; made again when others are free."""

    def __init__(self, bridge: Any) -> None:
        self.bridge = bridge
        self.leaf = torch.zeros(1, requires_grad=True)
        self._of: Any = None
        self.placed: list[PlacedWeight] = []
        self.views: list[torch.Tensor] = []

    def refresh(self) -> None:
        """Look at which weights are free; where none is, nothing of a pass has a gradient."""
        self.leaf.requires_grad_(any(weight.requires_grad for weight in self.bridge.original_model.parameters()))
        stamp = [(id(one.parameter), one.parameter.requires_grad) for one in self.bridge.placed]
        if self._of != stamp:
            self.placed = [one for one in self.bridge.placed if one.parameter.requires_grad]
            self._of, self.views = stamp, [one.parameter.view_as(one.parameter) for one in self.placed]


def gradients_of(back: Any, weights: Sequence[PlacedWeight], rests: Iterable[tuple[int, Array]]) -> list[torch.Tensor]:
    """Gradients of weights.

    Args:
        back: the way back of the pass.
        weights: the weights by which gradients are taken.
        rests: what goes back from each node of the pass: its number, the cotangent.

    Raises:
        GradientError: a weight of a product without a hook point before or behind it.
    """
    bridge = back.bridge
    points = bridge.lens_points()
    tied = [one for one in bridge.placed if one.module is bridge.embed or one.module is bridge.unembed]
    shared = tied if len(tied) > 1 and bridge.shares_embedding else []
    sums = [_terms(bridge, points, shared if one in shared else [one]) for one in weights]
    behind = {point: None for terms in sums for _, _, point in terms}
    sources = {point.source for terms in sums for _, before, after in terms for point in (before, after) if point}
    values = _values(back, sources)
    total: dict[LensPoint, Any] = defaultdict(float)
    outs = [(point, values[point.source]) for point in behind]
    for number, rest in rests:
        node, source = back.points[number]
        if node.read_by:
            raise GradientError(
                f"{node.name} is computed of {node.source}, and no gradient of a weight goes through it"
            )
        for point, gradient in zip(behind, back.product(node, source, rest, outs), strict=True):
            if gradient is not None:
                total[point] = total[point] + gradient
    return [
        reduce(torch.add, (_gradient(back, one, before, total[after], values) for one, before, after in terms))
        for terms in sums
    ]


def _terms(
    bridge: Any, points: dict[int, LensPoint], places: Sequence[PlacedWeight]
) -> list[tuple[PlacedWeight, Any, LensPoint]]:
    """Each place of a weight, with the points before and behind it."""
    terms = []
    for one in places:
        module = one.module
        before = points.get(id(getattr(module, "hook_normalized", module.hook_in)))
        before = points.get(id(module.hook_out)) if _is_table(bridge, one) else before
        after = points.get(id(module.hook_out))
        if after is None or not after.goes_back or before is None:
            raise GradientError(f"{module.hook_out.name}: the graph has no gradient there, and so none of the weight")
        terms.append((one, None if one.key == "bias" else before, after))
    return terms


def _is_table(bridge: Any, one: PlacedWeight) -> bool:
    return one.module is bridge.embed or one.module is getattr(bridge, "pos_embed", None)


def _values(back: Any, sources: Iterable[str]) -> dict[str, Array]:
    spec = HookSpec().extend(back.spec)
    for name, change in back.changes.items():
        spec.intervene(name, Intervention.Add(change))
    names = [name for name in sources if name != "hook_logits"]
    spec.capture(names)
    cache = back.bridge.engine.forward(back.ids, spec, attention_mask=back.mask, cache=back.past)
    return {name: np.asarray(cache[name]) for name in names} | {"hook_logits": np.asarray(cache.output())}


def _gradient(
    back: Any, one: PlacedWeight, before: LensPoint | None, after: Any, values: dict[str, Array]
) -> torch.Tensor:
    shape, bridge = one.parameter.shape, back.bridge
    flat = torch.from_numpy(np.asarray(after)).reshape(-1, np.shape(after)[-1])
    if before is None:
        return flat.sum(0).reshape(shape)
    shown = bridge.coordinates.show(before, values[before.source])
    if len(shown) != len(after):  # positions are one row
        shown = np.repeat(shown, len(after), axis=0)
    read = torch.from_numpy(shown).reshape(-1, shown.shape[-1])
    if _is_table(bridge, one):
        places = torch.from_numpy(back.ids if one.module is bridge.embed else back.places()).reshape(-1)
        rows = one.parameter.detach()[places]
        scale = (read * rows).sum() / (rows * rows).sum()  # an embedding may be a multiple of its weight (Gemma)
        return torch.zeros(shape).index_add_(0, places, flat * scale)
    if hasattr(one.module, "hook_normalized"):
        return (flat * read).sum(0).reshape(shape)
    product = read.T @ flat
    return (product.T if one.turned else product).reshape(shape)
