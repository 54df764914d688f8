"""Circuits: none of the edges is the corrupted run, all of them the clean one, and any others are what torch gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from edge_oracle import KINDS, EdgeModel, Recorded
from sweep_pairs import prompts

from mionnx.errors import GradientError, InputError

GIFT = "When Mary and John went to the store , {} gave a drink to"
CLEAN, CORRUPTED = GIFT.format("John"), GIFT.format("Mary")
FAMILIES = [*KINDS]
TOKENS = {"answer": 5, "versus": 9}


@pytest.mark.parametrize("name", FAMILIES)
def test_any_circuit_is_what_torch_gives(models, references, name):
    model, (clean, corrupted) = models(name), prompts(22)
    torch_model = EdgeModel(KINDS[name](references(name)))
    good, bad = (torch.from_numpy(ids) for ids in (clean, corrupted))
    ranking = model.edge_attribution(clean, corrupted, **TOKENS)
    random = np.random.default_rng(3)
    for scores in (ranking, replace(ranking, scores=random.normal(size=ranking.scores.shape))):
        sizes = [0, 3, 10, 25, 60, ranking.count - 1, ranking.count]
        found = model.circuit(clean, corrupted, sizes, scores=scores, **TOKENS)
        with torch.no_grad():
            whole, its = torch_model.run(bad)
            for size, value in zip(sizes, found.values, strict=True):
                kept = {(sender, receiver) for sender, receiver, _ in scores.top(size)}
                logits, _ = torch_model.run(good, its, lambda *edge, kept=kept: edge in kept)
                assert value == pytest.approx(float(logits[5] - logits[9]), abs=5e-5)
        assert found.values[0] == pytest.approx(float(whole[5] - whole[9]), abs=5e-5)
        assert found.faithfulness[[0, -1]] == pytest.approx([0, 1], abs=1e-3)
        assert len({*found.values.round(3).tolist()}) > 3  # the circuits differ


def written_outside(parts, texts, ablation, by):
    """What senders write in the place of their edges that are not kept: zeros, or means over the tokens of texts."""
    written = [EdgeModel(parts).run(torch.from_numpy(ids))[1] for ids in texts]
    places = parts.body.wpe(torch.arange(len(texts[0]))) if hasattr(parts.body, "wpe") else 0

    def put(values):  # [..., seq, width] of each text
        mean = torch.stack(values).mean(0) * (ablation == "mean")
        return mean if by == "position" else mean.mean(-2, keepdim=True).expand_as(mean)

    embed = put([one.embed - places for one in written]) + places
    layers = range(len(written[0].z))
    z, mlp = ([put([getattr(one, what)[layer] for one in written]) for layer in layers] for what in ("z", "mlp"))
    return Recorded(embed, z, mlp)


def led_on(edges, group):
    """The edges whose sender is the embedding, or reads something that leads on from it."""
    while True:
        read = {receiver.partition("<")[0] for _, receiver in edges}
        for name in [*read]:
            layer, kind, number = name.partition(".kv")
            read |= {f"{layer}.h{int(number) * group + one}" for one in range(group)} if kind else set()
        left = {(sender, receiver) for sender, receiver in edges if sender in {"embed", *read}}
        if left == edges:
            return left
        edges = left


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("ablation", "by"), [("zero", None), ("mean", None), ("mean", "position")])
def test_an_ablated_circuit_is_what_torch_gives(models, references, name, ablation, by):
    model, (clean, corrupted) = models(name), prompts(22)
    texts = np.stack([clean, corrupted, prompts(5)[0]])
    torch_model, good = EdgeModel(KINDS[name](references(name))), torch.from_numpy(clean)
    given = {"ablation": ablation, **({"by": by, "reference": texts} if ablation == "mean" else {})}
    ranking = model.edge_attribution(clean, corrupted, **TOKENS)
    sizes = [0, 10, 60, ranking.count]
    found = model.circuit(clean, corrupted, sizes, scores=ranking, **given, **TOKENS)
    with torch.no_grad():
        put = written_outside(torch_model.parts, texts, ablation, by)
        for size, value in zip(sizes, found.values, strict=True):
            leading = {(sender, receiver) for sender, receiver, _ in ranking.top(size)}
            kept = led_on(leading, model.num_heads // model.num_kv_heads)
            logits, _ = torch_model.run(good, put, lambda *edge, kept=kept: edge in kept)
            assert value == pytest.approx(float(logits[5] - logits[9]), abs=5e-5)
    assert found.values[[0, -1]] == pytest.approx([found.corrupted, found.clean], abs=5e-5)
    patched = model.circuit(clean, corrupted, sizes, scores=ranking, **TOKENS)
    assert np.abs(found.values[:-1] - patched.values[:-1]).max() > 1e-3


def test_means_are_of_the_clean_prompts_unless_others_are_named(shipped):
    clean, corrupted = ["The capital of France is", CLEAN], ["The capital of Germany is", CORRUPTED]
    given = {"edges": [40, 80], "steps": 2, "ablation": "mean"}
    own = shipped.circuit(clean, corrupted, **given)
    named = shipped.circuit(clean, corrupted, reference=clean, **given)
    np.testing.assert_allclose(own.by_pair, named.by_pair, atol=1e-5)
    other = shipped.circuit(clean, corrupted, reference=corrupted, **given)
    assert np.abs(own.by_pair - other.by_pair).max() > 1e-2
    assert "mean over tokens" in own.meaning
    for message, wrong in {
        "no use for it": {"ablation": "zero", "reference": clean},
        "did you mean": {"ablation": "means"},
        "in none of the reference prompts": {"ablation": "mean", "by": "token", "reference": "Berlin"},
    }.items():
        with pytest.raises(InputError, match=message):
            shipped.circuit(clean, corrupted, 40, **wrong)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_circuit_of_single_heads_keys_is_what_torch_gives(models, references, name):
    model, (clean, corrupted) = models(name), prompts(22)
    torch_model = EdgeModel(KINDS[name](references(name)), ungrouped=True)
    good, bad = (torch.from_numpy(ids) for ids in (clean, corrupted))
    ranking = model.edge_attribution(clean, corrupted, ungrouped=True, **TOKENS)
    sizes = [0, 10, 40, 100, ranking.count]
    found = model.circuit(clean, corrupted, sizes, scores=ranking, **TOKENS)
    with torch.no_grad():
        its = torch_model.run(bad)[1]
        for size, value in zip(sizes, found.values, strict=True):
            kept = {(sender, receiver) for sender, receiver, _ in ranking.top(size)}
            logits, _ = torch_model.run(good, its, lambda *edge, kept=kept: edge in kept)
            assert value == pytest.approx(float(logits[5] - logits[9]), abs=5e-5)


@pytest.mark.parametrize("name", ["world", *FAMILIES])
def test_all_edges_but_one_are_path_patching_of_that_one(models, shipped, name):
    """A receiver that reads one sender's corrupted value, everything else as it is."""
    if name == "world":
        model, clean, corrupted, tokens = shipped, CLEAN, CORRUPTED, {"answer": "Mary", "versus": "John"}
    else:
        model, (clean, corrupted), tokens = models(name), prompts(23), TOKENS
    ranking = model.edge_attribution(clean, corrupted, **tokens)
    for sender, receiver in (("a0.h1", "m1"), ("a0.h2", "a1.h3<q>"), ("a1.h0", "logits")):
        if receiver not in ranking.receivers:  # a model of attention alone
            assert name == "hooked_transformer"
            continue
        at = ranking.senders.index(sender), ranking.receivers.index(receiver)
        scores = np.ones(ranking.scores.shape)
        scores[at] = 0
        found = model.circuit(clean, corrupted, ranking.count - 1, scores=replace(ranking, scores=scores), **tokens)
        (hook, head), (read, own) = ranking.hooks[at[0]], ranking.receiving[at[1]]
        receivers = [read if own is None else (read, own)]
        exact = model.path_patch(clean, corrupted, receivers, hook, patching="noising", layers=None, **tokens)
        assert found.values[0] == pytest.approx(float(exact.values[0, head]), abs=5e-5)


