"""`Prefixes`: what the first tokens of a text compute, cut out of what all of them do.

A causal model computes the same for a token whatever follows it, so that a pass of its own for the first tokens is not
needed. Which axis of which constant goes with the tokens is seen from two passes of other lengths, and tried on a
third; constants of a graph that are no such cuts are computed each time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.device import DeviceArray, put

Constants = Mapping[str, Any]
CLOSE = 1e-3  # of the largest number: other lengths round otherwise, other tokens differ by more


@dataclass(frozen=True)
class _Cut:
    """How a constant follows from that of more tokens.

    Attributes:
        factors: entries of each axis for a token; 0 of an axis that has none for it.
        inner: axes whose entries of one token lie side by side: [tokens * factor], otherwise [factor * tokens].
        growth: of integers, which are counts: what a token adds.
    """

    factors: tuple[int, ...] = ()
    inner: tuple[bool, ...] = ()
    growth: NDArray[np.int64] | None = None

    def of(self, value: NDArray[Any], length: int, end: int) -> NDArray[Any] | None:
        """The constant of the first `end` tokens, from that of `length`; None where it has other axes."""
        if self.growth is not None:
            same = value.shape == self.growth.shape
            return (value - self.growth * (length - end)).astype(value.dtype) if same else None
        if value.ndim != len(self.factors):
            return None
        for axis, (factor, inner) in enumerate(zip(self.factors, self.inner, strict=True)):
            if not factor:
                continue
            if value.shape[axis] != factor * length:
                return None
            parts = (length, factor) if inner else (factor, length)
            apart = value.reshape(*value.shape[:axis], *parts, *value.shape[axis + 1 :])
            first = apart[(slice(None),) * (axis + (not inner)) + (slice(end),)]
            value = first.reshape(*value.shape[:axis], factor * end, *value.shape[axis + 1 :])
        return np.array(value, order="C")  # a copy always: the engine frees what it is of


class Prefixes:
    """How the constants of one graph follow from those of more tokens."""

    def __init__(self, passes: Sequence[tuple[int, Constants]]) -> None:
        """See it from passes of three numbers of tokens, the most first: the third tries what two have shown."""
        (length, constants), (end, own), (less, tried) = passes
        cuts = {name: _seen(np.asarray(value), length, np.asarray(own[name]), end) for name, value in constants.items()}
        self._cuts = {name: one for name, one in cuts.items() if one is not None}
        parts = self.cut(constants, length, less) if len(self._cuts) == len(cuts) else None
        same = parts is not None and all(_close(np.asarray(part), np.asarray(tried[n])) for n, part in parts.items())
        self._cuts = self._cuts if same else {}

    def cut(self, constants: Constants, length: int, end: int) -> dict[str, Any] | None:
        """The constants of the first `end` tokens, from those of `length`; None where they have to be computed."""
        parts = {}
        for name, one in self._cuts.items():
            value = constants[name]
            part = one.of(np.asarray(value), length, end)
            if part is None:
                return None
            parts[name] = DeviceArray(put(part, value.place), value.place)
        return parts or None


def _seen(value: NDArray[Any], length: int, own: NDArray[Any], end: int) -> _Cut | None:
    """How a constant of `end` tokens follows from that of `length`; None where it does not."""
    return next((one for one in _cuts(value, length, own, end) if _same(one.of(value, length, end), own)), None)


def _cuts(value: NDArray[Any], length: int, own: NDArray[Any], end: int) -> Iterator[_Cut]:
    """Cuts that the shapes allow."""
    if value.shape == own.shape and np.issubdtype(value.dtype, np.integer):
        yield _Cut(growth=(value.astype(np.int64) - own) // (length - end))
    elif value.ndim == own.ndim:
        pairs = zip(value.shape, own.shape, strict=True)
        factors = tuple(0 if more == less else more // length for more, less in pairs)
        several = [(False, True) if factor > 1 else (False,) for factor in factors]
        yield from (_Cut(factors, inner) for inner in product(*several))


def _same(value: NDArray[Any] | None, own: NDArray[Any]) -> bool:
    return value is not None and _close(value, own)


def _close(value: NDArray[Any], own: NDArray[Any]) -> bool:
    if value.shape != own.shape or np.issubdtype(own.dtype, np.integer):
        return np.array_equal(value, own)
    return bool(np.allclose(value, own, rtol=0, atol=CLOSE * float(np.abs(own).max(initial=0))))
