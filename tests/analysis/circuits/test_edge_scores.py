"""Edges in order of their scores, as a sort in plain Python has them; what is no edge has no score."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mionnx import EdgeAttribution, InputError

quick = settings(max_examples=50, deadline=None, derandomize=True)
SENDERS = ("embed", "a0.h0", "m0", "a1.h0")
RECEIVERS = ("a0.h0<q>", "m0", "a1.h0<q>", "m1", "logits")
EDGES = np.array(
    [
        [True, True, True, True, True],
        [False, True, True, True, True],
        [False, False, True, True, True],
        [False, False, False, True, True],
    ]
)


def result(scores: np.ndarray) -> EdgeAttribution:
    hooks = [("hook_embed", None), ("blocks.0.attn.hook_z", 0), ("blocks.0.hook_mlp_out", None)]
    receiving = [("blocks.0.attn.hook_q", 0), ("blocks.0.mlp.hook_pre", None), ("blocks.1.attn.hook_q", 0)]
    receiving += [("blocks.1.mlp.hook_pre", None), ("hook_logits", None)]
    return EdgeAttribution(
        np.where(EDGES, scores, 0.0),
        EDGES,
        SENDERS,
        RECEIVERS,
        (*hooks, ("blocks.1.attn.hook_z", 0)),
        tuple(receiving),
        2.0,
        -1.0,
        "logit_diff",
        "noising",
        "gradient",
        1,
        "a line",
    )


SCORES = st.lists(st.integers(-4, 4), min_size=20, max_size=20).map(lambda flat: np.array(flat, float).reshape(4, 5))


@given(SCORES, st.integers(0, 20))
@quick
def test_the_leading_edges_are_those_of_a_sort(scores: np.ndarray, k: int) -> None:
    found = result(scores)
    pairs = [(s, r) for s in range(4) for r in range(5) if EDGES[s, r]]
    ordered = sorted(pairs, key=lambda pair: -abs(scores[pair]))  # stable: equal ones in the order of the graph
    assert found.ranked().tolist() == [[*pair] for pair in ordered]
    expected = [(SENDERS[s], RECEIVERS[r], float(scores[s, r])) for s, r in ordered[:k]]
    assert found.top(k) == expected
    assert found.count == len(pairs) == 14
    for sender, receiver, score in expected:
        assert found.score(sender, receiver) == score


@pytest.mark.parametrize(
    ("sender", "receiver", "message"),
    [
        ("m0", "a0.h0<q>", "no edge from m0 to a0.h0<q>: the receiver comes before the sender"),
        ("m9", "logits", "no sender 'm9' among embed"),
        ("embed", "m9", "no receiver 'm9' among a0.h0<q>"),
    ],
)
def test_what_is_no_edge_is_refused(sender: str, receiver: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        result(np.zeros((4, 5))).score(sender, receiver)


def test_a_negative_number_of_edges_is_refused() -> None:
    with pytest.raises(InputError, match="k"):
        result(np.zeros((4, 5))).top(-1)


def test_a_saved_attribution_is_the_same(tmp_path: Path) -> None:
    found = result(np.random.default_rng(0).normal(size=(4, 5)))
    again = EdgeAttribution.load(found.save(tmp_path / "edges.safetensors"))
    assert (again.scores.tobytes(), again.edges.tolist()) == (found.scores.tobytes(), found.edges.tolist())
    assert again.top(14) == found.top(14)
    assert (again.hooks, again.receiving, again.cost) == (found.hooks, found.receiving, found.cost)


def test_the_words_say_which_run_carries_what() -> None:
    found = result(np.zeros((4, 5)))
    assert "carries the corrupted prompt's value in the clean run" in found.meaning
    found.patching, found.steps, found.rules = "denoising", 5, "relp"
    assert "carries the clean prompt's value in the corrupted run" in found.meaning
    assert found.title == "Edge attribution (EAP-IG, 5 steps, relp, denoising)"
