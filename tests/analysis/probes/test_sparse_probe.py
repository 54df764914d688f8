"""Sparse probes against scikit-learn by hand, on activations with a known coordinate."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.preprocessing import StandardScaler

from mionnx import HookError, InputError, sparse_probe

POINTS = ["blocks.1.hook_resid_post", "blocks.2.hook_resid_post"]
COUNTRIES = (
    "France",
    "Spain",
    "Italy",
    "Germany",
    "Norway",
    "Portugal",
    "Poland",
    "Greece",
    "Japan",
    "Kenya",
    "Peru",
    "Egypt",
)
LABELS = ["Europe" if i < 8 else "other" for i in range(12)]


@pytest.fixture(scope="module")
def harvested(shipped, tmp_path_factory):
    texts = [f"The capital of {country} is" for country in COUNTRIES]
    return shipped.harvest(texts, POINTS, tmp_path_factory.mktemp("sparse") / "made", positions=-1)


def test_scores_are_scikit_learns(harvested):
    found = sparse_probe(harvested, LABELS, [1, 3], controls=1)
    assert (found.hooks, found.sizes, found.classes) == (POINTS, [1, 3], ["Europe", "other"])
    targets = np.array([label == "other" for label in LABELS]).astype(int)
    for row, point in enumerate(POINTS[1:], 1):
        values = np.asarray(harvested[point]).astype(np.float64)
        for column, size in enumerate((1, 3)):
            scores = []
            for fit, score in StratifiedGroupKFold(3, shuffle=True, random_state=0).split(
                values, targets, np.arange(12)
            ):
                means = [values[fit][targets[fit] == label].mean(0) for label in (0, 1)]
                leading = np.argsort(-np.abs(means[1] - means[0]), kind="stable")[:size]
                scaler = StandardScaler().fit(values[fit][:, leading])
                logistic = LogisticRegression(C=100, class_weight="balanced", max_iter=5000)
                logistic.fit(scaler.transform(values[fit][:, leading]), targets[fit])
                numbers = logistic.decision_function(scaler.transform(values[score][:, leading]))
                scores.append([f(targets[score], numbers) for f in (roc_auc_score, average_precision_score)])
            mean = np.mean(scores, axis=0)
            assert found.scores["auc"][row, column] == pytest.approx(mean[0])
            assert found.scores["average_precision"][row, column] == pytest.approx(mean[1])


def test_a_coordinate_that_tells_is_found_and_controls_stay_at_chance(harvested, monkeypatch, shipped, tmp_path):
    random = np.random.default_rng(0)
    targets = np.arange(40) % 2
    values = random.normal(size=(40, 128)).astype(np.float32)
    values[:, 77] += 4 * targets
    folder = tmp_path / "made"
    made = shipped.harvest([[3 + i % 90, 4 + i // 3] for i in range(40)], POINTS[0], folder, positions=-1)
    monkeypatch.setattr(type(made), "__getitem__", lambda self, key: values)
    found = sparse_probe(made, ["ab"[one] for one in targets], [1, 2], [POINTS[0]], controls=3)
    assert found.coordinates[POINTS[0]][0] == 77
    assert found.auc[0, 0] > 0.95
    assert abs(found.random["auc"][0, 0] - 0.5) < 0.2
    assert abs(found.shuffled["auc"][0, 0] - 0.5) < 0.3
    assert found.top(1)[0][0] == POINTS[0]
    assert "random" in str(found)
    assert found.to_frame().shape[0] == 2
    assert "Sparse probes" in found.page()


def test_what_cannot_be_told_apart_is_refused(harvested):
    for arguments, error, message in (
        ({"labels": ["a", "b", "c"] * 4}, InputError, "labels of 3 classes"),
        ({"sizes": [0]}, InputError, "numbers of coordinates from 1"),
        ({"sizes": []}, InputError, "numbers of coordinates"),
        ({"sizes": [200]}, InputError, r"200 coordinates of blocks\.1.*which has 128"),
        ({"points": ["hook_embed"]}, HookError, "was not harvested"),
        ({"controls": 0}, InputError, "controls must be 1"),
        ({"penalty": 0.0}, InputError, "a number above 0"),
    ):
        with pytest.raises(error, match=message):
            sparse_probe(harvested, **({"labels": LABELS} | arguments))
