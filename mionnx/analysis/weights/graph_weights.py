"""`GraphWeights`: the numbers of a weight by TransformerLens' name, as the graph multiplies with them.

A weight is found from the hook point that its product gives (`mionnx.graph.linear_map`), a norm from the values around
it. The table below says which; no family is named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError, ModelError
from mionnx.graph import matrices
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.linear_map import LinearMap, LinearMaps, NormMap, norm_of
from mionnx.graph.metadata import NORMED_STREAM
from mionnx.machine.once import Once

Array = NDArray[Any]


class WeightPlace(NamedTuple):
    """Where a layer's weight and bias lie: the hook point that their product gives, and what it reads."""

    gives: Callable[[int], HookPoint]
    reads: str  # the class of the hook point, or "stream"
    axes: tuple[str, ...]  # of the weight
    of_experts: Callable[[int], HookPoint] | None = None


HEAD_AXES = ("head", "d_model", "d_head")
WEIGHT_PRODUCTS = {
    "W_Q": WeightPlace(HookPoint.AttnQ, "stream", HEAD_AXES),
    "W_K": WeightPlace(HookPoint.AttnK, "stream", ("kv_head", *HEAD_AXES[1:])),
    "W_V": WeightPlace(HookPoint.AttnV, "stream", ("kv_head", *HEAD_AXES[1:])),
    "W_O": WeightPlace(HookPoint.AttnOut, "AttnZ", ("head", "d_head", "d_model")),
    "W_in": WeightPlace(HookPoint.MlpUp, "MlpPre", ("d_model", "d_mlp"), HookPoint.MlpExpertUp),
    "W_gate": WeightPlace(HookPoint.MlpGate, "MlpPre", ("d_model", "d_mlp"), HookPoint.MlpExpertGate),
    "W_out": WeightPlace(HookPoint.MlpPost, "MlpAct", ("d_mlp", "d_model"), HookPoint.MlpExpertOut),
}
WEIGHT_OF_BIAS = {name.replace("W_", "b_"): name for name in WEIGHT_PRODUCTS}
BIAS_AXES = {"b_Q": ("head", "d_head"), "b_K": ("kv_head", "d_head"), "b_V": ("kv_head", "d_head")}
NORM_NAMES = ("ln1", "ln1_post", "ln2", "ln2_post", "q_norm", "k_norm")
STREAM = ("Embed", "ResidPre", "ResidMid", "ResidPost")


