"""What a layer adds is the distance of the stream behind it less the one before it."""

import numpy as np
import pytest

from mionnx.verify.difference import Difference, LogitDifference, layer_losses


def test_layers_add_what_lies_between_their_ends() -> None:
    lost = {"hook_embed": 0.5, "blocks.0.hook_resid_pre": 0.25, "blocks.0.hook_resid_post": 1.0}
    lost |= {"blocks.1.hook_resid_pre": 1.0, "blocks.2.hook_resid_post": 2.0, "blocks.10.hook_resid_pre": 4.0}
    assert [vars(one) for one in layer_losses({**lost, "blocks.10.hook_resid_post": 3.5})] == [
        {"layer": 0, "before": 0.25, "after": 1.0, "added": 0.75},
        {"layer": 10, "before": 4.0, "after": 3.5, "added": -0.5},
    ]


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min])
def test_a_distance_is_a_share_of_the_second_length_and_masked_scores_are_none(lowest: float) -> None:
    random = np.random.default_rng(0)
    one, other = random.normal(size=(2, 3, 7)).astype(np.float32)
    masked = np.full((3, 2), lowest, np.float32), np.full((3, 2), -np.inf, np.float32)
    found = Difference()
    found.add(*(np.concatenate(pair, axis=1) for pair in zip((one, other), masked, strict=True)))
    expected = np.linalg.norm(one.astype(np.float64) - other) / np.linalg.norm(other.astype(np.float64))
    assert found.at("x", None).lost == pytest.approx(expected, rel=1e-12)
    assert found.finite
    same = Difference()
    same.add(*masked)
    assert (same.max_abs, same.lost, same.relative) == (0.0, 0.0, 0.0)


def test_both_divergences_are_measured() -> None:
    logits = np.random.default_rng(1).normal(size=(2, 1, 4, 9))
    p, q = (np.exp(one[0]) / np.exp(one[0]).sum(-1, keepdims=True) for one in logits)
    found = LogitDifference()
    found.add(*logits)
    numbers = found.to_dict()
    for key, first, second in (("kl", p, q), ("kl_back", q, p)):
        kl = (first * np.log(first / second)).sum(-1)
        assert numbers[f"{key}_mean"] == pytest.approx(kl.mean())
        assert numbers[f"{key}_max"] == pytest.approx(kl.max())
