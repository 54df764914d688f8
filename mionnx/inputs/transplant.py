"""A part of a cache put in place of another."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError


def checked_like(old: NDArray[Any], value: ArrayLike, what: str) -> NDArray[Any]:
    """A value checked against the one that it replaces, in that one's dtype.

    Raises:
        InputError: another shape, or NaN.
    """
    given = np.asarray(value)
    if given.shape != old.shape:
        raise InputError(f"{what} must be {list(old.shape)}, got {list(given.shape)}")
    if np.isnan(given.astype(np.float32)).any():
        raise InputError(f"{what} must not have NaN")
    return given.astype(old.dtype)