def test_no_edge_is_the_corrupted_run_and_all_are_the_clean_one(shipped):
    for metric in ("logit_diff", "probability", "kl", "rank"):
        scores = shipped.edge_attribution(CLEAN, CORRUPTED, answer="Mary", versus="John")
        found = shipped.circuit(CLEAN, CORRUPTED, [0, 300, 1055], metric, scores=scores)
        assert found.values[[0, -1]] == pytest.approx([found.corrupted, found.clean], abs=5e-5)
    with pytest.raises(InputError, match="nothing to be faithful to"):
        replace(found, clean=found.corrupted).faithfulness  # noqa: B018


def test_the_names_task_is_kept_by_a_small_circuit(shipped):
    found = shipped.circuit(CLEAN, CORRUPTED)
    assert found.sizes.tolist() == [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1055]
    assert found.attribution.steps == 5
    assert found.smallest(0.95) == 100
    assert found.smallest(1e6) is None
    assert found.leading(2) == found.attribution.top(2)
    plain = shipped.circuit(CLEAN, CORRUPTED, 50, steps=1)
    assert plain.faithfulness[0] < found.faithfulness[found.sizes == 50]


def test_pairs_are_averaged(shipped):
    clean, corrupted = ["The capital of France is", CLEAN], ["The capital of Germany is", CORRUPTED]
    both = shipped.circuit(clean, corrupted, [40, 80], steps=2)
    assert both.by_pair.shape == (2, 2)
    for number, pair in enumerate(zip(clean, corrupted, strict=True)):
        alone = shipped.circuit(*pair, [40, 80], scores=both.attribution)
        np.testing.assert_allclose(both.by_pair[number], alone.values, atol=1e-5)
    assert both.faithfulness == pytest.approx((both.values - both.corrupted) / (both.clean - both.corrupted))


