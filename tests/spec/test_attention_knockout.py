"""Attention knockouts: edges, positions, layers, and what is refused."""

import numpy as np
import pytest

from mionnx import InterventionError, KnockoutSpec, create_knockout_mask


class TestKnockout:
    def test_an_edge_of_one_head(self):
        mask = create_knockout_mask(KnockoutSpec().layer(2).head(1).edge(-1, 0), 3, 4)
        assert mask.shape == (1, 3, 4, 4)
        assert mask.dtype == np.float32
        assert np.argwhere(np.isneginf(mask)).tolist() == [[0, 1, 3, 0]]

    def test_to_and_from_a_position(self):
        to = np.isneginf(create_knockout_mask(KnockoutSpec().to_position(1), 1, 4))[0, 0]
        assert np.argwhere(to).tolist() == [[2, 1], [3, 1]]
        source = np.isneginf(create_knockout_mask(KnockoutSpec().from_position(2).heads([0]), 2, 4))[0]
        assert np.argwhere(source).tolist() == [[0, 2, 0], [0, 2, 1]]

    def test_layers(self):
        assert KnockoutSpec().target_layers(3) == [0, 1, 2]
        assert KnockoutSpec().layer_range(1, 2).layers([2, 4]).target_layers(5) == [1, 2, 4]
        with pytest.raises(InterventionError, match="layer 5 of a model with 5"):
            KnockoutSpec().layer(5).target_layers(5)
        with pytest.raises(InterventionError, match="empty"):
            KnockoutSpec().layer_range(2, 1)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (KnockoutSpec(), "knocks nothing out"),
            (KnockoutSpec().edge(0, 2), "later key"),
            (KnockoutSpec().edge(-1, -1).edge(4, 0), "position 4 of a sequence of 4"),
            (KnockoutSpec().head(2).edge(1, 0), "head 2 of 2"),
            (KnockoutSpec().from_position(0), "only itself"),
            (KnockoutSpec().to_position(-1), "no later position"),
        ],
    )
    def test_what_would_do_nothing_is_refused(self, spec, message):
        with pytest.raises(InterventionError, match=message):
            create_knockout_mask(spec, 2, 4)

    def test_edges_from_the_end_are_compared_where_they_lie(self):
        mask = create_knockout_mask(KnockoutSpec().edge(-1, 1).edge(3, -2), 1, 4)
        assert np.argwhere(np.isneginf(mask[0, 0])).tolist() == [[3, 1], [3, 2]]
