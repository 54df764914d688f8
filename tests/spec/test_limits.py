"""Limits of an intervention: positions, heads and rows as integers, or a phase by name."""

import numpy as np
import pytest

from mionnx.errors import InterventionError
from mionnx.spec.limits import check_indices, check_positions


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), (3, (3,)), ([0, 2], (0, 2)), (np.int64(1), (1,)), (np.arange(2), (0, 1)), (range(3), (0, 1, 2))],
)
def test_indices_become_a_tuple(given, expected):
    assert check_indices("heads", given) == expected
    assert check_positions(given) == expected


def test_positions_may_count_from_the_end_differ_by_row_and_name_a_phase():
    assert check_positions(-1) == (-1,)
    assert check_positions([[0], [1, -2]]) == ((0,), (1, -2))
    assert check_positions("generated") == "generated"
    with pytest.raises(InterventionError, match="did you mean 'generated'"):
        check_positions("generatd")


@pytest.mark.parametrize("bad", [[], True, 1.5, [None], "0", [True]])
def test_what_is_no_index_is_refused(bad):
    with pytest.raises(InterventionError, match="must be one or more integers"):
        check_indices("rows", bad)


@pytest.mark.parametrize("what", ["heads", "rows"])
def test_heads_and_rows_are_counted_from_zero(what):
    with pytest.raises(InterventionError, match="counted from 0"):
        check_indices(what, [0, -1])
