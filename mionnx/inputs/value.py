"""Inputs and outputs of a pass: numpy arrays, or arrays on the device that computed them."""

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray


class ArrayOnDevice(Protocol):
    """An array on another device; `np.asarray` copies it to the CPU."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its numbers' dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]: ...


Value = NDArray[Any] | ArrayOnDevice
