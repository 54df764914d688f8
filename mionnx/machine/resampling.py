"""Intervals and p-values of means over pairs of prompts, by resampling pairs; and of success rates, exactly.

1. A bootstrap interval has the percentiles of the mean over pairs drawn with replacement. One draw serves all cells of
   a result, so that cells compare. A sample of equal numbers has an interval of no width, whatever its size.
2. The p-value is that of a test by flipping signs: were effects as often above 0 as below, how often would their mean
   be as far from 0? Of 12 pairs or fewer all patterns of signs are counted, and the p-value is exact.
3. A success rate has the interval of Clopper and Pearson: none of six right is [0, 0.46], which no bootstrap tells.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.ranges import at_least, at_most

Sample = NDArray[np.float64]
EXACT = 12  # pairs up to which all patterns of signs are counted
MOST_DRAWS = 10**6
DRAWN_AT_ONCE = 2**22  # numbers of draws that are held at once
TIE = 100 * float(np.finfo(np.float64).eps)  # of the mean: sums in another order


def draws(pairs: int, resamples: int = 1000, seed: int = 0) -> NDArray[np.float64]:
    """Shares of pairs in samples drawn with replacement, [resamples, pairs]: times numbers [pairs], their means."""
    if pairs < 2:
        raise InputError(f"an interval over {pairs} pair: give several prompts, of which others could have been drawn")
    at_least("resamples", resamples, 1)
    at_most("resamples", resamples, MOST_DRAWS)
    at_least("seed", seed, 0)
    return np.random.default_rng(seed).multinomial(pairs, np.full(pairs, 1 / pairs), resamples) / pairs


def percentiles(means: Sample, confidence: float) -> tuple[Sample, Sample]:
    """The ends of the middle part of means [resamples, ...]."""
    check_confidence(confidence)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high


def bootstrap_interval(
    by_pair: Sample, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> tuple[Sample, Sample]:
    """The ends of a bootstrap interval of the mean over pairs, each of the shape of a pair's numbers."""
    check_confidence(confidence)
    flat = by_pair.reshape(len(by_pair), -1)
    low, high = percentiles(draws(len(flat), resamples, seed) @ flat, confidence)
    return low.reshape(by_pair.shape[1:]), high.reshape(by_pair.shape[1:])


def sign_flip_p_value(by_pair: Sample, resamples: int = 1000, seed: int = 0) -> Sample:
    """The p-value of a mean over pairs that differs from 0 to either side, of the shape of a pair's numbers."""
    pairs, flat = len(by_pair), by_pair.reshape(len(by_pair), -1)
    if pairs < 2:
        raise InputError(f"a p-value over {pairs} pair: give several prompts")
    at_least("resamples", resamples, 1)
    at_most("resamples", resamples, MOST_DRAWS)
    at_least("seed", seed, 0)
    far = np.abs(flat.mean(axis=0)) * (1 - TIE)
    hits, count = np.zeros(flat.shape[1]), 0
    for signs in _signs(pairs, resamples, seed):
        hits += (np.abs(signs @ flat / pairs) >= far).sum(axis=0)
        count += len(signs)
    values = hits / count if pairs <= EXACT else (hits + 1) / (count + 1)
    return np.asarray(values.reshape(by_pair.shape[1:]))


def _signs(pairs: int, resamples: int, seed: int) -> Iterator[Sample]:
    """Patterns of signs [n, pairs]: all of few pairs, of more random ones."""
    if pairs <= EXACT:
        yield np.array([*product((1.0, -1.0), repeat=pairs)])
        return
    random, most = np.random.default_rng(seed), max(1, DRAWN_AT_ONCE // pairs)
    for begin in range(0, resamples, most):
        yield random.choice(np.array([-1.0, 1.0]), (min(most, resamples - begin), pairs))


def success_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval of Clopper and Pearson of a success rate."""
    from scipy.stats import beta  # scipy takes half a second

    check_confidence(confidence)
    if not 0 <= successes <= trials or trials < 1:
        raise InputError(f"{successes} of {trials} trials have no success rate")
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, successes, trials - successes + 1)) if successes else 0.0
    high = float(beta.ppf(1 - tail, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high


def check_confidence(confidence: float) -> None:
    """Refuse what is no share between 0 and 1."""
    if not 0 < confidence < 1:
        raise InputError(f"confidence={confidence}: a share above 0 and below 1, such as 0.95")