class GraphWeights:
    """The weights of one hooked model, read from its graph; `read(name, layer)`."""

    def __init__(self, hooked: HookedModel) -> None:
        self.hooked, self.maps = hooked, LinearMaps(hooked)
        self._norms: Once[tuple[str, int], NormMap | None] = Once()  # a cache of activations reads each many times

    def read(self, name: str, layer: int = 0) -> Array:
        """The numbers of a weight, of one layer where it has layers.

        Raises:
            HookError: the model has no such weight; it says which comes next to it.
        """
        if name in WEIGHT_PRODUCTS:
            return self._weight(name, layer)
        if name in WEIGHT_OF_BIAS:
            return self._bias(name, layer)
        if name in UNLAYERED:
            return UNLAYERED[name](self.hooked)
        norm, _, part = name.rpartition("_")
        return self._norm_part(norm, part, layer)

    def product(self, name: str, layer: int) -> LinearMap:
        """The product whose weight has a name, in one layer."""
        self.hooked.need_weights(f"reading {name}")
        spec = WEIGHT_PRODUCTS[name]
        point, hooks = spec.gives(layer), self.hooked.metadata.hooks
        experts = "" if spec.of_experts is None else str(spec.of_experts(layer))
        chosen = experts in hooks and str(HookPoint.MlpAct(layer)) not in hooks  # else of a shared expert
        if not chosen and str(point) not in hooks:
            raise HookError(
                f"{self._family}: layer {layer} has no {point}, and so no {name}{self._nearest(name, layer)}"
            )
        try:
            product = self.maps.behind(experts if chosen else str(point))
        except ModelError as error:
            raise HookError(
                f"{self._family}: no {name} in layer {layer}: {error}{self._nearest(name, layer)}"
            ) from error
        if chosen and product.experts is not None:
            return product
        if product.experts is not None:  # JetMoE's heads are experts
            raise HookError(f"{self._family}: no {name} in layer {layer}: each token chooses its own projections")
        if not self._reads(product, spec.reads):
            raise HookError(
                f"{self._family}: no {name} in layer {layer}: the product behind {point} reads "
                f"{product.reads or 'no hook point'}{self._nearest(name, layer)}"
            )
        return product

    @property
    def _family(self) -> str:
        return self.hooked.metadata.family

    def _reads(self, product: LinearMap, expected: str) -> bool:
        if not product.reads:
            return False
        variant = HookPoint.parse(product.reads).variant
        return variant in STREAM if expected == "stream" else variant == expected

    def _nearest(self, name: str, layer: int) -> str:
        """What the layer has beside a weight that it does not have."""
        near = {"W_gate": ("W_in", HookPoint.MlpUp(layer)), "W_in": ("W_gate", HookPoint.MlpGate(layer))}
        if name in near and str(near[name][1]) in self.hooked.metadata.hooks:
            return f"; it has {near[name][0]}"
        part = ".mlp." if name in ("W_in", "W_gate", "W_out") else "."
        products = [point for point in self._with_products(layer) if part in point.removeprefix(f"blocks.{layer}")]
        return f"; `weights.behind` has the products of {', '.join(products[:6])}" if products else ""

    def _with_products(self, layer: int) -> list[str]:
        names, hooks = list[str](), self.hooked.metadata.hooks
        for point in hooks:
            try:
                # without another hook point in between
                if point.startswith(f"blocks.{layer}.") and not any(
                    step.read in hooks for step in self.maps.behind(point).onto
                ):
                    names.append(point)
            except ModelError:
                continue
        return names

    def _weight(self, name: str, layer: int) -> Array:
        product = self.product(name, layer)
        try:
            weight = product.weight()
        except ModelError as error:  # W_out of a shared expert, beside others: a sum of several products
            raise HookError(
                f"{self._family}: no {name} in layer {layer}: {error}{self._nearest(name, layer)}"
            ) from error
        if name in ("W_Q", "W_K", "W_V"):
            return np.moveaxis(weight, 1, 0)  # [d_model, head, d_head]
        if name == "W_O":
            _, _, width = self.hooked.metadata.heads(layer)
            return weight.reshape(-1, width, weight.shape[-1])
        return weight

    def _bias(self, name: str, layer: int) -> Array:
        product = self.product(WEIGHT_OF_BIAS[name], layer)
        bias = product.bias()
        return np.zeros(product.axes, product.dtype) if bias is None else bias

    def norm(self, name: str, layer: int = 0) -> NormMap:
        """One of the norms of a layer, or "ln_final".

        Raises:
            HookError: the model has no such norm.
        """
        self.hooked.need_weights(f"reading {name}")
        norm = self._norm_once(name, layer)
        if norm is None:
            others = [one for one in NORM_NAMES if one != name and self.has_norm(one, layer)]
            has = f"; it has {', '.join(others)}" if others else ""
            where = "" if name == "ln_final" else f" in layer {layer}"
            raise HookError(f"{self._family}: no norm {name}{where}{has}")
        return norm

    def has_norm(self, name: str, layer: int) -> bool:
        """Whether a layer has one of the norms."""
        try:
            return self._norm_once(name, layer) is not None
        except (HookError, ModelError):
            return False

    def _norm_once(self, name: str, layer: int) -> NormMap | None:
        return self._norms.get((name, layer), lambda: self._norm(name, layer))

    def _norm(self, name: str, layer: int) -> NormMap | None:
        hooks = self.hooked.metadata.hooks
        stream_normed = NORMED_STREAM in self.hooked.metadata.exporter
        if name in ("ln1", "ln2") and stream_normed:
            # BERT: the norms come after what is added to the stream
            ends, starts = (
                (HookPoint.ResidMid, HookPoint.AttnOut) if name == "ln1" else (HookPoint.ResidPost, HookPoint.MlpOut)
            )
            return self.maps.norm(str(ends(layer)), str(starts(layer)))
        if name == "ln1":
            return self.product("W_V", layer).norm_before
        if name in ("q_norm", "k_norm"):
            return self.product("W_Q" if name == "q_norm" else "W_K", layer).norm_behind
        if name == "ln1_post":
            return self.product("W_O", layer).norm_behind
        value = {"ln2": HookPoint.MlpPre(layer), "ln2_post": HookPoint.MlpOut(layer), "ln_final": HookPoint.FinalNorm}[
            name
        ]
        if str(value) not in hooks:
            return None
        steps = self.maps.paths.back(str(value), lambda one: one in hooks)
        return None if steps is None else norm_of(self.maps.paths, steps)

    def _norm_part(self, norm: str, part: str, layer: int) -> Array:
        facts = self.norm(norm, layer)
        dtype = self.hooked.dtype(HookPoint.ResidPost(layer))
        if part == "w" and facts.weight is not None:
            return facts.weight
        if part == "b" and facts.bias is not None:
            return facts.bias
        width = self.hooked.metadata.sizes.hidden_size if facts.weight is None else facts.weight.shape[-1]
        return np.full(width, float(part == "w"), dtype)


def repeated(array: Array, heads: int) -> Array:
    """Keys or values of grouped heads, once for each query head, [head, ...]."""
    if heads % len(array):
        raise HookError(f"{len(array)} heads of keys do not divide {heads} heads of queries")
    return np.repeat(array, heads // len(array), axis=0) if len(array) != heads else array


UNLAYERED: dict[str, Callable[[HookedModel], Array]] = {
    "W_E": matrices.embedding,
    "W_pos": matrices.position_embedding,
    "W_U": matrices.unembedding,
    "b_U": matrices.unembedding_bias,
}
