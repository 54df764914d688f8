"""Foldings: other weights that compute the same logits, as functions of weights.

They change what `model.weights` says, not the graph: hook points keep their numbers. Definitions and order are those of
TransformerLens' `process_weights`: norms into what reads them, weights that write to the stream centred, the
unembedding centred, biases of values into those of outputs; then, where asked for, circuits of heads made even.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.weights.factored_matrix import FactoredMatrix, transposed
from mionnx.analysis.weights.graph_weights import WEIGHT_OF_BIAS, GraphWeights, repeated
from mionnx.analysis.weights.named_weights import NamedWeights, WeightReader
from mionnx.errors import HookError
from mionnx.graph import matrices
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.linear_map import NormMap
from mionnx.graph.metadata import NORMED_STREAM

Array = NDArray[Any]
W = TypeVar("W", bound=NamedWeights)
Change = Callable[[WeightReader, str, int], Array]
# weight -> the norm before it
NORM_BEFORE = {
    **dict.fromkeys(("W_Q", "W_K", "W_V"), "ln1"),
    **dict.fromkeys(("W_in", "W_gate"), "ln2"),
    "W_U": "ln_final",
}
FOLDED_NORMS = ("ln1", "ln2", "ln_final")
WRITING = ("W_E", "W_pos", "W_O", "W_out", "b_O", "b_out")


class Folded:
    """A reader of weights that changes what another one reads."""

    def __init__(self, origin: WeightReader, change: Change) -> None:
        self._origin, self._change = origin, change

    def read(self, name: str, layer: int = 0) -> Array:
        """The numbers of a weight, changed."""
        return self._change(self._origin, name, layer)


def _with(weights: W, change: Change) -> W:
    return type(weights)(weights.model, weights.graph, Folded(weights.reader, change))


def fold_layer_norm(weights: W) -> W:
    """The weights of norms multiplied into what reads them; a norm is then without weight and bias.

    W' = diag(w) W and b' = b + b_norm W; behind a LayerNorm W' less its mean over d_model too. The final norm goes into
    W_U and b_U. Norms of queries, keys and outputs stay.

    Raises:
        HookError: norms that are part of the stream (BERT).

    Example:
        model.weights.fold_layer_norm().W_Q
    """
    if NORMED_STREAM in weights.model.hooked.metadata.exporter:
        raise HookError(f"{_family(weights)}: the stream itself is normed, what it adds cannot be folded")
    return _with(weights, lambda origin, name, layer: _without_norm(weights.graph, origin, name, layer))


def _without_norm(graph: GraphWeights, origin: WeightReader, name: str, layer: int) -> Array:
    norm, _, part = name.rpartition("_")
    if norm in FOLDED_NORMS:
        numbers = origin.read(name, layer)
        return np.ones_like(numbers) if part == "w" else np.zeros_like(numbers)
    of_bias = {**WEIGHT_OF_BIAS, "b_U": "W_U"}
    matrix = of_bias.get(name, name)
    before = _norm_of(graph, NORM_BEFORE.get(matrix), layer)
    if before is None:
        return origin.read(name, layer)
    wide = origin.read(matrix, layer).astype(np.float64)
    read = NORM_BEFORE[matrix]
    if name in of_bias:
        own = origin.read(name, layer)
        shift = origin.read(f"{read}_b", layer).astype(np.float64)
        return (own + np.einsum("d,...dk->...k", shift, wide)).astype(_float_dtype(own))
    scaled = origin.read(f"{read}_w", layer).astype(np.float64)[:, None] * wide
    scaled = scaled - scaled.mean(axis=-2, keepdims=True) if before.centred else scaled
    return scaled.astype(_float_dtype(origin.read(name, layer)))


def _float_dtype(array: Array) -> np.dtype[Any]:
    """The dtype of a folded weight: 16 bits would round what was exact."""
    return array.dtype if array.dtype in (np.float32, np.float64) else np.dtype(np.float32)


def _norm_of(graph: GraphWeights, name: str | None, layer: int) -> NormMap | None:
    try:
        return None if name is None else graph.norm(name, layer)
    except HookError:
        return None


def center_writing_weights(weights: W) -> W:
    """W_E, W_pos, W_O, W_out, b_O and b_out less their mean over d_model, which every LayerNorm takes out again.

    Raises:
        HookError: a norm of the stream is no LayerNorm, and reads the mean; outputs are normed before they are added.

    Example:
        model.weights.fold_layer_norm().center_writing_weights().W_E
    """
    if (why := _reads_the_mean(weights)) is not None:
        raise HookError(f"{_family(weights)}: {why}, so writing weights cannot be centred")
    return _with(weights, _centred)


def _centred(origin: WeightReader, name: str, layer: int) -> Array:
    array = origin.read(name, layer)
    return array - array.mean(axis=-1, keepdims=True) if name in WRITING else array


def _reads_the_mean(weights: NamedWeights) -> str | None:
    """Why the stream's mean counts; None where every norm takes it out."""
    if NORMED_STREAM in weights.model.hooked.metadata.exporter:
        return "the stream itself is normed"
    for layer in range(weights.model.num_layers):
        for name in ("ln1", "ln2"):
            norm = _norm_of(weights.graph, name, layer)
            if norm is None or not norm.centred:
                return f"{name} of layer {layer} takes out no mean"
            if _norm_of(weights.graph, f"{name}_post", layer) is not None:
                return f"layer {layer} norms what it adds"
    final = _norm_of(weights.graph, "ln_final", 0)
    return None if final is not None and final.centred else "the final norm takes out no mean"


