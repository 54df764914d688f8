"""`Intervention.AddWhen`: a vector added where a probe of the activation is above a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from mionnx.errors import InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.spec.kinds.kind import Array, Change, Kind, Operators
from mionnx.spec.limits import Limits
from mionnx.spec.linear_readout import linear_readout


@dataclass(frozen=True)
class AddWhen(Kind):
    """Add a vector where a probe of the activation is above a threshold (a guard)."""

    name = "add_when"
    values = ("vector", "weights", "level")
    spelling = None  # a probe is no value that a command line can spell
    has_strength = True

    @classmethod
    def make(cls, vector: ArrayLike, when: tuple[Any, float], **limits: Unpack[Limits]) -> Change:
        """Add `vector` at each token whose activation a linear probe finds above a threshold.

        Args:
            vector: numbers, such as [hidden] in the residual stream.
            when: the probe and the threshold. The probe is one of scikit-learn, a fit of `mionnx.probe`
                (`result.fits[hook]`), a direction, or weights [width] with an intercept; the threshold is a
                probability of the second class for classifiers, and else a value, of a direction the projection on it.
            positions, heads, rows, experts, neurons: limits; everywhere if none is given.

        Raises:
            InterventionError: NaN or infinity, a probe of several classes, or a threshold that is no probability.

        Example:
            Intervention.AddWhen(-4.0 * direction, when=(refusal_probe, 0.8))
        """
        if not isinstance(when, tuple) or len(when) != 2 or not isinstance(when[1], int | float | np.number):
            raise InterventionError("when= is a probe and a threshold: when=(probe, 0.8)")
        probe, threshold = when
        readout = linear_readout(probe)
        level = np.float32(readout.level(float(threshold)))
        return cls().change([vector, readout.weights[0].astype(np.float32), level], **limits)

    def at(self, point: HookPoint, axes: Sequence[str], recurrent: bool) -> AddWhen:
        if axes[-1] == "seq_k":
            raise InterventionError(f"add_when at {point}: its last axis is keys, and a probe reads features")
        return self

    def nodes(self, op: Operators, x: Any, vector: Any, weights: Any, level: Any) -> Any:
        reading = op.ReduceSum(op.Mul(x, weights), [-1], keepdims=1)
        return op.Where(op.Greater(reading, level), op.Add(x, vector), x)

    def reference(self, x: Array, vector: Array, weights: Array, level: Array) -> Array:
        return np.where((x * weights).sum(-1, keepdims=True) > level, x + vector, x)
