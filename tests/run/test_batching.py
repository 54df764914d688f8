"""Rows in batches: each row once, like lengths together, little padding, results in the order given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mionnx.errors import InputError
from mionnx.machine.progress import reported_to
from mionnx.run.batching import PER_BATCH, batches_of, check_batch_size, in_batches

LENGTHS = st.lists(st.integers(1, 3000), min_size=1, max_size=60)
SIZES = st.one_of(st.integers(1, 9), st.just("auto"))


@given(LENGTHS, SIZES, st.booleans())
def test_every_row_runs_once_among_rows_of_like_length(lengths: list[int], size: int | str, padded: bool) -> None:
    batches = [*batches_of(lengths, size, padded)]
    assert sorted(row for batch in batches for row in batch) == [*range(len(lengths))]
    ordered = [lengths[row] for batch in batches for row in batch]
    assert ordered == sorted(ordered)
    for batch in batches:
        widths = [lengths[row] for row in batch]
        assert 2 * sum(widths) >= len(batch) * max(widths)  # padding is at most half of it
        assert padded or len({*widths}) == 1
        assert len(batch) <= size if isinstance(size, int) else len(batch) * max(widths) <= max(PER_BATCH, max(widths))


def test_a_long_row_stands_alone() -> None:
    lengths = [6] * 500 + [800] + [6] * 499
    for size in (32, "auto"):
        *short, long = batches_of(lengths, size)
        assert long == [500]
        assert sum(map(len, short)) == 999


def test_memory_limits_a_batch_that_is_chosen() -> None:
    assert [len(batch) for batch in batches_of([4] * 10, "auto", fitting=lambda length: 12 // length)] == [3, 3, 3, 1]
    assert [len(batch) for batch in batches_of([4] * 3, "auto", fitting=lambda length: 0)] == [1, 1, 1]


@given(LENGTHS, st.one_of(SIZES, st.none()))
def test_results_are_in_the_order_given(lengths: list[int], size: int | str | None) -> None:
    seen: list[tuple[int, int]] = []
    with reported_to(lambda stage, done, total: seen.append((done, total))):
        made = in_batches(lengths, size, lambda rows: [(row, lengths[row]) for row in rows], stage="test")
    assert made == [*enumerate(lengths)]
    assert not seen or seen[-1] == (len(lengths), len(lengths))  # one batch is silent
    assert len(seen) != 1
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_an_error_names_the_rows_of_its_batch() -> None:
    def run(rows: list[int]) -> list[int]:
        if 2 in rows:
            raise InputError("no such thing")
        return rows

    with pytest.raises(InputError, match=r"^rows 2, 3 of 4: no such thing$"):
        in_batches([1, 1, 5, 5], 2, run, stage="test")
    with pytest.raises(InputError, match=r"^no such thing$"):
        in_batches([1, 1, 5, 5], None, run, stage="test")


@pytest.mark.parametrize("size", [0, -1, "all", True, 1.5])
def test_what_is_no_batch_size_is_refused(size: int | str) -> None:
    with pytest.raises(InputError, match="batch_size"):
        check_batch_size(size)
