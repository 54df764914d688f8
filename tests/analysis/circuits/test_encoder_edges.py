"""Edges, circuits and paths of encoders, normed between additions and not, beside torch with every edge apart."""

import numpy as np
import pytest
import torch
from edge_oracle import Bert, EdgeModel, EuroBert, edge_scores
from encoders import make_encoder

from exporters.transformers import export
from mionnx import InputError, MIModel

RANDOM = np.random.default_rng(0)
CLEAN = RANDOM.integers(5, 98, 8)
CORRUPTED = CLEAN.copy()
CORRUPTED[6] = CLEAN[6] // 2 + 5  # behind the place that is read
KINDS = {"eurobert": EuroBert, "bert": Bert}  # whose stream is a sum; is normed after each addition
PLACES = {"masked_lm": 3, "classes": None}


SLOW = [("eurobert", "masked_lm"), ("bert", "masked_lm")]


@pytest.fixture(
    scope="module",
    params=[("eurobert", "classes"), ("bert", "classes"), *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)],
    ids="-".join,
)
def both(request, tmp_path_factory):
    """An encoder, the oracle, and what a metric reads; tokens at a place of the text, or labels."""
    family, head = request.param
    folder, at = tmp_path_factory.mktemp("-".join(request.param)), PLACES[head]
    reference = make_encoder(family, folder / "checkpoint", head)
    export(folder / "checkpoint", folder / "hooked")
    reads = {"answer": 2, "versus": 0} | ({} if at is None else {"position": at})
    return MIModel.from_pretrained(folder / "hooked", threads=1), EdgeModel(KINDS[family](reference, at)), reads


@pytest.fixture
def texts():
    return [torch.from_numpy(ids) for ids in (CLEAN, CORRUPTED)]


@pytest.mark.slow
def test_scores_of_edges_are_those_of_autograd_where_the_metric_reads(both, texts):
    model, oracle, reads = both
    for steps in (1, 3):
        found = model.edge_attribution(CLEAN, CORRUPTED, steps=steps, **reads)
        told = edge_scores(oracle, *texts, 2, 0, steps)
        expected = np.zeros(found.scores.shape)
        for i, j in np.argwhere(found.edges):
            expected[i, j] = told[found.senders[i], found.receivers[j]]
        assert np.abs(found.scores - expected).max() <= 2e-5 * np.abs(expected).max()
        assert (expected[found.edges] != 0).mean() > 0.8
    with torch.no_grad():
        logits = oracle.run(texts[0])[0]
    assert found.clean == pytest.approx(float(logits[2] - logits[0]), abs=1e-5)


@pytest.mark.slow_beyond(1)
def test_any_circuit_is_what_torch_gives(both, texts):
    model, oracle, reads = both
    ranking = model.edge_attribution(CLEAN, CORRUPTED, **reads)
    sizes = [0, 3, 25, ranking.count]
    found = model.circuit(CLEAN, CORRUPTED, sizes, scores=ranking, **reads)
    with torch.no_grad():
        _, its = oracle.run(texts[1])
        for size, value in zip(sizes, found.values, strict=True):
            kept = {(sender, receiver) for sender, receiver, _ in ranking.top(size)}
            logits, _ = oracle.run(texts[0], its, lambda *edge, kept=kept: edge in kept)
            assert value == pytest.approx(float(logits[2] - logits[0]), abs=5e-5)


@pytest.mark.slow_beyond(1)
def test_paths_are_what_torch_gives(both, texts):
    model, oracle, reads = both
    with torch.no_grad():
        _, its = oracle.run(texts[1])
    final = model.edge_attribution(CLEAN, CORRUPTED, **reads).receiving[-1][0]
    assert final == ("blocks.1.hook_resid_post" if isinstance(oracle.parts, Bert) else "hook_final_norm")
    for receiver, label in ((final, "logits"), (("blocks.1.attn.hook_q", 1), "a1.h1<q>")):
        swept = model.path_patch(CLEAN, CORRUPTED, [receiver], patching="noising", **reads)
        for layer, head in np.ndindex(model.num_layers, model.num_heads):
            with torch.no_grad():
                logits, _ = oracle.run(texts[0], its, lambda *edge: edge != (f"a{layer}.h{head}", label))  # noqa: B023
            assert swept.values[layer, head] == pytest.approx(float(logits[2] - logits[0]), abs=2e-5)
        assert np.ptp(swept.values) > 5e-5


def test_what_is_left_of_a_normed_stream_without_its_parts_is_none(text_encoder):
    model, _ = text_encoder("classes")
    with pytest.raises(InputError, match=r"ablation='zero' of edges .* norms it between additions"):
        model.circuit("a man plays", "a woman plays", answer="good", versus="bad", ablation="zero")


def test_stacks_of_a_normed_stream_and_labels_are_no_sums_of_its_parts(text_encoder):
    model = text_encoder("classes")[0]
    with pytest.raises(InputError, match="'bert' norms it"):
        model.decompose_resid("a man plays")
    with pytest.raises(InputError, match="reads a stream as tokens"):
        model.attribute("a man plays", answer="good")
