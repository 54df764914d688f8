"""Narrow dtypes by their limits."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from mionnx.errors import InputError, nearest


@dataclass(frozen=True)
class Narrow:
    """A narrow dtype.

    Attributes:
        limit: the largest number that it holds.
        tiny: the smallest normal one; below it digits are lost.
        least: the smallest one above 0.
    """

    name: str
    limit: float
    tiny: float
    least: float


def _of(name: str, dtype: type) -> Narrow:
    info = ml_dtypes.finfo(dtype)
    return Narrow(name, float(info.max), float(info.smallest_normal), float(info.smallest_subnormal))


NARROW_KINDS = {one.name: one for one in (_of("float16", np.float16), _of("bfloat16", ml_dtypes.bfloat16))}


def narrow_of(dtype: str) -> Narrow:
    """The narrow dtype of a name."""
    if dtype not in NARROW_KINDS:
        raise InputError(f"dtype={dtype!r}: {' or '.join(NARROW_KINDS)}{nearest(str(dtype), NARROW_KINDS)}")
    return NARROW_KINDS[dtype]
