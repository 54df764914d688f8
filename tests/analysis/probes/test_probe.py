"""Linear probes: equal to scikit-learn on the states that transformers gives; scored on texts held out."""

import json

import numpy as np
import pytest
import torch
from command_line import mionnx, succeeded
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import mionnx as package
from mionnx import Activations, HookSpec, Intervention, ProbeResult, probe
from mionnx.errors import HookError, InputError

HOOKS = [f"blocks.{layer}.hook_resid_pre" for layer in range(2)]
DRAW = np.random.default_rng(0)
TEXTS = [DRAW.integers(3, 101, 6) for _ in range(40)]
BY_TEXT = ["low" if text[-1] < 50 else "high" for text in TEXTS]


@pytest.fixture(scope="module")
def harvest(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harvest")
    return models("llama").harvest(TEXTS, HOOKS, folder / "made")


@pytest.fixture(scope="module")
def ends(models, tmp_path_factory):
    """The last tokens alone."""
    return models("llama").harvest(TEXTS, HOOKS, tmp_path_factory.mktemp("ends") / "made", positions=-1)


@pytest.fixture(scope="module")
def streams(references):
    """The stream before each layer, [layers, texts, seq, hidden], by transformers."""
    with torch.no_grad():
        found = references("llama")(torch.from_numpy(np.stack(TEXTS)), output_hidden_states=True).hidden_states
    return [states.double().numpy() for states in found[:2]]


def test_scores_by_text_equal_scikit_learn_on_the_states_of_transformers(ends, streams):
    found = probe(ends, BY_TEXT, seed=3, penalty=2.0)
    targets, texts = np.array([label == "low" for label in BY_TEXT]), np.arange(40)
    split = [*StratifiedGroupKFold(5, shuffle=True, random_state=3).split(targets, targets, texts)]
    for layer, hook in enumerate(HOOKS):
        values = streams[layer][:, -1]
        scores = [
            make_pipeline(StandardScaler(), LogisticRegression(C=0.5, max_iter=5000))
            .fit(values[fit], targets[fit])
            .score(values[held], targets[held])
            for fit, held in split
        ]
        np.testing.assert_allclose(found.fits[hook].scores["accuracy"], scores, atol=1e-9)
    assert found.accuracy[HOOKS[0]] > 0.6 > found.baseline
    assert found.classes == ["high", "low"]


def test_values_by_token_equal_ridge(harvest, streams):
    values = [float(token % 7) for text in TEXTS for token in text]
    found = probe(harvest, values, folds=4, seed=1)
    targets, texts = np.array(values), np.repeat(np.arange(40), 6)
    states = streams[1].reshape(240, -1)
    scores = []
    for fit, held in GroupKFold(4, shuffle=True, random_state=1).split(states, targets, texts):
        model = make_pipeline(StandardScaler(), Ridge(alpha=1.0)).fit(states[fit], targets[fit])
        scores.append(model.score(states[held], targets[held]))
    np.testing.assert_allclose(found.fits[HOOKS[1]].scores["r2"], scores, atol=1e-4)
    assert found.metric == "r2"


def test_no_text_is_in_both_parts(models, tmp_path):
    """Random labels of texts, each of which is there four times: a split by rows would know them all."""
    texts = [text for text in TEXTS[:20] for _ in range(4)]
    labels = [int(label) for label in np.random.default_rng(4).integers(0, 2, 20) for _ in range(4)]
    made = models("llama").harvest(texts, HOOKS[1], tmp_path / "made")
    scores = [probe(made, labels, seed=seed).accuracy[HOOKS[1]] for seed in range(3)]
    assert np.mean(scores) < 0.7
    ends = models("llama").harvest(texts, HOOKS[1], tmp_path / "ends", positions=-1)
    assert probe(ends, labels).accuracy[HOOKS[1]] > 0.8  # the ends do not tell that texts are the same
    groups = [number for number in range(20) for _ in range(4)]
    told = probe(ends, labels, groups=groups)
    assert "80 texts in 20 groups, 80 tokens" in repr(told)  # FINDINGS, part 2, 13: it said 20 texts
    assert "groups held out" in str(told)
    assert "80 texts in 20 groups" in told.page()
    assert "80 texts, 80 tokens" in repr(probe(ends, labels))
    assert np.mean([probe(ends, labels, groups=groups, seed=seed).accuracy[HOOKS[1]] for seed in range(3)]) < 0.7


def test_a_direction_of_strength_one_raises_the_logit_by_one(models, ends):
    found = probe(ends, BY_TEXT)
    fit, direction = found.fits[HOOKS[1]], found.direction(HOOKS[1], "low")
    assert (found.direction(HOOKS[1]).vector == direction.vector).all()
    assert (found.direction(HOOKS[1], "high").vector == -direction.vector).all()
    asked = HookSpec().extend(direction.spec(2.5)).capture(HOOKS[1])
    moved = models("llama").forward(TEXTS[0], asked)[HOOKS[1]][0, -1].astype(np.float64)
    plain = models("llama").forward(TEXTS[0], HookSpec().capture(HOOKS[1]))[HOOKS[1]][0, -1].astype(np.float64)
    logits = [float(fit.weights[0] @ one + fit.intercept[0]) for one in (plain, moved)]
    assert logits[1] - logits[0] == pytest.approx(2.5, abs=1e-3)
    three = probe(ends, [str(text[-1] % 3) for text in TEXTS])
    assert three.fits[HOOKS[0]].weights.shape == (3, *fit.weights.shape[1:])
    assert 0 <= three.auc[HOOKS[0]] <= 1
    with pytest.raises(InputError, match="the classes are '0', '1', '2'"):
        three.direction(HOOKS[0])


def test_labels_may_be_left_out(ends, harvest):
    labels = [label if number % 4 else None for number, label in enumerate(BY_TEXT)]
    assert probe(ends, labels).settings["texts"] == 30
    by_token = [bool(token % 2) if at else None for text in TEXTS for at, token in enumerate(text)]
    found = probe(harvest, by_token, HOOKS[:1])
    assert found.settings["tokens"] == 200
    assert [*found.fits] == HOOKS[:1]


def test_what_the_model_knows_of_countries_grows_with_the_layers(shipped, chromium, tmp_path):
    europe = "France", "Spain", "Italy", "Germany", "Norway", "Portugal", "Poland", "Greece"
    other = "Japan", "Kenya", "Peru", "Egypt", "China", "Canada", "Chile", "Cuba"
    frames = "The capital of {} is", "Ask for the capital of {} and hear"
    texts = [frame.format(country) for country in europe + other for frame in frames]
    labels = [country in europe for country in europe + other for _ in frames]
    made = shipped.harvest(texts, ["blocks.*.hook_resid_post"], tmp_path / "made", positions=-1)
    found = probe(made, labels)
    assert found.accuracy["blocks.3.hook_resid_post"] > 0.85
    assert found.accuracy["blocks.0.hook_resid_post"] < 0.75
    page = chromium(found.save(tmp_path / "probe.html"))
    assert page.locator("table.heat td").count() == 4
    assert page.troubles == []
    assert found.save(tmp_path / "probe.png").stat().st_size > 1000
    loaded = ProbeResult.load(found.save(tmp_path / "probe.safetensors"))
    assert loaded.accuracy == found.accuracy
    vectors = [one.direction("blocks.2.hook_resid_post").vector for one in (found, loaded)]
    assert (vectors[0] == vectors[1]).all()
    (tmp_path / "labels.txt").write_text("\n".join("Europe" if label else "elsewhere" for label in labels))
    told = json.loads(succeeded("probe", tmp_path / "made", tmp_path / "labels.txt", "--json"))
    assert [row["hook"] for row in told["hooks"]] == [*found.fits]
    assert np.mean(told["hooks"][3]["accuracy"]) > 0.85
    wrong = mionnx("probe", tmp_path / "made", tmp_path / "none.txt")
    assert wrong.returncode == 1


WRONG = {
    "count": (InputError, "3 labels; the harvest has 40 texts and 240 tokens", {"labels": [1, 2, 3]}),
    "one class": (InputError, "nothing to tell apart", {"labels": ["a"] * 40}),
    "none": (InputError, "no token has a label", {"labels": [None] * 40}),
    "kinds": (InputError, "labels of several kinds", {"labels": ["a", 1] * 20}),
    "nan": (InputError, "finite numbers", {"labels": [float("nan"), 1.0] * 20}),
    "text": (InputError, "a list or an array", {"labels": "low"}),
    "hook": (HookError, "did you mean", {"points": ["blocks.0.hook_resid_prx"]}),
    "folds": (InputError, "40 labelled texts in 41 folds", {"folds": 41}),
    "one fold": (InputError, "folds", {"folds": 1}),
    "per": (InputError, "did you mean 'token'", {"per": "tokn"}),
    "other per": (InputError, "one for each of either", {"per": "token"}),
    "penalty": (InputError, "penalty=0", {"penalty": 0.0}),
    "rare": (InputError, "in the texts of one fold only", {"labels": ["a"] + ["b"] * 39}),
    "groups": (InputError, "groups= are one a text", {"groups": [1, 2]}),
    "one group": (InputError, "of one group: none can be held out", {"groups": [None] * 40}),
    "nan class": (InputError, "labels hold NaN", {"labels": [True, False, float("nan"), True] * 10}),
    "columns": (InputError, "one class or one number, got", {"labels": np.ones((40, 2)), "kind": "regression"}),
    "arrays": (InputError, "one class or one number, got", {"labels": [np.ones(2)] * 40}),
    "lists": (InputError, "one class or one number, got", {"labels": [[]] * 40}),
    "no hooks": (InputError, "points=.*: hook points that were harvested: blocks.0", {"points": []}),
    "equal": (InputError, "no variance for R2", {"labels": [float(n) for n in range(40)], "folds": 40}),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_probed_is_said(harvest, case):
    kind, message, change = WRONG[case]
    with pytest.raises(kind, match=message):
        probe(harvest, **{"labels": BY_TEXT, **change})


def test_fewer_texts_of_each_class_than_folds_are_refused(ends):
    with pytest.raises(InputError, match="each class has 20 tokens or fewer, in 40 folds"):
        probe(ends, [number % 2 for number in range(40)], folds=40)


def test_a_fold_of_one_value_has_no_share_of_the_variance(harvest):
    values = [float(number % 4) for number in range(40)]  # one a text, of six tokens
    found = probe(harvest, values, HOOKS[1:], folds=20, seed=2)
    targets, texts = np.repeat(values, 6), np.repeat(np.arange(40), 6)
    held = [score for _, score in GroupKFold(20, shuffle=True, random_state=2).split(targets, targets, texts)]
    one_value = [not np.ptp(targets[score]) for score in held]
    assert 0 < sum(one_value) < 20
    np.testing.assert_array_equal(np.isnan(found.fits[HOOKS[1]].scores["r2"]), one_value)


def test_numbers_of_which_some_are_whole_are_predicted(ends):
    values = [number if number % 2 else number + 0.5 for number in range(40)]
    assert probe(ends, values, HOOKS[:1]).r2 == probe(ends, [float(one) for one in values], HOOKS[:1]).r2


def test_classes_are_plain_values_that_a_file_holds(ends, tmp_path):
    found = probe(ends, [np.str_(label) for label in BY_TEXT], HOOKS[:1])
    assert ProbeResult.load(found.save(tmp_path / "probe.safetensors")).classes == ["high", "low"]


def test_infinite_values_are_refused_by_name(models, tmp_path):
    large = HookSpec().intervene(HOOKS[1], Intervention.Scale(1e30)).intervene(HOOKS[1], Intervention.Scale(1e30))
    made = models("llama").harvest(TEXTS, HOOKS, tmp_path / "made", positions=-1, hooks=large)
    with pytest.raises(InputError, match=f"{HOOKS[1]} has NaN or infinity at 40 of 40 labelled tokens"):
        probe(made, BY_TEXT)
    with pytest.raises(InputError, match="has NaN or infinity"):
        package.sparse_probe(made, BY_TEXT, [1], folds=2, controls=1)
    assert [*probe(made, BY_TEXT, HOOKS[:1]).fits] == HOOKS[:1]


def test_it_is_a_public_name_and_takes_a_folder_opened_again(ends):
    assert package.probe is probe
    again = Activations(ends.folder)
    assert probe(again, BY_TEXT).accuracy == probe(ends, BY_TEXT).accuracy
