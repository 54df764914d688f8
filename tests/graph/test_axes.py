"""Axes by name: sequence, heads, and shapes in words."""

import pytest

from mionnx.graph.axes import dynamic_sizes, format_shape, has_sequence, heads_axis, sequence_axis, shape_of
from mionnx.graph.hook_points import HookPoint


@pytest.mark.parametrize(
    ("point", "sequence", "heads"),
    [
        (HookPoint.ResidPost(0), 1, None),
        (HookPoint.AttnZ(0), 1, 2),
        (HookPoint.AttnQ(0), 2, 1),
        (HookPoint.AttnV(0), 2, 1),
        (HookPoint.AttnPattern(0), 2, 1),
        (HookPoint.RwkvState(0), None, 1),
    ],
)
def test_where_tokens_and_heads_stand(point, sequence, heads):
    assert has_sequence(point.axes) == (sequence is not None)
    if sequence is not None:
        assert sequence_axis(point.axes) == sequence
    assert heads_axis(point.axes) == heads


def test_shapes_of_a_pass():
    sizes = dynamic_sizes(batch=2, seq=3, total=7)
    assert shape_of(["batch", 4, "seq_q", "seq_k"], sizes) == (2, 4, 3, 7)
    assert shape_of(["batch", "seq", 64], sizes) == (2, 3, 64)
    assert format_shape(["batch", "seq", "hidden"], (1, 8, 64)) == "[batch=1, seq=8, hidden=64]"
