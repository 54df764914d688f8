"""Token inputs: ids, masks, lengths, and what is refused."""

import numpy as np
import pytest

from mionnx import InputError

IDS = np.arange(3, 13)[None]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[3, 101]], "token 101 at row 0, position 1; the vocabulary is 0 to 100"),
        ([[-1, 3]], "token -1"),
        ([], "empty"),
        ([[]], "empty"),
        ([[3, 4], []], "empty"),
        ([[3.5, 4.0]], "integers"),
        (np.zeros((1, 2, 3), int), r"\[batch, seq\]"),
    ],
)
def test_tokens_that_are_none(models, tokens, message):
    with pytest.raises(InputError, match=message):
        models("llama").forward(tokens)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((1, 9)), r"\[1, 9\]"),
        (np.ones((2, 10)), r"\[2, 10\]"),
        (np.full((1, 10), 2), "1 for tokens"),
        (np.zeros((1, 10)), "all padding"),
    ],
)
def test_masks_that_do_not_fit(models, mask, message):
    with pytest.raises(InputError, match=message):
        models("llama").forward(IDS, attention_mask=mask)


def test_padding_may_hold_any_id_and_the_callers_array_stays_as_it_is(models):
    ids = np.array([[-100, -100, 5, 6, 7]])
    mask = np.array([[0, 0, 1, 1, 1]])
    found = models("llama").forward(ids, attention_mask=mask).output()
    assert ids.tolist() == [[-100, -100, 5, 6, 7]]
    assert np.abs(found[:, 2:] - models("llama").forward([5, 6, 7]).output()).max() < 5e-5


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_more_tokens_than_learned_positions(models, family):
    models(family).forward(np.full((1, 64), 5))
    with pytest.raises(InputError, match=r"65 tokens.*64"):
        models(family).forward(np.full((1, 65), 5))
