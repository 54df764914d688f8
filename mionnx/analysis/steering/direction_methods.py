"""Formulas, in float64, for directions from pairs of activations and for how well they separate the pairs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, InterventionError, nearest
from mionnx.machine.brief import Brief

Matrix = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Separation(Brief):
    """Separation of the two sides of the pairs by each layer's direction; arrays are [layers]."""

    # The probability that a positive prompt lies further along the direction than a negative one; ties count half.
    auc: Matrix
    # The share of pairs of which this is true along the direction made from the other pairs; NaN for one pair.
    held_out: Matrix
    explained: Matrix  # the share of the pairs' squared differences that lies along the direction


def mean_difference(differences: Matrix) -> Matrix:
    """The mean of positive minus negative, [width], of differences [pairs, width]."""
    return differences.mean(axis=0)


def principal_axis(differences: Matrix) -> Matrix:
    """The axis v with the largest sum of (d . v)^2 over differences d, as long as their mean."""
    # The differences are not centred: this is the first principal component of both sides of each pair about the pair's
    # own middle (Zou et al. 2023, "Representation Engineering"; llama.cpp's cvector-generator does the same).
    # `full_matrices` would make [width, width] for one row of it.
    axis = np.linalg.svd(differences, full_matrices=False)[2][0]
    # The sign of an axis is arbitrary; the mean along it gives it the direction from negative to positive.
    return axis * (differences @ axis).mean()


METHODS = {"mean_difference": mean_difference, "pca": principal_axis}


def directions_of(positive: Matrix, negative: Matrix, method: str, layers: tuple[int, ...]) -> Matrix:
    """One direction for each layer, [layers, width], of activations [layers, pairs, width]."""
    if method not in METHODS:
        raise InputError(f"method {method!r}; one of {', '.join(METHODS)}{nearest(method, METHODS)}")
    vectors = np.stack([METHODS[method](one) for one in positive - negative])
    for layer, vector, scale in zip(layers, vectors, np.abs(positive).max(axis=(1, 2)), strict=True):
        # A difference below the rounding of float32 activations points nowhere.
        if np.linalg.norm(vector) <= 1e-6 * max(float(scale), 1e-30):
            raise InterventionError(f"layer {layer}: the positive and the negative prompts do not differ there")
    return vectors


def separation(positive: Matrix, negative: Matrix, vectors: Matrix, method: str) -> Separation:
    """Separation of activations [layers, pairs, width] of both kinds by vectors [layers, width]."""
    rows = [*zip(positive, negative, vectors, strict=True)]
    return Separation(
        np.array([_auc(plus @ vector, minus @ vector) for plus, minus, vector in rows]),
        np.array([_held_out(plus - minus, method) for plus, minus, _ in rows]),
        np.array([_explained(plus - minus, vector) for plus, minus, vector in rows]),
    )


def _auc(plus: Matrix, minus: Matrix) -> float:
    """The Mann-Whitney statistic over the number of pairs of one from each side."""
    above = plus[:, None] - minus
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


def _held_out(differences: Matrix, method: str) -> float:
    count = len(differences)
    if count < 2:
        return float("nan")
    # The pair that is judged has no part in its direction.
    others = [METHODS[method](np.delete(differences, pair, axis=0)) for pair in range(count)]
    return float(np.mean([one @ other > 0 for one, other in zip(differences, others, strict=True)]))


def _explained(differences: Matrix, vector: Matrix) -> float:
    along = differences @ (vector / np.linalg.norm(vector))
    return float((along**2).sum() / (differences**2).sum())
