"""Statistics of hook points over a dataset, against numpy on the hidden states that transformers gives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mionnx import HookSpec, Intervention, Statistics, statistics_of
from mionnx.analysis.statistics import statistics
from mionnx.errors import HookError, InputError, SpecFileError
from mionnx.machine.moments import Moments

HOOK, HEADS = "blocks.1.hook_resid_pre", "blocks.0.attn.hook_v"
DRAW = np.random.default_rng(0)
TEXTS = [DRAW.integers(3, 40, length) for length in (5, 9, 3, 9, 7, 1)]


@pytest.fixture(scope="module")
def streams(references):
    """The stream before layer 1 of each text, [seq, hidden] float64, by transformers."""
    with torch.no_grad():
        outputs = [
            references("llama")(torch.from_numpy(ids[None]), output_hidden_states=True).hidden_states for ids in TEXTS
        ]
    return [states[1][0].double().numpy() for states in outputs]


def test_moments_equal_numpy_on_the_states_of_transformers(models, streams):
    found = models("llama").statistics(TEXTS, [HOOK, HEADS], covariance=True, batch_size=2)
    tokens = np.concatenate(streams)
    assert found.count(HOOK) == len(tokens) == sum(map(len, TEXTS))
    np.testing.assert_allclose(found.mean(HOOK), tokens.mean(axis=0), atol=2e-6)
    np.testing.assert_allclose(found.variance(HOOK), tokens.var(axis=0, ddof=1), rtol=1e-4)
    np.testing.assert_allclose(found.covariance(HOOK), np.cov(tokens.T), atol=2e-6)
    np.testing.assert_allclose(np.diag(found.covariance(HOOK)), found.std(HOOK) ** 2, rtol=1e-9)
    heads = models("llama").hooked.metadata.sizes
    assert found.mean(HEADS).shape == (heads.num_kv_heads, heads.head_dim)
    assert found.covariance(HEADS).shape == (heads.num_kv_heads * heads.head_dim,) * 2


def test_classes_are_positions_tokens_or_what_a_function_says(models, streams):
    model = models("llama")
    by_position = model.statistics(TEXTS, HOOK, by="position")
    assert by_position.classes(HOOK).tolist() == [*range(9)]
    assert by_position.count(HOOK).tolist() == [sum(len(ids) > at for ids in TEXTS) for at in range(9)]
    for at in (0, 4, 8):
        there = np.stack([stream[at] for stream in streams if len(stream) > at])
        np.testing.assert_allclose(by_position.mean(HOOK)[at], there.mean(axis=0), atol=2e-6)
        np.testing.assert_allclose(by_position.variance(HOOK)[at], there.var(axis=0, ddof=1), rtol=1e-3, atol=1e-9)
    tokens, ids = np.concatenate(streams), np.concatenate(TEXTS)
    by_token = model.statistics(iter(TEXTS), HOOK, by="token")
    assert by_token.classes(HOOK).tolist() == sorted({*ids.tolist()})
    means = np.stack([tokens[ids == token].mean(axis=0) for token in by_token.classes(HOOK)])
    np.testing.assert_allclose(by_token.mean(HOOK), means, atol=2e-6)
    odd = model.statistics(TEXTS, HOOK, by=lambda row: row % 2)
    np.testing.assert_allclose(odd.mean(HOOK)[1], tokens[ids % 2 == 1].mean(axis=0), atol=2e-6)
    assert np.isnan(by_token.variance(HOOK)[by_token.count(HOOK) == 1]).all()


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    classes=st.integers(1, 4),
    offset=st.sampled_from([0.0, 1e6, -1e9]),
    seed=st.integers(0, 99),
)
def test_merged_parts_are_the_whole(parts, classes, offset, seed):
    draw = np.random.default_rng(seed)
    values = [draw.normal(size=(count, 3)) + offset for count in parts]
    labels = [draw.integers(0, classes, count) for count in parts]
    whole = Moments.of(np.concatenate(values), np.concatenate(labels))
    made = Moments.of(values[0], labels[0])
    for one, label in zip(values[1:], labels[1:], strict=True):
        made = made.merged(Moments.of(one, label))
    assert (made.classes == whole.classes).all()
    assert (made.count == whole.count).all()
    np.testing.assert_allclose(made.mean, whole.mean, rtol=1e-12)
    np.testing.assert_allclose(made.squares, whole.squares, rtol=1e-5, atol=1e-5 * max(1, abs(offset) * 1e-8))
    products = Moments.of(values[0], products=True).merged(Moments.of(values[1], products=True)).products
    both = np.concatenate(values[:2])
    np.testing.assert_allclose(products, (both - both.mean(0)).T @ (both - both.mean(0)), rtol=1e-5, atol=1e-3)


def test_parts_of_a_dataset_are_merged_and_files_hold_them(models, tmp_path):
    model = models("llama")
    whole = model.statistics(TEXTS, HOOK, by="token")
    parts = [model.statistics(some, HOOK, by="token") for some in (TEXTS[:2], TEXTS[2:])]
    loaded = [Statistics.load(part.save(tmp_path / f"{n}.safetensors")) for n, part in enumerate(parts)]
    made = loaded[0].merged(loaded[1])
    assert made.texts == whole.texts == 6
    np.testing.assert_allclose(made.mean(HOOK), whole.mean(HOOK), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(made.count(HOOK), whole.count(HOOK))
    assert (loaded[0].variance(HOOK) == parts[0].variance(HOOK))[parts[0].count(HOOK) > 1].all()
    with safe_open(tmp_path / "0.safetensors", "np") as file:
        assert file.metadata()["kind"] == "Statistics"
    other = model.statistics(TEXTS[:1], HOOK)
    with pytest.raises(InputError, match="other hook points or classes"):
        whole.merged(other)
    with pytest.raises(SpecFileError):
        Statistics.load(tmp_path / "none.safetensors")


def test_harvested_activations_have_the_same_statistics(models, tmp_path):
    model = models("llama")
    made = model.harvest(TEXTS, [HOOK, HEADS], tmp_path / "made")
    for by in (None, "position", "token"):
        found, expected = statistics_of(made, by=by), model.statistics(TEXTS, [HOOK, HEADS], by=by)
        for hook in (HOOK, HEADS):
            assert (found.count(hook) == expected.count(hook)).all()
            np.testing.assert_allclose(found.mean(hook), expected.mean(hook), atol=1e-6)
            np.testing.assert_allclose(found.variance(hook), expected.variance(hook), rtol=1e-3, atol=1e-9)
    assert statistics_of(made, [HOOK], covariance=True).covariance(HOOK).shape[0] == made[HOOK].shape[1]


def test_means_take_the_place_of_activations(models, references, streams):
    """Mean ablation by position, in torch: the stream before layer 1 is replaced at the last two tokens."""
    model, ids = models("llama"), TEXTS[1]
    found = model.statistics(TEXTS, HOOK, by="position")
    spec = found.ablation(model, ids, HOOK, positions=[-1, -2])
    means = [np.mean([stream[at] for stream in streams if len(stream) > at], axis=0) for at in (7, 8)]

    def put(module, given, named):
        value = given[0].clone()
        value[0, -2:] = torch.from_numpy(np.stack(means).astype(np.float32))
        return (value, *given[1:]), named

    handle = references("llama").model.layers[1].register_forward_pre_hook(put, with_kwargs=True)
    with torch.no_grad():
        expected = references("llama")(torch.from_numpy(ids[None])).logits.numpy()
    handle.remove()
    np.testing.assert_allclose(model.forward(ids, spec).output(), expected, atol=5e-5)
    both = model.forward([ids, TEXTS[2]], found.ablation(model, [ids, TEXTS[2]])).output()
    alone = model.forward(TEXTS[2], found.ablation(model, TEXTS[2])).output()
    np.testing.assert_allclose(both[1, -3:], alone[0], atol=2e-5)
    with pytest.raises(InputError, match="position 9, of the token at 9, did not occur"):
        found.ablation(model, np.arange(10) + 3)


@pytest.mark.parametrize("hook", [HOOK, HEADS])
def test_means_stand_at_their_places_whatever_the_order_of_limits_and_the_padding(models, hook):
    model, texts = models("llama"), [TEXTS[0], TEXTS[2], TEXTS[0]]
    found = model.statistics(TEXTS, hook, by="position")
    limits = {"rows": [1, 2, 0], "positions": [[*range(5)], [0, 1, 2], [*range(5)]]}
    limits |= {"heads": [1, 0]} if hook == HEADS else {}
    backwards = {name: limit[::-1] for name, limit in limits.items()}
    backwards["positions"] = [[4, 3, 2, 1, 0], [2, 0, -2], [4, -4, 2, 3, 0]]
    whole, one, other = (found.ablation(model, texts, hook, **given) for given in ({}, limits, backwards))
    expected = model.forward(texts, whole).output()
    for spec in (one, other):
        made = model.forward(texts, spec).output()
        np.testing.assert_allclose(made[[0, 2]], expected[[0, 2]], atol=1e-6)
        np.testing.assert_allclose(made[1, -3:], expected[1, -3:], atol=1e-6)
    every = [4, 1, -3, 3, 0]  # as many as the text has tokens
    alone = model.forward(TEXTS[0], found.ablation(model, TEXTS[0], hook, positions=every)).output()
    np.testing.assert_allclose(alone[0], expected[0], atol=2e-5)
    ids, mask = np.zeros((3, 6), np.int64), np.zeros((3, 6), np.int64)
    for row, (text, first) in enumerate(zip(texts, (0, 1, 0), strict=True)):
        ids[row, first : first + len(text)], mask[row, first : first + len(text)] = text, 1
    padded = {"input_ids": ids, "attention_mask": mask}
    made = model.forward(padded, found.ablation(model, padded, hook)).output()
    np.testing.assert_allclose(made[mask > 0][:8], np.concatenate([expected[0], expected[1, -3:]]), atol=2e-5)


def test_a_spec_with_interventions_is_measured_under_them(models):
    spec = HookSpec().intervene(HOOK, Intervention.Scale(0.0))
    assert np.abs(models("llama").statistics(TEXTS, HOOK, hooks=spec).mean(HOOK)).max() == 0


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ({"texts": []}, InputError, "no texts"),
        ({"points": "blocks.0.attn.hook_pattern"}, HookError, "no value of its own for each token"),
        ({"by": "positon"}, InputError, "did you mean 'position'"),
        ({"by": "token", "covariance": True}, InputError, "leave by= out"),
        ({"by": lambda ids: ids[:1]}, InputError, "a class a token"),
        ({"hooks": HookSpec().capture(HOOK, positions=-1)}, InputError, "capture without positions"),
        ({"batch_size": 0}, InputError, "batch_size=0"),
    ],
)
def test_what_has_no_statistics_is_said(models, asked, kind, message):
    with pytest.raises(kind, match=message):
        models("llama").statistics(**{"texts": TEXTS, "points": HOOK, **asked})


def test_what_was_not_measured_is_said(models):
    found = models("llama").statistics(TEXTS, HOOK)
    with pytest.raises(InputError, match="covariance=True"):
        found.covariance(HOOK)
    with pytest.raises(HookError, match="no statistics of"):
        found.mean("blocks.0.hook_resid_pre")
    assert str(found).startswith("Statistics(1 hook point, 6 texts, 34 tokens)")


def test_rows_of_a_spec_are_those_of_all_texts(models, monkeypatch):
    """However many of them are read ahead."""
    monkeypatch.setattr(statistics, "AT_ONCE", 2)
    hooks = HookSpec().intervene(HOOK, Intervention.Zero(rows=[1]))
    plain, found = (models("llama").statistics(TEXTS, HOOK, hooks=one) for one in (None, hooks))
    alone = models("llama").statistics(TEXTS[1:2], HOOK)
    sums = [one.mean(HOOK) * one.count(HOOK) for one in (plain, alone, found)]
    np.testing.assert_allclose(sums[2], sums[0] - sums[1], atol=1e-4)
