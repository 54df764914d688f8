"""Numbers of other libraries as numpy arrays. None of them is imported: their tensors are known by their methods."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def to_array(given: Any) -> NDArray[Any]:
    """Convert numbers, nested lists, arrays and tensors to a numpy array.

    A torch tensor may be of any dtype, on any device, and part of a gradient's graph; so may those in a list. The
    dtypes that numpy lacks (bfloat16, float8) become float32, which holds their numbers exactly.

    Raises:
        ValueError: what numpy cannot read: rows of unequal length, a tensor without data.
    """
    try:
        return np.asarray(_plain(given))
    except Exception as error:  # torch raises RuntimeError, NotImplementedError and TypeError
        raise ValueError(str(error).strip() or type(error).__name__) from error


def is_tensor(given: Any) -> bool:
    """Whether an object is a tensor of torch, as far as its methods show."""
    return all(callable(getattr(given, method, None)) for method in ("detach", "cpu", "numpy"))


def _plain(given: Any) -> Any:
    """The same without tensors."""
    if is_tensor(given):
        tensor = given.detach().cpu()
        try:
            return tensor.numpy()
        except TypeError:  # a dtype that numpy lacks
            return tensor.float().numpy()
    if isinstance(given, list | tuple) and any(isinstance(entry, list | tuple) or is_tensor(entry) for entry in given):
        return [_plain(entry) for entry in given]
    return given
