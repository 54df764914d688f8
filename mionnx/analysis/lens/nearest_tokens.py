"""The rows of a large matrix nearest to a vector; the matrix stays in its file and is read in blocks."""

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.graph.matrices import Matrix

BLOCK = 2**14  # rows that are read at once


def products(matrix: Matrix, vector: NDArray) -> NDArray[np.float64]:
    """The product of every row with a vector, in float64.

    Args:
        matrix: [rows, width], of any float dtype.
        vector: [width].
    """
    exact = vector.astype(np.float64)
    blocks = range(0, len(matrix), BLOCK)
    return np.concatenate([matrix[first : first + BLOCK].astype(np.float64) @ exact for first in blocks])


def cosines(matrix: Matrix, vector: NDArray) -> NDArray[np.float64]:
    """The cosine of every row with a vector; 0 for a row of zeros.

    Raises:
        InputError: the vector is zero, which points nowhere.
    """
    length = np.linalg.norm(vector.astype(np.float64))
    if length == 0:
        raise InputError("query is zero: it has no direction that embeddings could be compared with")
    blocks = range(0, len(matrix), BLOCK)
    lengths = np.concatenate([np.linalg.norm(matrix[at : at + BLOCK].astype(np.float64), axis=1) for at in blocks])
    return products(matrix, vector) / (np.where(lengths == 0, 1, lengths) * length)


def largest(values: NDArray[np.float64], k: int) -> list[tuple[int, float]]:
    """The k largest values with their indices, the largest first; equal ones by index.

    Raises:
        InputError: another k than 1 to the number of values.
    """
    if not isinstance(k, int | np.integer) or not 1 <= k <= len(values):
        raise InputError(f"k={k!r}; it must be an integer from 1 to {len(values)}, the vocabulary's size")
    order = np.argsort(-values, kind="stable")[:k]
    return [(int(index), float(values[index])) for index in order]
