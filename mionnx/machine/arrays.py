"""Numbers of other libraries as numpy arrays. None of them is imported: their tensors are known by their methods."""

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, MIError
from mionnx.machine import memory

LARGE_ARRAY = 2**26  # bytes for which nobody needs to ask how much memory is left


def to_array(values: Any) -> NDArray[Any]:
    """Convert numbers, nested lists, arrays and tensors to a numpy array; what numpy cannot read is a ValueError."""
    # A torch tensor may be of any dtype, on any device, and part of a gradient's graph; so may those in a list. The
    # dtypes that numpy lacks (bfloat16, float8) become float32, which holds their numbers exactly.
    try:
        return np.asarray(_plain(values))
    except Exception as error:  # torch raises RuntimeError, NotImplementedError and TypeError
        raise ValueError(str(error).strip() or type(error).__name__) from error


def zeros(shape: Sequence[int], dtype: Any, error: type[MIError] = InputError) -> NDArray[Any]:
    """Make zeros of a shape and dtype that come from outside; more than the free memory is refused."""
    kind = read_dtype(dtype, error)
    if any(size < 0 for size in shape):
        raise error(f"sizes are 0 or above, got {list(shape)}")
    if (size := prod(shape) * kind.itemsize) > LARGE_ARRAY and size > memory.available():
        raise error(f"an array {list(shape)} of {kind} needs {memory.format_bytes(size)}, more than is free")
    return np.zeros([int(size) for size in shape], kind)


def read_dtype(dtype: Any, error: type[MIError] = InputError) -> "np.dtype[Any]":
    """A dtype of numbers by its name or class."""
    try:
        kind = None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError):
        kind = None
    if kind is None or (kind.kind not in "fiub" and kind.name not in ("bfloat16",)):
        raise error(f"dtype must be one of numbers, such as 'float32', got {dtype!a:.60}")
    return kind


def is_tensor(value: Any) -> bool:
    """Whether an object is a tensor of torch, as far as its methods show."""
    return all(callable(getattr(value, method, None)) for method in ("detach", "cpu", "numpy"))


@cache
def _is_tensors(kind: type) -> bool:
    # Not by hasattr: a class of this package answers a name that it lacks with the nearest one, which takes 0.3 ms.
    return any("detach" in vars(base) for base in kind.__mro__)


def scalar(value: Any) -> Any:
    """The number that an array or a tensor without axes holds; anything else as it is."""
    # Such arrays look like something to go through, and are nothing of the kind.
    array = type(value) is np.ndarray or _is_tensors(type(value))  # type: ignore[arg-type]  # a type has a hash
    alone = array and getattr(value, "ndim", 1) == 0 and not getattr(value, "is_meta", False)
    return to_array(value)[()] if alone else value


def _plain(value: Any) -> Any:
    if is_tensor(value):
        # numpy refuses a tensor that is part of a gradient's graph, or on another device
        tensor = value.detach().cpu()
        try:
            return tensor.numpy()
        except TypeError:  # a dtype that numpy lacks
            return tensor.float().numpy()
    if isinstance(value, list | tuple) and any(isinstance(entry, list | tuple) or is_tensor(entry) for entry in value):
        return [_plain(entry) for entry in value]
    return value
