"""Intervals and p-values against scipy's bootstrap, permutation test and exact interval."""

import numpy as np
import pytest
from scipy import stats

from mionnx import InputError
from mionnx.machine.resampling import bootstrap_interval, draws, sign_flip_p_value, success_interval

SAMPLE = np.random.default_rng(0).normal(0.4, 1, (20, 2, 3))


def test_an_interval_is_the_bootstraps():
    low, high = bootstrap_interval(SAMPLE, 0.9, 20_000, seed=1)
    expected = stats.bootstrap(
        (SAMPLE,), np.mean, axis=0, confidence_level=0.9, n_resamples=20_000, method="percentile", rng=0
    ).confidence_interval
    assert low.shape == high.shape == (2, 3)
    np.testing.assert_allclose(low, expected.low, atol=0.02)
    np.testing.assert_allclose(high, expected.high, atol=0.02)
    again = bootstrap_interval(SAMPLE, 0.9, 20_000, seed=1)
    np.testing.assert_array_equal(low, again[0])
    # one draw for all cells
    alone = bootstrap_interval(SAMPLE[:, 1, 2], 0.9, 20_000, seed=1)
    np.testing.assert_allclose([low[1, 2], high[1, 2]], alone, atol=1e-12)
    shares = draws(20, 1000)
    np.testing.assert_allclose(shares.sum(axis=1), 1)


@pytest.mark.parametrize("pairs", [5, 12, 20])
def test_a_p_value_is_the_tests_by_flipping_signs(pairs):
    sample = SAMPLE[:pairs]
    values = sign_flip_p_value(sample, 5000)
    count = np.inf if pairs <= 12 else 5000
    for at in np.ndindex(2, 3):
        one = stats.permutation_test(
            (sample[(slice(None), *at)],), np.mean, permutation_type="samples", n_resamples=count, rng=0
        )
        assert values[at] == pytest.approx(one.pvalue, abs=1e-12 if pairs <= 12 else 0.03)


def test_no_effect_has_a_p_value_of_one():
    np.testing.assert_array_equal(sign_flip_p_value(np.zeros((4, 2))), [1, 1])
    assert sign_flip_p_value(np.ones(6)) == 2 / 64
    low, high = bootstrap_interval(np.ones((6, 1)))
    assert (float(low[0]), float(high[0])) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize(("successes", "trials"), [(0, 6), (6, 6), (3, 10), (1, 1)])
def test_a_success_rate_has_the_exact_interval(successes, trials):
    expected = stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
    assert success_interval(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_what_has_no_interval_is_refused():
    for call, message in (
        (lambda: bootstrap_interval(SAMPLE[:1]), "an interval over 1 pair"),
        (lambda: sign_flip_p_value(SAMPLE[:1]), "a p-value over 1 pair"),
        (lambda: bootstrap_interval(SAMPLE, 1.0), "above 0 and below 1"),
        (lambda: bootstrap_interval(SAMPLE, resamples=0), "resamples must be 1"),
        (lambda: success_interval(3, 2), "no success rate"),
    ):
        with pytest.raises(InputError, match=message):
            call()