def test_few_rows_at_a_time_give_the_same(shipped, monkeypatch):
    whole = shipped.circuit(CLEAN, CORRUPTED, [20, 50, 100])
    monkeypatch.setattr("mionnx.analysis.circuits.parts.CALL_TOKENS", 40)
    monkeypatch.setattr("mionnx.analysis.circuits.edge_attribution.CALL_TOKENS", 40)
    monkeypatch.setattr("mionnx.analysis.circuits.edge_attribution.WIDE", 200)
    monkeypatch.setattr("mionnx.analysis.circuits.circuit.circuits_at_once", lambda *_: 2)
    few = shipped.circuit(CLEAN, CORRUPTED, [20, 50, 100])
    np.testing.assert_allclose(few.attribution.scores, whole.attribution.scores, atol=1e-4)
    np.testing.assert_allclose(few.values, whole.values, atol=1e-4)


def test_bad_requests_are_refused_before_anything_runs(shipped, monkeypatch):
    ranking = shipped.edge_attribution(CLEAN, CORRUPTED)
    part = shipped.edge_attribution(CLEAN, CORRUPTED, "z")
    monkeypatch.setattr(type(shipped), "forward", None)
    cases = {
        "edges must be 0 or above": (InputError, {"edges": -1}),
        "1,055 or below": (InputError, {"edges": [10, 1056]}),
        "an integer": (InputError, {"edges": [2.5]}),
        "no circuit is asked for": (InputError, {"edges": []}),
        "chosen among all 37 senders": (InputError, {"scores": part}),
        "not finite": (InputError, {"scores": replace(ranking, scores=ranking.scores * np.nan)}),
        "a rank changes in steps": (GradientError, {"metric": "rank"}),
        "13 tokens, the corrupted one 14": (InputError, {"clean": CLEAN.removesuffix(" to")}),
        "the same up to": (InputError, {"corrupted": CLEAN}),
    }
    for message, (kind, given) in cases.items():
        with pytest.raises(kind, match=message):
            shipped.circuit(**({"clean": CLEAN, "corrupted": CORRUPTED} | given))


def test_a_page_draws_the_circuit_of_each_size(shipped, chromium, tmp_path):
    found = shipped.circuit(CLEAN, CORRUPTED, [0, 20, 100])
    page = chromium(found.save(tmp_path / "circuit.html"))
    assert not page.troubles
    lines = page.locator(".graph line")
    page.locator(".choices tr", has_text="20").first.click()
    assert lines.count() == 20
    page.locator(".choices tr", has_text="100").first.click()
    assert lines.count() == 100
    assert "m3" in page.locator(".graph").inner_text()


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_layers_of_a_mixer_alone_have_circuits(hybrid, family):
    """Without MLPs: a circuit without one edge is path patching of that one; all of them are the model."""
    model, (clean, corrupted) = hybrid(family), prompts(23)
    ranking = model.edge_attribution(clean, corrupted, **TOKENS)
    assert not [label for label in (*ranking.senders, *ranking.receivers) if label.startswith("m")]
    whole = model.circuit(clean, corrupted, [0, ranking.count], scores=ranking, **TOKENS)
    assert whole.values == pytest.approx([whole.corrupted, whole.clean], abs=5e-5)
    with pytest.raises(InputError, match=r"layer 0 of .* has a recurrent mixer: EAP-IG's files are of heads and MLPs"):
        ranking.to_importances("nowhere.json", model)
    with pytest.raises(InputError, match=r"mode='mlp': .* has no MLP below layer 2"):
        model.decompose_resid(clean, 2, mode="mlp")
    if "r0.h1" not in ranking.senders:  # path patching goes over heads, which these mixers have not
        return
    for receiver in ("r1", "logits"):
        scores = np.ones(ranking.scores.shape)
        scores[ranking.senders.index("r0.h1"), ranking.receivers.index(receiver)] = 0
        scores = replace(ranking, scores=scores)
        found = model.circuit(clean, corrupted, ranking.count - 1, scores=scores, **TOKENS)
        read, _ = ranking.receiving[ranking.receivers.index(receiver)]
        exact = model.path_patch(clean, corrupted, [read], "ssm.hook_z", patching="noising", **TOKENS)
        assert found.values[0] == pytest.approx(float(exact.values[0, 1]), abs=5e-5)
