"""Tokens whose logits vectors of the stream raise most, through the final norm and the unembedding."""

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.lens.token_vectors import Vocabulary
from mionnx.analysis.weights.weights import weights
from mionnx.run.runner import Runner

READ = 2**14  # tokens whose columns of the unembedding are in memory at once


def top_tokens(model: Runner, vectors: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """The tokens whose logits vectors of the stream [n, hidden] raise most, [n, k]."""
    graph, matrix = weights(model).graph, model.opened(Vocabulary).unembedding
    norm = graph.norm("ln_final") if graph.has_norm("ln_final", 0) else None
    wide = vectors
    if norm is not None and norm.centred:  # a LayerNorm takes out what a vector adds to all numbers alike
        wide = wide - wide.mean(axis=1, keepdims=True)
    if norm is not None and norm.weight is not None:
        wide = wide * np.asarray(norm.weight, np.float32)
    best, tops = np.zeros((len(vectors), 0), np.float32), np.zeros((len(vectors), 0), np.int64)
    for begin in range(0, matrix.shape[1], READ):
        part = wide @ np.asarray(matrix[:, begin : begin + READ], np.float32)
        # the whole vocabulary in order takes longer
        few = np.argpartition(-part, min(k, part.shape[1]) - 1, axis=1)[:, :k]
        best = np.concatenate([best, np.take_along_axis(part, few, 1)], axis=1)
        tops = np.concatenate([tops, begin + few], axis=1)
        order = np.lexsort((tops, -best))[:, :k]  # of equal ones the first token
        best, tops = np.take_along_axis(best, order, 1), np.take_along_axis(tops, order, 1)
    return tops
