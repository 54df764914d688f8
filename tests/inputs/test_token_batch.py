"""Token inputs: ids, masks, lengths, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from toy import toy

from mionnx import InputError
from mionnx.graph.sizes import Sizes
from mionnx.inputs.token_batch import TokenBatch, make_token_batch

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


SIZES = Sizes(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4, hidden_size=4, vocab_size=99)
MODEL = replace(toy(), metadata=replace(toy().metadata, sizes=SIZES))
MASK = np.array([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])


def call(**changes: object) -> TokenBatch:
    """Texts of 6, 4 and 3 tokens, padded on either side."""
    return replace(make_token_batch(np.full((3, 6), 7), MASK, None, MODEL), **changes)


def test_positions_are_counted_in_each_rows_own_text():
    assert [call().absolute(position, 1) for position in (0, 3, -1, -4)] == [0, 3, 3, 0]
    assert [call().columns([0, -1], row) for row in range(3)] == [[0, 5], [2, 5], [0, 2]]
    for position, row in ((4, 1), (-5, 1), (3, 2)):
        with pytest.raises(LookupError, match=f"position {position} does not exist in row {row}"):
            call().absolute(position, row)


def test_negative_positions_are_counted_from_the_end_of_the_prompt_and_not_of_the_text():
    some = call(prompt_lengths=np.array([4, 4, 1]))
    assert [some.absolute(-1, row) for row in range(3)] == [3, 3, 0]
    assert some.absolutes([-1, 5, "generated"], 0) == [3, 5, 4]
    assert [some.columns([-1], row) for row in range(3)] == [[3], [5], [0]]
    with pytest.raises(LookupError, match="position -2 does not exist in row 2"):
        some.absolute(-2, 2)


def test_a_generation_counts_from_its_prompt_at_every_step():
    first = call(prompt_lengths=np.array([6, 4, 3]), final_lengths=np.array([9, 7, 6]))
    later = first.next_step(np.array([5, 5, 5]))
    for step in (first, later):
        assert [step.absolute(-1, row) for row in range(3)] == [5, 3, 2]
        assert step.absolute(8, 0) == 8
    assert [later.columns([-1, 6], 0), later.columns("generated", 0)] == [[None, 0], [0]]


def test_it_is_known_whether_there_is_padding():
    assert call().padded
    assert call().next_step(np.array([5, 5, 5])).padded
    assert not make_token_batch([[3, 4]], None, None, MODEL).padded
