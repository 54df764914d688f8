"""`decompose`, `occupancy`: an activation as a sum of few directions of a dictionary.

Gurnee et al. 2026. The direction of the largest cosine with what is left is chosen, one after the other (matching
pursuit: Pati, Rezaiifar, Krishnaprasad 1993); coefficients of 0 or above are fitted to all that are chosen (nonnegative
least squares: Lawson and Hanson 1974).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import Brief
from mionnx.machine.ranges import at_least, at_most

Numbers = NDArray[np.float64]
SMALL = float(np.sqrt(np.finfo(np.float64).eps))  # share of an activation below which a coefficient counts for nothing
UNCORRELATED = float(np.sqrt(np.finfo(np.float32).eps))  # 3.5e-4 of the activation's norm: nothing more is chosen
MOST_DICTIONARIES = 10_000


@dataclass(frozen=True, eq=False, repr=False)
class SparseDecomposition(Brief):
    """An activation as a sum of few directions.

    Attributes:
        support: indices of the directions with a coefficient, [n]; token ids, of a lens' dictionary.
        coordinates: their coefficients, all above 0, [n].
        selected: indices of all that were chosen, in that order.
        reconstruction: the sum of the directions times their coefficients, [d_model].
        component: the projection of the activation onto the span of all that were chosen, [d_model].
        rest: the activation minus that, [d_model].
        share: squared norm of `component` by that of the activation.
    """

    support: list[int]
    coordinates: Numbers
    selected: list[int]
    reconstruction: Numbers
    component: Numbers
    rest: Numbers
    share: float


@dataclass(frozen=True, eq=False, repr=False)
class Occupancy(Brief):
    """An estimate of the number of directions in an activation.

    Attributes:
        occupancy: the number of directions at which those of the dictionary capture most beyond random ones.
        captured: share of the squared norm that each further direction adds, [max_atoms].
        control: the same of random directions, the mean over dictionaries, [max_atoms].
        selected: indices of the directions, in the order in which they were chosen.
    """

    occupancy: int
    captured: Numbers
    control: Numbers
    selected: list[int]


def decompose(activation: ArrayLike, atoms: ArrayLike, k: int = 25) -> SparseDecomposition:
    """Choose at most k directions [n, d_model] for an activation [d_model], and fit nonnegative coefficients."""
    from scipy.optimize import nnls  # scipy takes half a second

    target, rows, lengths = _checked(activation, atoms, k, "k")
    norm = float(np.linalg.norm(target))
    selected: list[int] = []
    coefficients, rest = np.zeros(0), target.copy()
    for _ in range(k):
        best, cosine = _best(rows, lengths, rest, selected)
        if cosine <= UNCORRELATED * norm:
            break
        selected.append(best)
        chosen = rows[selected].astype(np.float64).T
        coefficients = nnls(chosen, target, maxiter=100 * len(selected))[0]
        rest = target - chosen @ coefficients
    chosen = rows[selected].astype(np.float64).reshape(len(selected), len(target))
    counts = coefficients * np.linalg.norm(chosen, axis=1) > SMALL * norm
    component = _projection(chosen, target)
    return SparseDecomposition(
        support=[index for index, one in zip(selected, counts, strict=True) if one],
        coordinates=coefficients[counts],
        selected=selected,
        reconstruction=coefficients[counts] @ chosen[counts],
        component=component,
        rest=target - component,
        share=float(component @ component / (norm**2 or 1.0)),
    )


def occupancy(
    activation: ArrayLike, atoms: ArrayLike, max_atoms: int = 25, dictionaries: int = 32, seed: int = 0
) -> Occupancy:
    """Compare what chosen directions capture of an activation with what random ones do."""
    target, rows, lengths = _checked(activation, atoms, max_atoms, "max_atoms")
    at_least("dictionaries", dictionaries, 1)
    at_most("dictionaries", dictionaries, MOST_DICTIONARIES)
    at_least("seed", seed, 0)
    if not target.any():
        raise InputError("the activation is zero: no direction captures anything of it")
    captured, selected = _greedy(rows, lengths, target, max_atoms)
    random, runs = np.random.default_rng(seed), []
    for _ in range(dictionaries):
        other = random.standard_normal(rows.shape, np.float32)
        runs.append(_greedy(other, np.linalg.norm(other, axis=1), target, max_atoms)[0])
    control = np.mean(runs, axis=0)
    best = int(np.argmax(np.cumsum(captured) - np.cumsum(control))) + 1
    return Occupancy(best, captured, control, selected)


def _greedy(
    rows: NDArray[np.float32], lengths: NDArray[np.float32], target: Numbers, count: int
) -> tuple[Numbers, list[int]]:
    """What each further direction adds to the share of the squared norm, and the directions."""
    selected: list[int] = []
    shares, rest = [0.0], target
    for _ in range(count):
        selected.append(_best(rows, lengths, rest, selected)[0])
        part = _projection(rows[selected].astype(np.float64), target)
        shares.append(float(part @ part / (target @ target)))
        rest = target - part
    return np.diff(shares), selected


def _best(
    rows: NDArray[np.float32], lengths: NDArray[np.float32], rest: Numbers, selected: list[int]
) -> tuple[int, float]:
    """The direction of the largest product with what is left, of directions of length 1, and that product."""
    products = rows @ rest.astype(np.float32) / lengths
    products[selected] = -np.inf
    best = int(products.argmax())
    return best, float(products[best])


def _projection(rows: Numbers, target: Numbers) -> Numbers:
    """The part of a vector in the span of some directions, [n, d_model]."""
    if not len(rows):
        return np.zeros_like(target)
    left, sizes, _ = np.linalg.svd((rows / np.linalg.norm(rows, axis=1, keepdims=True)).T, full_matrices=False)
    basis = left[:, sizes > SMALL * sizes.max()]  # directions that depend on others count once
    return np.asarray(basis @ (basis.T @ target))


def _checked(
    activation: ArrayLike, atoms: ArrayLike, k: int, name: str
) -> tuple[Numbers, NDArray[np.float32], NDArray[np.float32]]:
    try:
        target, rows = to_array(activation).astype(np.float64), np.asarray(to_array(atoms), np.float32)
    except (TypeError, ValueError) as error:
        raise InputError(f"an activation and directions are numbers: {error}") from error
    if rows.ndim != 2 or target.shape != rows.shape[1:]:
        raise InputError(f"an activation [d_model] and directions [n, d_model], got {list(target.shape)} and "
                         f"{list(rows.shape)}")  # fmt: skip
    if not 1 <= k <= len(rows):
        raise InputError(f"{name}={k}; from 1 to {len(rows)}, the number of directions")
    lengths = np.linalg.norm(rows, axis=1)
    if not np.isfinite(target).all() or not np.isfinite(lengths).all():
        raise InputError("the activation or the directions have NaN or infinity")
    if not lengths.all():
        raise InputError(f"direction {int(np.argmin(lengths))} is zero")
    return target, rows, lengths
