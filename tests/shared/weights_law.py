"""x W + b is the hooked value: the law of weights by name, of one layer of a model."""

from typing import Any

import numpy as np

from mionnx import HookCache, MIModel
from mionnx.graph.linear_map import NormMap

APART = 2e-5  # of the largest number


def normed(norm: NormMap | None, values: np.ndarray) -> np.ndarray:
    """A norm in float64; where one has no weight of a head's size, over all heads together (OLMo 2)."""
    if norm is None:
        return values
    assert norm.epsilon is not None, "a factor that depends on the position or the text"
    whole = norm.weight is not None and norm.weight.size != values.shape[-1]
    rows = values.reshape(*values.shape[:2], -1) if whole else values
    rows = rows - rows.mean(axis=-1, keepdims=True) if norm.centred else rows
    rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + norm.epsilon)
    rows = rows * (1 if norm.weight is None else norm.weight) + (0 if norm.bias is None else norm.bias)
    return rows.reshape(values.shape)


def close(one: np.ndarray, other: np.ndarray, name: str, most: float = APART) -> None:
    assert one.shape == other.shape, name
    assert np.abs(one - other).max() <= most * np.abs(other).max(), name
    assert np.abs(other).max() > 0, name


def check_attention(model: MIModel, cache: HookCache, layer: int, most: float = APART) -> None:
    """Queries, keys and values of the normed stream; the attention output of z."""
    weights, graph = model.weights, model.weights.graph
    for letter in "QKV":
        found = graph.product(f"W_{letter}", layer)
        x = normed(found.norm_before, cache[found.reads].astype(np.float64))
        y = np.einsum("bsd,hdk->bshk", x, getattr(weights, f"W_{letter}")[layer])
        y = normed(found.norm_behind, y + getattr(weights, f"b_{letter}")[layer])
        close(y.transpose(0, 2, 1, 3), cache[f"blocks.{layer}.attn.hook_{letter.lower()}"], f"W_{letter} {layer}", most)
    z = cache["z", layer].astype(np.float64)
    y = np.einsum("bshk,hkd->bsd", z, weights.W_O[layer]) + weights.b_O[layer]
    close(normed(graph.product("W_O", layer).norm_behind, y), cache["attn_out", layer], f"W_O {layer}", most)


def check_mlp(model: MIModel, cache: HookCache, layer: int, most: float = APART) -> None:
    """Neurons of the MLP's input, the MLP's output of neurons; experts as the tokens choose them."""
    weights, points = model.weights, {str(point) for point in model.hook_points()}

    def at(name: str) -> np.ndarray:
        return cache[f"blocks.{layer}.mlp.hook_{name}"].astype(np.float64)

    # the names are of an expert that all tokens share, where there is one beside the others
    if f"blocks.{layer}.mlp.hook_expert_up" in points and weights.W_in[layer].ndim > 2:
        chosen = at("expert_indices").astype(int)
        for name, point in (("W_in", "expert_up"), ("W_gate", "expert_gate")):
            own = getattr(weights, name)[layer][chosen]  # [batch, seq, choice, d_model, d_expert]
            y = np.einsum("bsd,bscdm->bscm", at("pre"), own) + bias_of(weights, name, layer, chosen)
            close(y, at(point), name, most)
        y = np.einsum("bscm,bscmd->bscd", at("expert_act"), weights.W_out[layer][chosen])
        y = y + bias_of(weights, "W_out", layer, chosen)
        close(y * at("expert_weights")[..., None], at("expert_out"), "W_out", most)
        return
    gated = f"blocks.{layer}.mlp.hook_gate" in points
    for name, point in (("in", "up"), *([("gate", "gate")] if gated else [])):
        y = at("pre") @ getattr(weights, f"W_{name}")[layer] + getattr(weights, f"b_{name}")[layer]
        close(y, at(point), f"W_{name} {layer}", most)
    close(at("act") @ weights.W_out[layer] + weights.b_out[layer], at("post"), f"W_out {layer}", most)


def bias_of(weights: Any, name: str, layer: int, chosen: np.ndarray) -> np.ndarray:
    """The biases of the experts that each token chose; of one bias, that."""
    bias = getattr(weights, name.replace("W_", "b_"))[layer]
    return bias[chosen] if bias.ndim == 2 else bias
