"""Indices and sizes out of their range are refused with the range."""

import numpy as np
import pytest

from mionnx.errors import InputError, ModelError
from mionnx.machine import memory
from mionnx.machine.arrays import read_dtype, zeros
from mionnx.machine.ranges import at_least, index_within


def test_an_index_counts_from_either_end():
    assert [index_within("row", index, 3) for index in (0, 2, -1, -3)] == [0, 2, 2, 0]
    for index in (3, -4):
        with pytest.raises(ModelError, match=rf"row {index} of 3 \(0 to 2"):
            index_within("row", index, 3, ModelError)


def test_a_number_below_its_least_is_refused():
    at_least("seq", 1, 1)
    for number in (0, -5, float("nan")):
        with pytest.raises(InputError, match="seq must be 1 or above"):
            at_least("seq", number, 1)


def test_zeros_of_a_size_that_memory_holds(monkeypatch):
    assert zeros((2, 3), "float16").dtype == np.float16
    with pytest.raises(InputError, match="sizes are 0 or above"):
        zeros((2, -1), "float32")
    with pytest.raises(InputError, match="TiB, more than is free"):
        zeros((10**12, 10), "float32")
    monkeypatch.setattr(memory, "available", lambda: 2**20)
    assert zeros((2**10,), "float32").size == 2**10


@pytest.mark.parametrize("given", [None, "nonsense", "\ud800", object(), [1], str, "datetime64"])
def test_what_is_no_dtype_of_numbers_is_refused(given):
    with pytest.raises(InputError, match="dtype must be one of numbers"):
        read_dtype(given)
