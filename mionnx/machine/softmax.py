"""Softmax and its logarithm by scipy, imported by the first call: it is slow to import."""

from typing import Any

from numpy.typing import NDArray


def softmax(scores: NDArray[Any], axis: int | None = None) -> NDArray[Any]:
    """Softmax over an axis, or over all numbers; see `scipy.special.softmax`."""
    from scipy import special

    return special.softmax(scores, axis=axis)


def log_softmax(scores: NDArray[Any], axis: int | None = None) -> NDArray[Any]:
    """Logarithm of `softmax`; see `scipy.special.log_softmax`."""
    from scipy import special

    return special.log_softmax(scores, axis=axis)


def logsumexp(scores: NDArray[Any], axis: int | None = None) -> NDArray[Any]:
    """Logarithm of the sum of exponentials; see `scipy.special.logsumexp`."""
    from scipy import special

    return special.logsumexp(scores, axis=axis)
