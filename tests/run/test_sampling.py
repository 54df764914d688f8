"""The choice of the next token against transformers' logits processors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mionnx import InputError, sample_token
from mionnx.run.sampling import Sampling

VOCAB = 40


def theirs(logits: np.ndarray, text: np.ndarray, sampling: Sampling) -> np.ndarray:
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.do_sample:
        steps.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            steps.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            steps.append(TopPLogitsWarper(sampling.top_p))
    return steps(torch.from_numpy(text)[None], torch.from_numpy(logits)[None])[0].numpy()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(0, 10_000),
    st.booleans(),
    st.floats(0.05, 5),
    st.integers(0, VOCAB + 5),
    st.floats(0.01, 1),
    st.sampled_from([1.0, 0.5, 1.3, 4.0]),
    st.booleans(),
)
def test_scores_equal_transformers(seed, do_sample, temperature, top_k, top_p, penalty, ties):
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, VOCAB)
    logits = logits.round() if ties else logits
    text = random.integers(0, VOCAB, random.integers(1, 30))
    sampling = Sampling(do_sample, temperature, top_k, top_p, penalty)
    found, expected = sampling.scores(logits.copy(), text), theirs(logits.copy(), text, sampling)
    if ties and top_p < 1 and do_sample:  # which of several equal tokens the nucleus ends with is a matter of sorting
        assert sorted(found) == pytest.approx(sorted(expected))
    else:
        assert np.array_equal(np.isneginf(found), np.isneginf(expected))
        assert np.allclose(found, expected, rtol=1e-12, atol=0)


def test_tokens_come_as_often_as_their_probabilities_say():
    logits = np.random.default_rng(1).normal(0, 1, 8)
    sampling, random = Sampling(True, temperature=0.8, top_k=6), np.random.default_rng(2)
    drawn = np.bincount([sampling.choose(logits, np.array([0]), random) for _ in range(4000)], minlength=8)
    expected = softmax(sampling.scores(logits, np.array([0])))
    assert (expected == 0).sum() == 2
    assert (drawn[expected == 0] == 0).all()
    assert chisquare(drawn[expected > 0], 4000 * expected[expected > 0]).pvalue > 0.01


def test_greedy_takes_the_likeliest_and_ties_go_to_the_lowest_id():
    assert Sampling().choose(np.array([0.0, 2.0, 2.0]), np.array([0]), np.random.default_rng(0)) == 1
    assert (
        Sampling(repetition_penalty=3).choose(np.array([0.0, 2.0, 1.9]), np.array([1]), np.random.default_rng(0)) == 2
    )


class TestSampling:
    def test_ties_go_to_the_lowest_id(self):
        assert sample_token([1.0, 3.0, 3.0, 2.0]) == 1

    def test_samples_follow_the_distribution_and_the_seed(self):
        logits, temperature = np.log([0.5, 0.3, 0.2]), 1.0
        drawn = [sample_token(logits, temperature, seed) for seed in range(3000)]
        assert drawn == [sample_token(logits, temperature, seed) for seed in range(3000)]
        counts = np.bincount(drawn, minlength=3)
        assert chisquare(counts, [1500, 900, 600]).pvalue > 1e-4

    @pytest.mark.parametrize("temperature", [-1, np.nan, np.inf])
    def test_bad_temperatures(self, temperature):
        with pytest.raises(InputError, match="temperature"):
            sample_token([0.0], temperature)
