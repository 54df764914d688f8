"""KL over texts keeps the digits of small differences, and windows hold every token of a text."""

import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from scipy.stats import entropy

from mionnx import InputError, MIModel, ModelError
from mionnx.analysis.quantisation import matrix_loss
from mionnx.analysis.quantisation.matrix_loss import Divergence, log_probabilities
from mionnx.analysis.quantisation.windows import digest, windows

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("size", [3.0, 1e-2, 1e-3])
def test_divergence_is_scipys_however_small(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_loss, "LOGITS_AT_ONCE", 100)  # three rows at a time
    one = RNG.normal(size=(2, 5, 30)).astype(np.float32)
    other = one + (size * RNG.normal(size=one.shape)).astype(np.float32)
    found = Divergence()
    found.add(log_probabilities(one), other)
    first, second = (softmax(rows.astype(np.float64).reshape(-1, 30), axis=-1) for rows in (one, other))
    exact = entropy(first, second, axis=-1)
    assert found.positions == 10
    assert found.mean == pytest.approx(exact.mean(), rel=1e-3)
    assert found.top_1 == (first.argmax(-1) == second.argmax(-1)).mean()


def test_a_shift_of_all_logits_is_no_divergence() -> None:
    one = RNG.normal(size=(4, 30)).astype(np.float32)
    found = Divergence()
    found.add(log_probabilities(one), one + np.float32(2.0))
    assert found.mean < 1e-12
    assert found.top_1 == 1


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ModelError, match="no numbers"):
        Divergence().add(log_probabilities(np.zeros((1, 3))), np.array([[0, np.nan, 0]]))


def test_logarithms_are_scipys() -> None:
    logits = (9 * RNG.normal(size=(2, 3, 40))).astype(np.float32)
    assert np.abs(log_probabilities(logits) - log_softmax(logits.astype(np.float64), axis=-1)).max() < 5e-6


def test_windows_hold_each_token_once(shipped: MIModel) -> None:
    text = "The capital of France is Paris . " * 60
    bare = shipped.tokenizer.encode(text, add_special_tokens=False).ids
    special = shipped.tokenizer.encode(text).ids[: len(shipped.tokenizer.encode(text).ids) - len(bare)]
    cut = windows(shipped, text)
    assert len(cut) > 1
    assert max(one.size for one in cut) <= 256
    assert all(one[0, : len(special)].tolist() == special for one in cut)
    tokens = [token for one in cut for token in one[0, len(special) :].tolist()]
    assert tokens == bare[: len(tokens)]
    assert len(bare) - len(tokens) <= 1  # a single token is nothing to measure on


def test_windows_of_nothing_are_refused_and_digests_tell_cuts_apart(shipped: MIModel) -> None:
    with pytest.raises(InputError, match="no text to measure on"):
        windows(shipped, [])
    with pytest.raises(InputError, match="at least two are needed"):
        windows(shipped, "Paris")
    ids = np.arange(4)[None]
    assert digest([ids]) == digest([ids.astype(np.int32)])
    assert len({digest([ids]), digest([ids[:, :2], ids[:, 2:]]), digest([ids[:, ::-1]])}) == 3
