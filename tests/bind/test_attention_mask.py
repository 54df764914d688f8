"""Knockouts that leave a query without a key are refused with its address."""

import numpy as np
import pytest

from mionnx import HookPoint, HookSpec, Intervention, InterventionError, KnockoutSpec, create_knockout_mask
from mionnx.bind.knockout_mask import visible_keys
from mionnx.inputs.token_batch import TokenBatch

IDS = np.arange(3, 13)[None]


def knock_out(mask: np.ndarray, **limits) -> HookSpec:
    return HookSpec().intervene(HookPoint.AttnScores(1), Intervention.Knockout(mask, **limits))


class TestKnockedOutRows:
    """A query without any key left is refused with its address: its attention would be NaN."""

    def test_a_whole_row(self, models):
        mask = np.zeros((1, 4, 10, 10))
        mask[0, 2, 5, :] = -np.inf
        with pytest.raises(InterventionError, match=r"position 5 of row 0.*head 2"):
            models("llama").forward(IDS, knock_out(mask))

    def test_only_what_can_be_seen_counts(self, models):
        mask = np.zeros((1, 1, 10, 10))
        mask[0, 0, 3, :4] = -np.inf
        with pytest.raises(InterventionError, match=r"position 3 of row 0.*every head"):
            models("llama").forward(IDS, knock_out(mask))

    def test_two_knockouts_together(self, models):
        one, two = np.zeros((2, 1, 1, 10, 10))
        one[..., 3, :2] = two[..., 3, 2:] = -np.inf
        models("llama").forward(IDS, knock_out(one))
        with pytest.raises(InterventionError, match="position 3"):
            models("llama").forward(IDS, knock_out(one).extend(knock_out(two)))

    def test_padding_is_no_key(self, models):
        ids, attention = np.full((2, 6), 5), np.ones((2, 6), int)
        attention[1, :3] = 0
        mask = np.zeros((2, 1, 6, 6))
        mask[0, :, 4, 3:] = mask[1, :, 1, :2] = -np.inf
        with pytest.raises(InterventionError, match="position 1 of row 1"):
            models("llama").forward(ids, knock_out(mask), attention_mask=attention)
        models("llama").forward(ids, knock_out(mask, rows=0), attention_mask=attention)

    @pytest.mark.slow
    def test_the_window_is_the_limit(self, models):
        mask = np.zeros((1, 1, 10, 10))
        mask[..., 9, 2:] = -np.inf
        models("llama").forward(IDS, knock_out(mask))
        with pytest.raises(InterventionError, match="position 9"):
            models("mistral").forward(IDS, knock_out(mask))

    def test_heads_and_positions_limit_it(self, models):
        mask = np.full((1, 1, 10, 10), -np.inf)
        with pytest.raises(InterventionError, match=r"position 9 of row 0.*head 3"):
            models("llama").forward(IDS, knock_out(mask, heads=3, positions=-1))

    def test_what_is_left_is_a_distribution(self, models):
        spec = KnockoutSpec().from_position(-1).to_position(2).heads([0, 1])
        hooks = knock_out(create_knockout_mask(spec, 4, 10)).capture(HookPoint.AttnPattern(1))
        pattern = models("llama").forward(IDS, hooks)["pattern", 1][0]
        assert np.abs(pattern.sum(-1) - 1).max() < 1e-6
        assert (pattern[:2, -1, :-1] == 0).all()
        assert (pattern[:2, 3:, 2] == 0).all()
        assert (pattern[2:, 3:, 2] > 0).all()


def test_a_window_reaches_over_padding():
    """Columns of padding between the tokens of a text do not use it up."""
    ids, mask = np.zeros((1, 2), np.int64), np.array([[1, 1, 0, 0, 1, 1]])
    seen = visible_keys(TokenBatch(ids, mask, np.array([[2, 3]])), 2)
    assert seen[0].astype(int).tolist() == [[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]]