def center_unembed(weights: W) -> W:
    """W_U and b_U less their mean over the vocabulary: each logit changes by the same number.

    Raises:
        HookError: a soft cap behind the logits, for which that number counts.

    Example:
        model.weights.center_unembed().W_U
    """
    if matrices.head(weights.model.hooked).capped:
        raise HookError(f"{_family(weights)}: logits are capped, a number that all of them share counts")
    return _with(weights, _centred_unembedding)


def _centred_unembedding(origin: WeightReader, name: str, layer: int) -> Array:
    array = origin.read(name, layer)
    return array - array.mean(axis=-1, keepdims=True) if name in ("W_U", "b_U") else array


def fold_value_biases(weights: W) -> W:
    """Biases of values moved into b_O, as a pattern's row sums to 1: b_O' = b_O + sum over heads of b_V W_O.

    Example:
        model.weights.fold_value_biases().b_O
    """
    return _with(weights, _without_value_biases)


def _without_value_biases(origin: WeightReader, name: str, layer: int) -> Array:
    own = origin.read(name, layer)
    if name == "b_V":
        return np.zeros_like(own)
    if name != "b_O":
        return own
    output = origin.read("W_O", layer).astype(np.float64)
    values = repeated(origin.read("b_V", layer), len(output)).astype(np.float64)
    return (own + np.einsum("hk,hkd->d", values, output)).astype(_float_dtype(own))


def refactor_factored_attn_matrices(weights: W) -> W:
    """Queries and keys, values and outputs of each head in the basis of their circuit's singular vectors.

    QK with biases is U S V^T: W_Q' and b_Q' are U sqrt(S), W_K' and b_K' are V sqrt(S). OV is U S V^T: W_V' is U S,
    W_O' is V^T, and biases of values go into b_O first.

    Raises:
        HookError: rotary positions, norms of queries and keys, or grouped heads, which know one basis only.

    Example:
        model.weights.refactor_factored_attn_matrices().W_Q
    """
    hooks, sizes = weights.model.hooked.metadata.hooks, weights.model.hooked.metadata.sizes
    for layer in range(sizes.num_layers):
        turned = str(HookPoint.AttnRotQ(layer)) in hooks
        if (
            turned
            or weights.graph.product("W_Q", layer).normed
            or weights.model.hooked.metadata.heads(layer)[0] != sizes.num_heads
        ):
            raise HookError(
                f"{_family(weights)}: layer {layer} turns, norms or groups queries and keys: their basis is fixed"
            )
    return _with(fold_value_biases(weights), _even)


def _even(origin: WeightReader, name: str, layer: int) -> Array:
    own = origin.read(name, layer)
    head, kind = name[2:], name[:2]
    if kind not in ("W_", "b_") or head not in "QKVO" or name == "b_O":
        return own
    if head in "VO":
        circuit = FactoredMatrix(*(origin.read(one, layer).astype(np.float64) for one in ("W_V", "W_O")))
        changed = {"W_V": circuit.collapse_r(), "W_O": transposed(circuit.V), "b_V": np.zeros(own.shape)}[name]
        return changed.astype(_float_dtype(own))
    # biases are a row of their own below the matrix
    query, key = (
        np.concatenate([origin.read(f"W_{one}", layer), origin.read(f"b_{one}", layer)[:, None]], axis=1).astype(
            np.float64
        )
        for one in "QK"
    )
    even = FactoredMatrix(query, transposed(key)).make_even()
    rows = even.A if head == "Q" else transposed(even.B)
    return (rows[:, :-1] if kind == "W_" else rows[:, -1]).astype(_float_dtype(own))


def process_weights(weights: W) -> W:
    """The foldings that change no probability of the model: norms, writing weights, unembedding, values' biases.

    Writing weights are centred where each norm is a LayerNorm, the unembedding where no soft cap follows.

    Example:
        model.weights.process_weights().W_U
    """
    folded = fold_layer_norm(weights)
    if _reads_the_mean(weights) is None:
        folded = center_writing_weights(folded)
    if not matrices.head(weights.model.hooked).capped:
        folded = center_unembed(folded)
    return fold_value_biases(folded)


def _family(weights: NamedWeights) -> str:
    return weights.model.hooked.metadata.family
