"""Whether two results hold the same values, whatever their classes are."""

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
from google.protobuf.message import Message

PLAIN = (str, bytes, int, float, complex, bool, type(None), np.generic, range, type, FunctionType, BuiltinFunctionType)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are of one class and equal, attribute by attribute; NaN equals NaN."""
    if hasattr(one, "__array__") and hasattr(other, "__array__"):  # an array on a device is pickled as an array
        first, second = np.asarray(one), np.asarray(other)
        return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
    if type(one) is not type(other):
        return False
    if isinstance(one, Message):
        return one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, MethodType):
        return one.__func__ is other.__func__
    if hasattr(one, "cache_info"):  # a function that remembers its results
        return alike(one.__wrapped__, other.__wrapped__)
    if isinstance(one, PLAIN) or not hasattr(one, "__dict__"):
        return one == other or one != one
    return alike(vars(one), vars(other))


def assert_same_bits(one: Any, other: Any) -> None:
    """Two results of `forward` have the same captures and outputs, bit by bit."""
    assert {*one} == {*other}
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    np.testing.assert_array_equal(one.output(), other.output())
