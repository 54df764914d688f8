"""The part of the logits that a pass computes: its structure, its inputs, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from toy import IDS, VOCAB, reference, run, toy

from mionnx import HookSpec, InputError, InterventionError, Logits
from mionnx.bind.bound_spec import bind
from mionnx.inputs.token_batch import make_token_batch
from mionnx.rewrite.plan import LOGIT_COLUMNS, LOGIT_TOKENS, LOGIT_TOP_K, TOP_IDS

METADATA = toy().metadata


def computed(part: Logits, *outputs: str) -> list[np.ndarray]:
    plan = bind(HookSpec(), toy(), part.outputs(carried=False)).plan
    return run(plan, outputs, **part.feeds(make_token_batch(IDS, None, None, toy()), METADATA))


def test_every_part_is_a_part_of_the_whole():
    whole = reference()["hook_logits"]
    assert np.array_equal(computed(Logits(positions=-1), "logits")[0], whole[:, -1:])
    assert np.array_equal(computed(Logits(positions=[2, 0]), "logits")[0], whole[:, [2, 0]])
    assert np.array_equal(computed(Logits(token_ids=[4, 1]), "logits")[0], whole[..., [4, 1]])
    top, ids = computed(Logits(positions=[1], k=2), "logits", TOP_IDS)
    assert np.array_equal(top, -np.sort(-whole[:, [1]], axis=-1)[..., :2])
    assert np.array_equal(np.take_along_axis(whole[:, [1]], ids, axis=-1), top)


def test_the_structure_does_not_depend_on_which_part():
    one, other = (Logits(positions=[0, 1], token_ids=3, k=1), Logits(positions=[1, 2], token_ids=[1, 2], k=2))
    assert one.outputs(carried=True) == other.outputs(carried=True)
    assert Logits(positions=-1).outputs(carried=True) != Logits(positions=0).outputs(carried=True)


def test_positions_are_columns_of_the_batch():
    ids, mask = [[0, 1, 2], [3, 4, 1]], [[0, 1, 1], [1, 1, 1]]
    batch = make_token_batch(ids, mask, None, toy())
    feeds = Logits(positions=[0, -1], token_ids=2, k=1).feeds(batch, METADATA)
    assert feeds[LOGIT_COLUMNS].tolist() == [[1, 2], [0, 2]]
    assert feeds[LOGIT_TOKENS].tolist() == [2]
    assert feeds[LOGIT_TOP_K].tolist() == [1]


@pytest.mark.parametrize(
    ("mask", "prompts", "columns"),
    [
        ([[1, 1, 1], [1, 1, 0]], None, [2, 1]),  # padded on the right
        ([[1, 1, 1], [1, 1, 1]], [2, 3], [1, 2]),  # a prompt that ends before its text
        ([[1, 1, 1], [0, 1, 1]], None, [2, 2]),  # the last column is the last of every text
    ],
)
def test_the_last_logits_are_those_of_each_rows_own_text(mask, prompts, columns):
    """FINDINGS, part 1, defect 6; where that is the last column, the head is computed for it alone, as ever."""
    part, whole = Logits(positions=-1), reference()["hook_logits"]
    batch = make_token_batch(IDS, mask, None, toy(), prompts)
    bound = replace(bind(HookSpec(), toy(), part.outputs(carried=False)), logits=part).on(batch)
    assert bound.plan.outputs.last == (columns == [2, 2])
    assert np.array_equal(
        run(bound.plan, ["logits"], **part.feeds(batch, METADATA))[0][:, 0], whole[np.arange(2), columns]
    )


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (Logits(positions=[]), InputError, "no positions"),
        (Logits(positions=3), InterventionError, "position 3"),
        (Logits(token_ids=VOCAB), InputError, f"0 to {VOCAB - 1}"),
        (Logits(token_ids=[1, 2], k=3), InputError, "k=3 of 2"),
        (Logits(k=0), InputError, "k=0"),
    ],
)
def test_what_is_no_part_is_refused(part, error, message):
    with pytest.raises(error, match=message):
        part.feeds(make_token_batch(IDS, None, None, toy()), METADATA)
