"""`LayerStack`: a weight of every layer as one array, of which a layer is read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from mionnx.errors import HookError, InputError

Index = Any  # what numpy takes as an index


class LayerStack(NDArrayOperatorsMixin):
    """A weight of every layer, [layer, ...], read layer by layer.

    `stack[3]` is a view of the weight file where that holds the numbers as they are; `stack[3, 1]` is head 1 of it;
    `np.asarray(stack)` and arithmetic read all layers into memory. Layers that have no such weight, or one of another
    shape, are refused when they are read together.

    Attributes:
        name: the weight's name, "W_Q".
    """

    def __init__(self, name: str, count: int, read: Callable[[int], NDArray[Any]], axes: Sequence[str]) -> None:
        self.name, self.axes = name, ("layer", *axes)
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self._read(layer) for layer in range(self._count))

    @property
    def shape(self) -> tuple[int, ...]:
        """[layer, ...]; a HookError where layers differ."""
        shapes = [array.shape for array in self]
        if len({*shapes}) > 1:
            raise HookError(f"{self.name} has other sizes in other layers, {shapes}: read one, {self.name}[0]")
        return (self._count, *shapes[0])

    @property
    def ndim(self) -> int:
        return 1 + self._read(0).ndim

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._read(0).dtype

    def __getitem__(self, index: Index) -> NDArray[Any]:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, int | np.integer) and not isinstance(first, bool):
            layer = int(first)
            if not -self._count <= layer < self._count:
                raise InputError(f"{self.name}[{layer}]: the model has layers 0 to {self._count - 1}")
            array = self._read(layer % self._count)
            return self._picked(array, tuple(rest)) if rest else array
        if isinstance(first, slice):
            return self._picked(self._stacked(range(self._count)[first]), (slice(None), *rest))
        return self._picked(np.asarray(self), index)

    def _picked(self, array: NDArray[Any], index: Index) -> NDArray[Any]:
        try:
            return array[index]
        except (IndexError, TypeError, ValueError, MemoryError) as error:  # numpy makes an array of a long range
            raise InputError(f"no index of {self.name} {list(array.shape)}: {error}") from error

    def _stacked(self, layers: Sequence[int]) -> NDArray[Any]:
        if not layers:
            return np.zeros((0, *self._read(0).shape), self.dtype)
        arrays = [self._read(layer) for layer in layers]
        if len({array.shape for array in arrays}) > 1:
            raise HookError(f"{self.name} has other sizes in other layers: read one, {self.name}[{layers[0]}]")
        return np.stack(arrays)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.name} of all layers is no array before it is read: copy=False cannot be kept")
        array = self._stacked(range(self._count))
        return array if dtype is None else array.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = [np.asarray(one) if isinstance(one, LayerStack) else one for one in inputs]
        return getattr(ufunc, method)(*arrays, **options)

    def __repr__(self) -> str:
        return f"<{self.name} [{', '.join(self.axes)}], {self._count} layers, {self.dtype}, read from the weight files>"
