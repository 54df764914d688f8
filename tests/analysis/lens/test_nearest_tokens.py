"""Products, cosines and the largest of them are those of numpy in float64, whatever block they are read in."""

import ml_dtypes
import numpy as np
import pytest
from mionnx.analysis.lens.nearest_tokens import cosines, largest, products

from mionnx import InputError
from mionnx.analysis.lens import nearest_tokens

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("block", [1, 7, 64])
def test_blocks_give_what_the_whole_matrix_gives(block: int, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_tokens, "BLOCK", block)
    matrix, vector = RNG.normal(size=(30, 8)).astype(dtype), RNG.normal(size=8).astype(np.float32)
    exact, wide = matrix.astype(np.float64), vector.astype(np.float64)
    assert products(matrix, vector) == pytest.approx(exact @ wide, abs=1e-12)
    lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(wide)
    assert cosines(matrix, vector) == pytest.approx(exact @ wide / lengths, abs=1e-12)


def test_a_row_of_zeros_has_no_direction_and_a_zero_query_is_refused() -> None:
    matrix = np.array([[0, 0], [3, 4], [-3, -4]], np.float32)
    assert cosines(matrix, np.array([6, 8])).tolist() == [0, 1, -1]
    with pytest.raises(InputError, match="query is zero"):
        cosines(matrix, np.zeros(2))


def test_the_largest_come_first_and_equal_ones_by_index() -> None:
    values = np.array([2.0, -1.0, 5.0, 2.0, 5.0])
    assert largest(values, 4) == [(2, 5.0), (4, 5.0), (0, 2.0), (3, 2.0)]
    assert [index for index, _ in largest(values, 5)] == sorted(range(5), key=lambda at: (-values[at], at))


@pytest.mark.parametrize("k", [0, 6, -1, 2.0])
def test_more_than_there_are_and_fewer_than_one_are_refused(k: int) -> None:
    with pytest.raises(InputError, match="from 1 to 5, the vocabulary's size"):
        largest(np.zeros(5), k)
