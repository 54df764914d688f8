"""`NamedWeights`: every weight of a model under TransformerLens' name, read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.weights.graph_weights import (
    BIAS_AXES,
    UNLAYERED,
    WEIGHT_OF_BIAS,
    WEIGHT_PRODUCTS,
    GraphWeights,
    repeated,
)
from mionnx.analysis.weights.layer_stack import LayerStack
from mionnx.errors import HookError, InputError, MIError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.linear_map import LinearMap
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import Hook

Array = NDArray[Any]
NORM_PARTS = tuple(
    f"{norm}_{part}" for norm in ("ln1", "ln1_post", "ln2", "ln2_post", "q_norm", "k_norm") for part in "wb"
)
FINAL_NORM = ("ln_final_w", "ln_final_b")


class WeightReader(Protocol):
    """Gives the numbers of a weight; see `GraphWeights`, `Folded`."""

    def read(self, name: str, layer: int = 0) -> Array: ...


class NamedWeights:
    """Every weight under its name, as one reader gives it; `Weights` says which."""

    def __init__(self, model: Runner, graph: GraphWeights | None = None, reader: WeightReader | None = None) -> None:
        self.model, self.graph = model, graph or GraphWeights(model.hooked)
        self.reader: WeightReader = reader or self.graph

    def __getattr__(self, name: str) -> Any:
        if name in UNLAYERED or name in FINAL_NORM:
            return self.reader.read(name)
        if name == "W_E_pos":
            return np.concatenate([self.W_E, self.W_pos])
        if name in WEIGHT_PRODUCTS or name in WEIGHT_OF_BIAS or name in NORM_PARTS:
            return self._stack(name)
        raise AttributeError(f"weights have no {name!r}; there are {', '.join(self.names)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.names]

    @property
    def names(self) -> list[str]:
        """The names of weights; not every model has each."""
        return [*UNLAYERED, "W_E_pos", *WEIGHT_PRODUCTS, *WEIGHT_OF_BIAS, *NORM_PARTS, *FINAL_NORM]

    def _stack(self, name: str) -> LayerStack:
        layers = self.model.num_layers
        refusals: list[MIError] = []
        for layer in range(layers):  # a weight that no layer has is refused at once
            try:
                self._find(name, layer)
                break
            except HookError as error:
                refusals.append(error)
        if len(refusals) == layers:
            raise refusals[0]
        spec = WEIGHT_PRODUCTS.get(name)
        axes = spec.axes if spec else BIAS_AXES.get(name, ("d_mlp",) if name in ("b_in", "b_gate") else ("d_model",))
        return LayerStack(name, layers, partial(self._read, name), axes)

    def _find(self, name: str, layer: int) -> None:
        product = WEIGHT_OF_BIAS.get(name, name)
        if product in WEIGHT_PRODUCTS:
            self.graph.product(product, layer)
        else:
            self.graph.norm(name.rpartition("_")[0], layer)

    def _read(self, name: str, layer: int) -> Array:
        return self.reader.read(name, layer)

    @typed()
    def behind(self, point: Hook) -> LinearMap:
        """The product with a weight that a hook point comes from, wherever that lies.

        Its `weight()` is [in, ...] with the axes of the hook point but batch and seq, its `bias()` has these axes (None
        for none), `reads` is the hook point that it reads, straight or through a norm (`norm_before`); `initializer`
        is the tensor's name in the graph.

        Raises:
            HookError: no such hook point.
            ModelError: the value comes from no product with a weight, or from a sum of several.

        Example:
            router = model.weights.behind("blocks.0.mlp.hook_router_logits")  # of a mixture of experts
        """
        return self.graph.maps.behind(str(HookPoint.parse(point)))

    def parameters(self) -> Mapping[str, Array]:
        """All that the model has, by TransformerLens' names of parameters: "blocks.0.attn.W_Q", "ln_final.w".

        Each is read when it is asked for. Keys and values of grouped heads stand there once for each query head.

        Example:
            model.weights.parameters()["blocks.0.attn.W_Q"].shape
        """
        return Parameters(self)


PLACES = {
    **dict.fromkeys(("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"), "attn."),
    **dict.fromkeys(("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out"), "mlp."),
    **dict.fromkeys(("q_norm_w", "k_norm_w"), "attn."),
}
UNLAYERED_NAMES = {
    "embed.W_E": "W_E",
    "pos_embed.W_pos": "W_pos",
    "ln_final.w": "ln_final_w",
    "ln_final.b": "ln_final_b",
    "unembed.W_U": "W_U",
    "unembed.b_U": "b_U",
}


class Parameters(Mapping[str, Array]):
    """TransformerLens' names of parameters -> numbers, read when they are asked for."""

    def __init__(self, weights: NamedWeights) -> None:
        self._weights = weights
        self._places: dict[str, tuple[str, int]] = {}
        for key, name in UNLAYERED_NAMES.items():
            if self._has(name, 0):
                self._places[key] = (name, 0)
        for layer in range(weights.model.num_layers):
            for name in (*WEIGHT_PRODUCTS, *WEIGHT_OF_BIAS, *NORM_PARTS):
                if self._has(name, layer):
                    base = name if name in PLACES and "norm" not in name else name[:-2] + "." + name[-1]
                    self._places[f"blocks.{layer}.{PLACES.get(name, '')}{base}"] = (name, layer)

    def _has(self, name: str, layer: int) -> bool:
        try:
            if name in UNLAYERED:
                if name == "W_pos":
                    self._weights.reader.read(name)
            elif name in FINAL_NORM:
                self._weights.graph.norm("ln_final")
            else:
                self._weights._find(name, layer)
        except (HookError, InputError):
            return False
        return True

    def __getitem__(self, key: str) -> Array:
        if key not in self._places:
            raise InputError(f"no parameter {key!r}; the first are {', '.join([*self._places][:6])}")
        name, layer = self._places[key]
        array = self._weights.reader.read(name, layer)
        return repeated(array, self._weights.model.num_heads) if name[2:] in ("K", "V") else array

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def get(self, key: str, default: Any = None) -> Any:
        """The numbers of a parameter, or the default where there is no such parameter."""
        return self[key] if key in self._places else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
