"""`LinearNorm`: a norm as the linear map that it is at the activations of one run.

A norm is y = w (x - c mean x) / s(x) + b, with c 0 (RMSNorm) or 1 (LayerNorm) and one scale s for each position. With
s held at what the actual stream gave, it is linear in x: what a part of the stream contributes to y is
w (part - c mean part) / s. Attribution rests on that (Elhage et al., "A Mathematical Framework for Transformer
Circuits", 2021; TransformerLens' `apply_ln_to_stack`).

w, b, c and s are found by running the norm's own part of the graph, however it is written there (one node or ten, an
offset on the weight, a scale behind it):

1. b = f(0);
2. c = 1 if f(constant) = b, for then the mean is taken out;
3. w = (f(v) - b) / normalised(v), for a v so large that epsilon does not count;
4. s = <u, u> / <u, f(x) - b> with u = w (x - c mean x), by least squares, at the actual x.

Then u / s + b must be f(x). Where it is not, the part of the graph is no such norm, and an error says so.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, ModelError

Array = NDArray[np.float64]
PROBE_ENTRIES = 2.0**6  # entries of the probe: their square is so far above every epsilon that it does not count
SLACK = 1e-5  # what the linear map may differ by, relative to the largest output
COARSE = 2.0**-7  # the same in 16 bits


@dataclass(frozen=True)
class LinearNorm:
    """A norm with its scale held fixed: a linear map.

    Attributes:
        centred: whether the mean is taken out.
        scale: s, [..., 1], one for each position of the actual stream.
    """

    weight: Array
    bias: Array
    centred: bool
    scale: Array

    def apply(self, stack: NDArray[Any], weighted: bool = True) -> Array:
        """Contributions of parts of the stream to the norm's output, its bias aside.

        Args:
            stack: [component, ..., hidden], the axes between as those of the actual stream.
            weighted: with the norm's weight; without, as TransformerLens gives it.
        """
        self._check(stack)
        parts = centre(stack.astype(np.float64), self.centred) / self.scale
        return parts * self.weight if weighted else parts

    def project(self, stack: NDArray[Any], direction: Array, weighted: bool = True) -> Array:
        """The products of `apply(stack)` with a direction, without making it.

        Taking out the mean is symmetric, so that it can be done to the direction.

        Args:
            direction: [..., hidden], broadcast to the stack's positions.

        Returns:
            [component, ...].
        """
        self._check(stack)
        turned = centre(direction * self.weight if weighted else direction, self.centred) / self.scale
        return np.einsum("c...h,...h->c...", stack, turned)

    def _check(self, stack: NDArray[Any]) -> None:
        """Refuse a stack at other positions than the scale's."""
        try:
            np.broadcast_shapes(stack.shape[1:-1], self.scale.shape[:-1])
        except ValueError:
            raise InputError(
                f"the stack is {list(stack.shape)}, and the norm was read at positions of shape "
                f"{list(self.scale.shape[:-1])}: give the pos_slice that the stack was made with"
            ) from None


def centre(values: Array, centred: bool) -> Array:
    """Values [..., hidden] less their mean, if `centred`."""
    return values - values.mean(axis=-1, keepdims=True) if centred else values


def linearise(norm: Callable[[NDArray[Any]], NDArray[Any]], stream: NDArray[Any], name: str) -> LinearNorm:
    """The linear map that equals a norm at a stream.

    Args:
        norm: [n, hidden] -> [n, hidden]: the norm itself.
        stream: [..., hidden]: its actual input.
    """
    hidden = stream.shape[-1]
    probe = np.where(np.arange(hidden) % 2, -PROBE_ENTRIES, PROBE_ENTRIES)
    rows = np.concatenate([[np.zeros(hidden), np.full(hidden, PROBE_ENTRIES), probe], stream.reshape(-1, hidden)])
    outputs = norm(rows.astype(stream.dtype)).astype(np.float64)
    bias, flat, probed = outputs[:3]
    tolerance = SLACK if stream.dtype.itemsize >= 4 else COARSE
    centred = bool(np.abs(flat - bias).max() <= tolerance * np.abs(probed - bias).max())
    deviations = centre(probe, centred)
    weight = (probed - bias) / (deviations / np.sqrt((deviations**2).mean()))
    actual, gained = centre(rows[3:].astype(np.float64), centred) * weight, outputs[3:] - bias
    projected = (actual * gained).sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = (actual**2).sum(axis=-1, keepdims=True) / projected
        wrong = np.abs(actual / scale - gained).max() / np.abs(gained).max()
    if not wrong <= tolerance:
        raise ModelError(
            f"{name} is no norm that attribution knows, LayerNorm or RMSNorm: as a linear map it differs from what the "
            f"graph computes by {wrong:.1e} of its largest value"
        )
    return LinearNorm(weight, bias, centred, scale.reshape(*stream.shape[:-1], 1))
