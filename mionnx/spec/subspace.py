"""`Subspace`: a few directions of an activation, and the interventions within their span.

A basis V [k, width] has the pseudoinverse P [width, k]: c = x P are the coordinates of x in the span, and c V is the
part of x that lies in it. A method gives one `Intervention.LowRank`: two products of matrices at the hook point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InterventionError
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import Brief
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.spec.intervention import Intervention, with_limits
from mionnx.spec.limits import ExpertLimits

Numbers = NDArray[np.float64]
PARALLEL = 0.999  # cosine from which two directions cannot be swapped: the exchange would divide by next to nothing
MOST_NUMBERS = 2**28  # of a subspace: 2 GiB of float64
ORTHONORMAL = 1e-4  # of the products of the rows with each other


@typed(InterventionError)
@dataclass(frozen=True, eq=False, repr=False)
class Subspace(Brief):
    """Independent directions of an activation, and the interventions within their span.

    Attributes:
        vectors: V, [k, width], float64; one direction may be [width].
        orthonormal: True promises that the rows are orthonormal: those that are not are refused.

    Raises:
        InterventionError: NaN or infinity, another shape, directions that are zero or depend on each other, or that
            are not orthonormal where that is promised.

    Example:
        pair = Subspace([model.unembedding_for("Paris"), model.unembedding_for("Berlin")])
        model.forward(prompt, HookSpec().intervene("blocks.2.hook_resid_post", pair.swap(positions=-1)))
    """

    vectors: Numbers
    orthonormal: bool = False

    def __post_init__(self) -> None:
        vectors = np.atleast_2d(_numbers("the directions", self.vectors))
        if vectors.ndim != 2 or np.linalg.matrix_rank(vectors) < len(vectors):
            raise InterventionError(
                "a subspace has directions [k, width] that are not zero and independent of each other, got "
                f"{list(vectors.shape)}"
            )
        off = np.abs(vectors @ vectors.T - np.eye(len(vectors)))
        if self.orthonormal and off.max() > ORTHONORMAL:
            one, other = map(int, np.unravel_index(off.argmax(), off.shape))
            raise InterventionError(
                f"the basis is not orthonormal: directions {one} and {other} have the product "
                f"{vectors[one] @ vectors[other]:.6g}; Subspace(vectors) takes any independent ones"
            )
        object.__setattr__(self, "vectors", vectors)

    @staticmethod
    def random(k: int, width: int, seed: int = 0) -> Subspace:
        """An orthonormal basis of a random subspace, uniform over all of its dimension; equal seeds give equal ones."""
        if not 0 < k <= width:
            raise InterventionError(f"a random subspace of {k} dimensions; from 1 to {width} are possible")
        _check_size(k, width)
        at_least("seed", seed, 0, InterventionError)
        return Subspace(_orthonormal(np.random.default_rng(seed).normal(size=(k, width))), orthonormal=True)

    @staticmethod
    def neurons(neurons: int | Sequence[int], width: int) -> Subspace:
        """The coordinates of some neurons, counted from 0, of a hook point of some width."""
        chosen = np.atleast_1d(np.asarray(neurons))
        if chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= width:
            raise InterventionError(f"neurons are counted from 0 to {width - 1}, got {neurons!r:.60}")
        _check_size(len(chosen), width)
        vectors = np.zeros((len(chosen), width))
        vectors[np.arange(len(chosen)), chosen] = 1
        return Subspace(vectors, orthonormal=True)

    @staticmethod
    def mean_differences(activations: ArrayLike, labels: ArrayLike) -> Subspace:
        """An orthonormal basis of the differences between classes' mean activations.

        Args:
            activations: [n, width].
            labels: [n], of two classes or more; of c classes the subspace has c - 1 dimensions.
        """
        rows = _numbers("the activations", activations)
        try:
            classes = to_array(labels)
        except ValueError as error:
            raise InterventionError(f"labels are no array: {error}") from None
        try:
            names, first = np.unique(classes, return_index=True)
        except TypeError as error:
            raise InterventionError(f"labels are of several types: {error}") from None
        if rows.ndim != 2 or classes.shape != rows.shape[:1] or len(first) < 2:
            raise InterventionError(
                f"activations [n, width] and labels [n] of two classes or more, got {list(rows.shape)} and "
                f"{list(classes.shape)} of {len(first)}"
            )
        means = np.stack([rows[classes == name].mean(axis=0) for name in names])
        return Subspace(_orthonormal(Subspace(means[1:] - means[0]).vectors), orthonormal=True)

    @property
    def width(self) -> int:
        return int(self.vectors.shape[1])

    @cached_property
    def basis(self) -> Numbers:
        """Orthonormal directions of the same span, [k, width]."""
        return self.vectors if self.orthonormal else _orthonormal(self.vectors)

    @cached_property
    def inverse(self) -> Numbers:
        """P^T, [k, width]: the products with its rows are the coordinates."""
        return self.vectors if self.orthonormal else np.asarray(np.linalg.pinv(self.vectors).T, np.float64)

    def __len__(self) -> int:
        return len(self.vectors)

    def coordinates(self, activations: ArrayLike) -> Numbers:
        """[..., k] of activations [..., width]: their part in the span is `coordinates @ vectors`."""
        rows = _numbers("the activations", activations)
        if rows.shape[-1:] != (self.width,):
            raise InterventionError(f"activations {list(rows.shape)}, and the subspace's width is {self.width}")
        return rows @ self.inverse.T

    def ablate(self, **limits: Unpack[ExpertLimits]) -> Intervention:
        """Remove the subspace from the activation, as `Intervention.ProjectOut` does."""
        return Intervention.LowRank(-self.basis, self.basis, **limits)

    def steer(self, coordinates: ArrayLike, **limits: Unpack[ExpertLimits]) -> Intervention:
        """Add to the coordinates: a number for all, [k], or [positions, k]."""
        return Intervention.LowRank(np.zeros_like(self.vectors), self.vectors, coordinates, **limits)

    def clamp(self, coordinates: ArrayLike, **limits: Unpack[ExpertLimits]) -> Intervention:
        """Set the coordinates: to a number for all, to [k], or [positions, k]; what is outside the span stays."""
        return Intervention.LowRank(-self.inverse, self.vectors, coordinates, **limits)

    def swap(self, strength: float = 1.0, **limits: Unpack[ExpertLimits]) -> Intervention:
        """Exchange the coordinates of the two directions: x + strength (c_2 - c_1) (v_1 - v_2).

        Raises:
            InterventionError: not two directions, or two that are nearly parallel (a cosine of 0.999 or more).
        """
        if len(self) != 2:
            raise InterventionError(f"a swap is of two directions, and this subspace has {len(self)}")
        lengths = np.linalg.norm(self.vectors, axis=1)
        if (cosine := abs(self.vectors[0] @ self.vectors[1]) / lengths.prod()) >= PARALLEL:
            raise InterventionError(f"the two directions are nearly parallel (cosine {cosine:.5f}): nothing to swap")
        (read_1, read_2), (first, second) = self.inverse, self.vectors
        return Intervention.LowRank(read_2 - read_1, strength * (first - second), **limits)

    def interchange(self, source: ArrayLike, strength: float = 1.0, **limits: Unpack[ExpertLimits]) -> Intervention:
        """Put another run's part of the subspace in place of this run's (subspace interchange).

        x + strength (s - x) P V: at strength 1 the coordinates are the source's, and all else is the run's own.

        Args:
            source: activations of another prompt at the same hook point: [width], or [positions, width], one for each
                position that the limits choose.

        Example:
            source = model.forward(other, HookSpec().capture("resid_post", ...))["resid_post", 2][0, -1]
            subspace.interchange(source, positions=-1)
        """
        return Intervention.LowRank(-self.inverse, strength * self.vectors, self.coordinates(source), **limits)

    def placebo(
        self, base: ArrayLike, source: ArrayLike, seed: int = 0, strength: float = 1.0, **limits: Unpack[ExpertLimits]
    ) -> Intervention:
        """Move an activation as far as `interchange` does, within a random subspace of as many dimensions.

        What such a move changes is owed to its size alone: the effect of a subspace is what is beyond it.

        Args:
            base: the run's own activations where the intervention applies, [width] or [positions, width].
            source: those of the other prompt, as for `interchange`.
            seed: a number that determines the random subspace.

        Raises:
            InterventionError: base and source of other shapes, or equal outside any random subspace.
        """
        one, other = _numbers("base", base), _numbers("source", source)
        if one.shape != other.shape:
            raise InterventionError(f"base {list(one.shape)} and source {list(other.shape)} must have one shape")
        far = np.linalg.norm(self.coordinates(other - one) @ self.vectors, axis=-1, keepdims=True)
        random = Subspace.random(len(self), self.width, seed)
        move = random.coordinates(other - one) @ random.vectors
        size = np.linalg.norm(move, axis=-1, keepdims=True)
        if (size == 0).any():
            raise InterventionError("base and source are equal, so that an interchange moves nothing")
        return Intervention.Add(strength * move * (far / size), **limits)


def _check_size(k: int, width: int) -> None:
    if k * width > MOST_NUMBERS:
        raise InterventionError(f"a subspace of {k} directions of {width:,} numbers is larger than any model's")


def _orthonormal(vectors: Numbers) -> Numbers:
    return np.asarray(np.linalg.qr(vectors.T)[0].T)


def _numbers(what: str, values: Any) -> Numbers:
    try:
        array = to_array(values).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InterventionError(f"{what} are no array of numbers: {error}") from None
    if not array.size or not np.isfinite(array).all():
        raise InterventionError(f"{what} must be finite numbers, got {list(array.shape)} with NaN, infinity or nothing")
    return array


for _name in ("ablate", "steer", "clamp", "swap", "interchange", "placebo"):
    vars(vars(Subspace)[_name])["__signature__"] = with_limits(vars(Subspace)[_name])
