"""Tokens as vectors: rows of the embedding, columns of the unembedding, and the tokens nearest to a vector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.lens.logit_lens import Scored
from mionnx.engine.options import Options
from mionnx.errors import InputError
from mionnx.graph import matrices
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.once import once_property
from mionnx.machine.typed import typed
from mionnx.run.prompt import streams_of, token_of
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

BLOCK = 2**12  # rows of a matrix that are read at once; it stays in its file


class Vocabulary:
    """The embedding and the unembedding of one model, memory-mapped."""

    def __init__(self, hooked: HookedModel, options: Options) -> None:
        self.hooked = hooked

    @once_property
    def embedding(self) -> NDArray[Any]:
        """[vocab, hidden]."""
        return matrices.embedding(self.hooked)

    @once_property
    def unembedding(self) -> NDArray[Any]:
        """[hidden, vocab]."""
        return matrices.unembedding(self.hooked)


@typed()
def embedding_for(model: Runner, token: int | str, scaled: bool = True) -> NDArray[Any]:
    """A token's embedding, [hidden].

    Args:
        scaled: with the scale that the model gives it (Gemma): its `hook_embed`; else the row of the table.

    Raises:
        InputError: no such token.

    Example:
        model.embedding_for("Paris")
    """
    token_id = token_of(model, token)
    if not scaled:
        return np.array(model.opened(Vocabulary).embedding[token_id])  # a copy: the table is mapped from the file
    spec = HookSpec().capture(HookPoint.Embed)
    # The scale is in the graph alone, so the graph gives it.
    return model.forward([token_id], spec, logits=False)[HookPoint.Embed][0, 0]


@typed()
def unembedding_for(model: Runner, token: int | str) -> NDArray[Any]:
    """A token's direction in the unembedding, [hidden].

    Its product with a final-normed stream is the logit before the head's bias, scale (Cohere) and soft cap.

    Raises:
        InputError: no such token.

    Example:
        model.unembedding_for("Paris") - model.unembedding_for("Berlin")
    """
    return np.array(model.opened(Vocabulary).unembedding[:, token_of(model, token)])


@typed()
def embedding_neighbors(model: Runner, query: ArrayLike | str, k: int = 10) -> Scored:
    """The tokens whose embeddings have the largest cosine with a vector.

    Args:
        query: [hidden]; or a token's text, for its own embedding.

    Returns:
        [(token id, cosine)], the nearest first.

    Raises:
        InputError: another width, NaN, a zero vector, or another k than 1 to the vocabulary's size.

    Example:
        model.embedding_neighbors("Paris", k=3)
    """
    # Rows of the table are compared: a scale would not change a cosine.
    vector = embedding_for(model, query, scaled=False) if isinstance(query, str) else _one_vector(model, query, "query")
    values = cosines(model.opened(Vocabulary).embedding, vector)
    model.watch_memory()
    return largest(values, k)


@typed()
def project_through_unembed(model: Runner, vec: ArrayLike, k: int = 10) -> Scored:
    """The tokens whose unembedding directions have the largest product with a vector.

    This is the raw product, without norm, bias and soft cap.

    Args:
        vec: [hidden], for example a head's output.

    Returns:
        [(token id, logit)], the largest first.

    Raises:
        InputError: another width, NaN, or another k than 1 to the vocabulary's size.

    Example:
        cache = model.forward("The capital of France is", HookSpec().capture("blocks.3.hook_mlp_out"))
        model.project_through_unembed(cache["mlp_out", 3][0, -1], k=3)
    """
    values = products(model.opened(Vocabulary).unembedding.T, _one_vector(model, vec, "vec"))
    model.watch_memory()
    return largest(values, k)


def _one_vector(model: Runner, vector: ArrayLike, name: str) -> NDArray[Any]:
    array = streams_of(vector, model.hidden_size, name)
    if array.ndim != 1:
        raise InputError(f"{name} is {list(array.shape)}; it must be [hidden={model.hidden_size}]")
    return array


def products(matrix: matrices.Matrix, vector: NDArray) -> NDArray[np.float64]:
    """The product of every row with a vector, in float64."""
    exact = vector.astype(np.float64)
    return np.concatenate([block @ exact for block in _blocks(matrix)])


def _blocks(matrix: matrices.Matrix) -> Iterator[NDArray[np.float64]]:
    for first in range(0, len(matrix), BLOCK):
        yield matrix[first : first + BLOCK].astype(np.float64)


def cosines(matrix: matrices.Matrix, vector: NDArray) -> NDArray[np.float64]:
    """The cosine of every row with a vector; 0 for a row of zeros."""
    length = np.linalg.norm(vector.astype(np.float64))
    if length == 0:
        raise InputError("query is zero: it has no direction that embeddings could be compared with")
    lengths = np.concatenate([np.linalg.norm(block, axis=1) for block in _blocks(matrix)])
    return products(matrix, vector) / (np.where(lengths == 0, 1, lengths) * length)


def largest(values: NDArray[np.float64], k: int) -> list[tuple[int, float]]:
    """The k largest values with their indices, the largest first; equal ones by index."""
    if not isinstance(k, int | np.integer) or not 1 <= k <= len(values):
        raise InputError(f"k={k!r}; it must be an integer from 1 to {len(values)}, the vocabulary's size")
    order = np.argsort(-values, kind="stable")[:k]
    return [(int(index), float(values[index])) for index in order]
