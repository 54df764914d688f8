"""Neurons and singular vectors: directions of a model's weights, and the tokens that they stand near."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.lens.token_vectors import cosines, largest, products
from mionnx.analysis.weights.head_circuits import OV
from mionnx.analysis.weights.named_weights import NamedWeights
from mionnx.errors import HookError, InputError, nearest
from mionnx.machine.ranges import at_least, index_within
from mionnx.machine.typed import typed

Array = NDArray[Any]
Vector = NDArray[np.float64]
Scored = list[tuple[int, float]]  # (token id, score), the largest first
MATRIX_KINDS = ("OV", "W_in", "W_out")


@dataclass(frozen=True, eq=False)
@typed()
class Neuron:
    """One neuron of an MLP: what it reads from the stream, and what it writes to it.

    Attributes:
        input: [d_model], its column of W_in.
        gate: [d_model], its column of W_gate; None where the MLP has no gate.
        output: [d_model], its row of W_out.
        bias: its entry of b_in.
    """

    weights: NamedWeights
    layer: int
    index: int
    input: Array
    gate: Array | None
    output: Array
    bias: float

    def reads(self, k: int = 10, gate: bool = False) -> Scored:
        """The tokens whose embeddings have the largest cosine with what it reads, [(token id, cosine)].

        The direction is that of the stream: the column times the weight of the norm before the MLP.

        Args:
            gate: by the column of W_gate, that of W_in otherwise.

        Raises:
            InputError: a gate of an MLP without one; another k than 1 to the vocabulary's size.

        Example:
            model.weights.neuron(0, 5).reads(3)
        """
        if gate and self.gate is None:
            raise InputError(f"neuron {self.index} of layer {self.layer} has no gate: its MLP is not gated")
        column = self.gate if gate and self.gate is not None else self.input
        return largest(cosines(self.weights.W_E, through_norm(self.weights, self.layer, column)), k)

    def writes(self, k: int = 10) -> Scored:
        """The tokens whose logits its activation raises most, [(token id, logit)], without the final norm.

        Raises:
            InputError: another k than 1 to the vocabulary's size.

        Example:
            model.weights.neuron(0, 5).writes(3)
        """
        return largest(products(self.weights.W_U.T, self.output), k)


@typed()
def neuron(weights: NamedWeights, layer: int, index: int) -> Neuron:
    """A neuron's vectors.

    Raises:
        InputError: no such layer or neuron.
        HookError: experts, whose neurons a token chooses; no MLP.

    Example:
        model.weights.neuron(3, 17).output
    """
    layer = index_within("layer", layer, weights.model.num_layers)
    matrix = weights.reader.read("W_in", layer)
    if matrix.ndim != 2:
        raise HookError(
            f"layer {layer} is a mixture of {len(matrix)} experts: W_in[{layer}][expert][:, neuron] has them"
        )
    index = index_within("neuron", index, matrix.shape[1])
    try:
        gate = np.array(weights.reader.read("W_gate", layer)[:, index])
    except HookError:
        gate = None
    output = np.array(weights.reader.read("W_out", layer)[index])
    bias = float(weights.reader.read("b_in", layer)[index])
    return Neuron(weights, layer, index, np.array(matrix[:, index]), gate, output, bias)


def through_norm(weights: NamedWeights, layer: int, columns: Array) -> Array:
    """Columns [d_model, ...] of an MLP's input as directions of the stream: times the weight of its norm, if any."""
    try:
        weight = weights.reader.read("ln2_w", layer)
    except HookError:
        return columns.astype(np.float64)
    return columns * weight.astype(np.float64).reshape(-1, *[1] * (columns.ndim - 1))


@dataclass(frozen=True, eq=False)
@typed()
class SingularVectors:
    """Directions in which a matrix reads or writes most, read through the unembedding.

    Attributes:
        values: [n], singular values, the largest first.
        vectors: [n, d_model], of length 1; of each the entry of the largest modulus is positive.
        logits: [n, vocab], vectors times W_U.
    """

    values: Vector
    vectors: Vector
    logits: Vector

    def tokens(self, number: int, k: int = 10, lowest: bool = False) -> Scored:
        """The tokens that one vector raises most, [(token id, logit)]; or lowers most.

        Raises:
            InputError: no such vector; another k than 1 to the vocabulary's size.

        Example:
            model.weights.singular_vectors("OV", 2, head=1).tokens(0, k=3)
        """
        row = self.logits[index_within("vector", number, len(self.logits))]
        return [(token, -value) for token, value in largest(-row, k)] if lowest else largest(row, k)


@typed()
def singular_vectors(
    weights: NamedWeights, kind: str, layer: int, head: int | None = None, k: int = 10
) -> SingularVectors:
    """The k largest singular vectors on the stream's side of a matrix, read through the unembedding.

    "OV": what a head writes; "W_in": what the MLP reads (times the weight of the norm before it, as TransformerLens'
    `SVDInterpreter` has it); "W_out": what it writes. Source: Millidge and Black, "The Singular Value Decompositions of
    Transformer Weight Matrices are Highly Interpretable" (2022).

    Args:
        head: a head of "OV"; none of the others.

    Raises:
        InputError: another kind, layer, head or k.
        HookError: no such weight.

    Example:
        found = model.weights.singular_vectors("OV", 2, head=1, k=2)
        print([model.to_string(token) for token, _ in found.tokens(0, k=3)])
    """
    if kind not in MATRIX_KINDS:
        raise InputError(f"kind={kind!r}: one of {', '.join(MATRIX_KINDS)}{nearest(kind, MATRIX_KINDS)}")
    if (head is None) == (kind == "OV"):
        raise InputError("an OV has a head: give head=" if kind == "OV" else f"{kind} is of the whole layer: no head")
    at_least("k", k, 1)
    layer = index_within("layer", layer, weights.model.num_layers)
    if head is not None:
        circuit = OV(weights, layer)
        one = circuit[index_within("head", head, circuit.shape[0])]
        values, vectors = one.S, one.V.T
    else:
        matrix = weights.reader.read(kind, layer)
        if matrix.ndim != 2:
            raise HookError(f"layer {layer} is a mixture of {len(matrix)} experts: no one {kind}")
        rows = through_norm(weights, layer, matrix).T if kind == "W_in" else matrix.astype(np.float64)
        _, values, vectors = np.linalg.svd(rows, full_matrices=False)
    values, vectors = values[:k].astype(np.float64), vectors[:k].astype(np.float64)
    # the sign of a singular vector is free
    signs = np.sign(np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1))
    vectors = vectors * np.where(signs == 0, 1, signs)
    unembedding = weights.W_U.T
    return SingularVectors(values, vectors, np.stack([products(unembedding, vector) for vector in vectors]))
