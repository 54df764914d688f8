"""Differences added up piece by piece are those of numpy, scipy and the next number of each dtype."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import entropy

from mionnx.verify import difference
from mionnx.verify.difference import Difference, LogitDifference, coarser, ulp_distance

RNG = np.random.default_rng(0)
quick = settings(max_examples=60, deadline=None, derandomize=True)
NUMBERS = st.floats(-1e3, 1e3, width=32)


def both(pairs: list[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    one, other = np.array(pairs, np.float32).T
    return np.ascontiguousarray(one), np.ascontiguousarray(other)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20))
@quick
def test_every_number_of_a_difference_is_numpys_in_float64(pairs: list[tuple[float, float]]) -> None:
    one, other = both(pairs)
    found = Difference()
    found.add(one, other)
    first, second = one.astype(np.float64), other.astype(np.float64)
    apart = np.abs(first - second)
    assert (found.count, found.finite) == (len(pairs), True)
    assert found.identical == bool((one == other).all())
    assert found.max_abs == apart.max()
    assert found.at("x", None).mean_abs == pytest.approx(apart.mean(), rel=1e-12)
    assert found.scale == np.abs(first).max()
    assert found.relative == pytest.approx(apart.max() / (np.abs(first).max() or 1), rel=1e-12)
    lengths = np.linalg.norm(first), np.linalg.norm(second)
    if lengths[1]:
        assert found.lost == pytest.approx(np.linalg.norm(first - second) / lengths[1], rel=1e-9)
    if all(lengths):
        assert found.cosine == pytest.approx(min(1.0, first @ second / np.prod(lengths)), abs=1e-9)


@given(st.integers(1, 7), st.integers(1, 6))
@quick
def test_pieces_and_prompts_add_up_to_the_whole(size: int, cuts: int) -> None:
    one, other = RNG.normal(size=(2, 40)).astype(np.float32)
    whole, parts = Difference(), Difference()
    whole.add(one, other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(difference, "ELEMENTS_AT_ONCE", size)
        for rows in zip(np.array_split(one, cuts), np.array_split(other, cuts), strict=True):
            parts.add(*rows)
    assert (parts.count, parts.max_abs, parts.max_ulp, parts.scale) == (40, whole.max_abs, whole.max_ulp, whole.scale)
    for name in ("sum_abs", "sum_ulp", "error", "dot"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("start", [0.0, -0.0, 1.0, -3.0, 2.0**-10])
def test_a_unit_in_the_last_place_is_one_step_to_the_next_number(dtype: type, start: float) -> None:
    unit = np.dtype(dtype).name
    steps = [np.array([start], dtype)]
    for _ in range(5):
        steps.append(np.nextafter(steps[-1], np.array([np.inf], dtype)))
    wide = [one.astype(np.float32) for one in steps]
    assert [float(ulp_distance(wide[0], one, unit)[0]) for one in wide] == [0, 1, 2, 3, 4, 5]
    assert float(ulp_distance(wide[5], wide[0], unit)[0]) == 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_on_one_side_is_an_infinite_difference(bad: float) -> None:
    one, other = np.array([1, 2], np.float32), np.array([1, bad], np.float32)
    found, back, same = Difference(), Difference(), Difference()
    found.add(one, other)
    back.add(other, one)
    same.add(other, other.copy())
    masked = bad == -np.inf  # below half of the least number on one side only: no masked score
    assert found.max_abs == back.max_abs == np.inf
    assert found.finite
    assert not back.finite
    assert (same.identical, same.max_abs) == (True, 0)
    assert same.finite == masked


def test_masked_scores_are_left_out_where_both_are_masked() -> None:
    least = float(np.finfo(np.float32).min)
    found = Difference()
    found.add(np.array([least, least, 3], np.float32), np.array([-np.inf, 2, 4], np.float32))
    assert (found.count, found.identical, found.scale) == (2, False, abs(least))
    with pytest.raises(ValueError, match=r"shapes \[2\] and \[3\]"):
        found.add(np.zeros(2), np.zeros(3))


def test_the_coarser_dtype_has_the_fewest_digits() -> None:
    assert coarser("float32", "float16") == coarser("float16", "float32") == "float16"
    assert coarser("float16", "bfloat16", "float32") == "bfloat16"


@pytest.mark.parametrize("vocab", [2, 7, 50])
def test_divergences_are_scipys(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "ELEMENTS_AT_ONCE", 3 * vocab)  # four pieces of ten rows
    one, other = RNG.normal(size=(2, 2, 5, vocab)).astype(np.float32)
    other[0, 0] = one[0, 0]
    found = LogitDifference()
    found.add(one, other)
    first, second = (softmax(rows.astype(np.float64).reshape(-1, vocab), axis=-1) for rows in (one, other))
    forth, back = entropy(first, second, axis=-1), entropy(second, first, axis=-1)
    top = min(5, vocab)
    best = [np.argsort(-rows, axis=-1)[:, :top] for rows in (first, second)]
    shared = np.mean([len({*a} & {*b}) / top for a, b in zip(*best, strict=True)])
    expected = {"positions": 10, "kl_mean": forth.mean(), "kl_max": forth.max(), "kl_back_mean": back.mean()}
    expected |= {"kl_back_max": back.max(), "top_1": (best[0][:, 0] == best[1][:, 0]).mean(), f"top_{top}": shared}
    assert found.to_dict() == pytest.approx(expected, rel=1e-9)


def test_a_distribution_without_a_token_is_infinitely_far_one_way() -> None:
    found = LogitDifference()
    found.add(np.array([[[0.0, 0.0]]]), np.array([[[0.0, -np.inf]]]))
    assert (found.sum_kl, found.same_first) == (np.inf, 1)


def test_equal_logits_without_a_token_are_no_divergence() -> None:
    """Tokens that a model forbids have minus infinity in both: their difference is no number."""
    found = LogitDifference()
    found.add(np.array([[[0.0, -np.inf]]]), np.array([[[0.0, -np.inf]]]))
    assert (found.sum_kl, found.max_back, found.same_first) == (0, 0, 1)
