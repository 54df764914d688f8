"""Linear probes of scikit-learn read as weights: what they say themselves, or refused."""

import numpy as np
import pytest

from mionnx import InterventionError
from mionnx.spec.linear_readout import linear_readout

linear, svm = pytest.importorskip("sklearn.linear_model"), pytest.importorskip("sklearn.svm")
random = np.random.default_rng(0)
X = random.normal(size=(120, 5)) + 3
TWO = (X[:, 0] + 0.5 * random.normal(size=120) > 3).astype(int)
THREE, COUNTS = np.digitize(X[:, 0], [2.5, 3.5]), random.poisson(np.exp(0.3 * X[:, 0]))


@pytest.mark.parametrize("labels", [TWO, THREE], ids=["two classes", "three"])
@pytest.mark.parametrize("scaled", [{}, {"with_mean": False}, {"with_std": False}], ids=["both", "deviation", "mean"])
def test_pipeline_of_any_scaler_gives_its_probabilities(labels, scaled):
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(**scaled), linear.LogisticRegression()).fit(X, labels)
    ours = linear_readout(probe).of(X)
    np.testing.assert_allclose(ours, probe.predict_proba(X)[:, -ours.shape[1] :], atol=1e-9)


@pytest.mark.parametrize(
    ("probe", "labels"),
    [
        (linear.Ridge(), X @ np.ones(5)),
        (linear.LinearRegression(fit_intercept=False), X @ np.ones(5)),
        (linear.RidgeClassifier(), TWO),
        (svm.LinearSVC(), THREE),
        (svm.SVC(kernel="linear"), TWO),
    ],
)
def test_values_and_decisions_are_its_own(probe, labels):
    said = getattr(probe.fit(X, labels), "decision_function", probe.predict)(X)
    np.testing.assert_allclose(linear_readout(probe).of(X), said.reshape(len(X), -1), atol=1e-9)


def test_sparse_weights_are_those_of_the_dense_ones():
    probe = linear.LogisticRegression().fit(X, TWO)
    expected = linear_readout(probe).weights
    np.testing.assert_array_equal(linear_readout(probe.sparsify()).weights, expected)


@pytest.mark.parametrize(
    ("probe", "labels", "message"),
    [
        (linear.SGDClassifier(loss="log_loss"), THREE, "predict_proba of this SGDClassifier is not the softmax of x"),
        (linear.SGDClassifier(loss="modified_huber"), TWO, "is not the sigmoid of x"),
        (svm.SVC(kernel="linear"), THREE, "decision_function of this SVC is not x W"),
        (linear.PoissonRegressor(), COUNTS, "predict of this PoissonRegressor is not x W"),
    ],
)
def test_what_makes_something_else_of_its_products_is_refused(probe, labels, message):
    with pytest.raises(InterventionError, match=message):
        linear_readout(probe.fit(X, labels))
