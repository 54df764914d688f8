"""`Weights`: a table of contents of what can be asked of a model's weights, and `model.weights`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.weights import folding, head_circuits, neurons
from mionnx.analysis.weights.factored_matrix import FactoredMatrix
from mionnx.analysis.weights.named_weights import NamedWeights
from mionnx.run.runner import Runner


class Weights(NamedWeights):
    """Weights of a model: `weights.W_Q[3, 1]`, `weights.b_U`, `weights.ln1_w`.

    Matrices stand on the right of what they multiply, y = x W + b, and y is the value at the hook point, to the last
    scale (OPT's of queries). x is the layer's norm of the stream for W_Q, W_K, W_V; z for W_O; `mlp.hook_pre` for W_in
    and W_gate; the neurons, `mlp.hook_act`, for W_out. Where heads' queries and keys, or an output, are normed (Qwen3,
    Gemma), the weights are those before that norm. Numbers are those that the graph multiplies with: a weight in blocks
    is dequantised, a norm's weight is what the norm multiplies with (Gemma: 1 + w).

    Attributes:
        W_Q, W_K, W_V, b_Q, b_K, b_V: [layer, head, d_model, d_head], [layer, head, d_head]. Keys and values of grouped
            heads have fewer heads: query head h reads head h // (n_heads / n_kv_heads).
        W_O, b_O: [layer, head, d_head, d_model], [layer, d_model].
        W_in, W_gate, b_in, b_gate: [layer, d_model, d_mlp], [layer, d_mlp]; the activation is that of W_gate x where
            there is one. In a mixture of experts without a shared one, [layer, expert, d_model, d_expert].
        W_out, b_out: [layer, d_mlp, d_model], [layer, d_model].
        W_E, W_pos, W_E_pos, W_U, b_U: [vocab, d_model], [positions, d_model], both below each other,
            [d_model, vocab], [vocab].
        ln1_w, ln1_b, ln2_w, ln2_b, ln_final_w, ln_final_b: [layer, d_model] and [d_model]; the norms before attention,
            before the MLP, before the head. ln1_post and ln2_post stand behind attention and MLP, q_norm and k_norm
            behind W_Q and W_K.
    """

    # circuits of heads
    QK = head_circuits.QK
    OV = head_circuits.OV
    composition_scores = head_circuits.composition_scores
    copying_scores = head_circuits.copying_scores
    accumulated_bias = head_circuits.accumulated_bias
    # directions, and the tokens near them
    neuron = neurons.neuron
    singular_vectors = neurons.singular_vectors
    # other weights that compute the same
    fold_layer_norm = folding.fold_layer_norm
    center_writing_weights = folding.center_writing_weights
    center_unembed = folding.center_unembed
    fold_value_biases = folding.fold_value_biases
    refactor_factored_attn_matrices = folding.refactor_factored_attn_matrices
    process_weights = folding.process_weights


def weights(model: Runner) -> Weights:
    """The model's weights by name; see `Weights`."""
    return Weights(model)


def weight(name: str) -> Callable[[Runner], Any]:
    """Accessor of a weight by its name, for models: `model.W_Q`."""

    def read(model: Runner) -> Any:
        return getattr(Weights(model), name)

    read.__name__, read.__doc__ = name, f"`model.weights.{name}`; see `Weights`."
    return read


def all_QK(model: Runner) -> FactoredMatrix:
    """`model.weights.QK()`, [layer, head, d_model, d_model]: W_Q W_K^T of every head, at distance 0."""
    return head_circuits.QK(Weights(model))


def all_OV(model: Runner) -> FactoredMatrix:
    """`model.weights.OV()`, [layer, head, d_model, d_model]: W_V W_O of every head."""
    return head_circuits.OV(Weights(model))


def all_composition_scores(model: Runner, mode: str) -> NDArray[np.float64]:
    """Composition of all pairs of heads, [layer, head, later layer, head]: `model.weights.composition_scores(mode)`.

    Args:
        mode: "Q", "K" or "V".

    Raises:
        InputError: another mode.
        HookError: no such weights.

    Example:
        model.all_composition_scores("K").max()
    """
    return head_circuits.composition_scores(Weights(model), mode)


def accumulated_bias(
    model: Runner, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True
) -> NDArray[np.float32]:
    """The sum of biases in the stream before a layer, [d_model]: `model.weights.accumulated_bias`.

    Raises:
        InputError: another layer.
        HookError: outputs that are normed before they are added.

    Example:
        model.accumulated_bias(2)
    """
    return head_circuits.accumulated_bias(Weights(model), layer, mlp_input, include_mlp_biases)


def tl_parameters(model: Runner) -> Mapping[str, NDArray[Any]]:
    """All weights by TransformerLens' names of parameters, read when they are asked for.

    Example:
        model.tl_parameters()["blocks.0.attn.W_Q"].shape
    """
    return Weights(model).parameters()
