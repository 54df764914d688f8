"""`LinearReadout`: the weights of a linear probe, whoever fitted it, or of a direction.

Known by what they have: scikit-learn's linear models and its pipelines of a StandardScaler and one, a `Fit` of a
`ProbeResult`, a `Direction`, an array of weights, and pairs of weights and intercepts.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InterventionError
from mionnx.machine.arrays import to_array

Numbers = NDArray[np.float64]
TRIED, AS_TOLD = 16, 1e-3  # inputs that a probe is tried on, and how closely it has to say the same


@dataclass(frozen=True, eq=False)
class LinearReadout:
    """x W^T + b, and what is made of it.

    Attributes:
        weights: [n, width], for activations as they are.
        bias: [n].
        link: "identity" (a value, a projection), "sigmoid" (the probability of the second of two classes), "softmax"
            (of each of several).
        hook: the hook point that it belongs to; empty if it does not say.
    """

    weights: Numbers
    bias: Numbers
    link: str = "identity"
    hook: str = ""

    def __post_init__(self) -> None:
        if self.weights.ndim != 2 or self.bias.shape != (len(self.weights),):
            raise InterventionError(
                f"a linear probe has weights [n, width] and intercepts [n], got {list(self.weights.shape)} and "
                f"{list(self.bias.shape)}"
            )
        if not (np.isfinite(self.weights).all() and np.isfinite(self.bias).all() and self.weights.any()):
            raise InterventionError("a linear probe has finite weights that are not all zero")

    def of(self, x: Numbers) -> Numbers:
        """The readings [tokens, n] of vectors [tokens, width]."""
        products = x @ self.weights.T + self.bias
        if self.link == "sigmoid":
            return np.asarray(1 / (1 + np.exp(-products)))
        if self.link == "softmax":
            shares = np.exp(products - products.max(axis=1, keepdims=True))
            return np.asarray(shares / shares.sum(axis=1, keepdims=True))
        return products

    def level(self, threshold: float) -> float:
        """x w above which the readout is above a threshold.

        Raises:
            InterventionError: several rows, or a probability that is none.
        """
        if len(self.weights) != 1:
            raise InterventionError(f"a guard reads one number, and this probe gives {len(self.weights)}")
        if self.link == "identity":
            return float(threshold - self.bias[0])
        if not 0 < threshold < 1:
            raise InterventionError(f"a threshold of {threshold:g}: the probe gives a probability, between 0 and 1")
        return float(np.log(threshold / (1 - threshold)) - self.bias[0])  # sigmoid(z) > t where z > log(t / (1 - t))


def linear_readout(probe: Any) -> LinearReadout:
    """Read the weights of a probe.

    Raises:
        InterventionError: nothing that is known here.
    """
    for attributes, read in _READERS.items():
        if all(hasattr(probe, name) for name in attributes):
            readout = read(probe)
            _refuse_another_link(probe, readout)
            return readout
    if isinstance(probe, tuple) and len(probe) == 2:
        weights, bias = (np.asarray(to_array(one), np.float64) for one in probe)
        return LinearReadout(np.atleast_2d(weights), np.atleast_1d(bias))
    try:
        weights = np.atleast_2d(np.asarray(to_array(probe), np.float64))
    except (TypeError, ValueError) as error:
        raise InterventionError(
            f"{type(probe).__name__} is no linear probe: give one of scikit-learn, a fit of mionnx.probe, a direction, "
            "or weights and intercept"
        ) from error
    return LinearReadout(weights, np.zeros(len(weights)))


def _pipeline(probe: Any) -> LinearReadout:
    """A scaler and a linear model: the scaler is multiplied into the weights."""
    *before, (_, last) = probe.steps
    read = linear_readout(last)
    weights, bias = read.weights, read.bias
    for name, step in reversed(before):
        if not hasattr(step, "scale_") or not hasattr(step, "mean_"):
            raise InterventionError(f"step {name!r} of the pipeline is no StandardScaler: a probe here is linear")
        weights = weights / (1.0 if step.scale_ is None else step.scale_)
        # A scaler that leaves the mean in (with_mean=False) knows it all the same.
        if step.mean_ is not None and getattr(step, "with_mean", True):
            bias = bias - weights @ step.mean_
    return LinearReadout(weights, bias, read.link)


def _refuse_another_link(probe: Any, readout: LinearReadout) -> None:
    """Refuse a model with linear weights that gives something else than their products and the link.

    Of scikit-learn's those are probabilities of SVC (Platt's), of SGDClassifier with several classes or its
    "modified_huber", votes of an SVC of several classes, and values of Poisson, gamma and Tweedie regressions.
    """
    of_values = [] if hasattr(probe, "classes_") else ["predict"]
    names = ["predict_proba"] if readout.link != "identity" else ["decision_function", *of_values]
    say = next((getattr(probe, name) for name in names if hasattr(probe, name)), None)
    if say is None or not hasattr(probe, "n_features_in_"):
        return
    # inputs at which the products are small, where a probability is neither 0 nor 1
    products = np.random.default_rng(0).normal(size=(TRIED, len(readout.weights)))
    inputs = (products - readout.bias) @ np.linalg.pinv(readout.weights).T
    ours = readout.of(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one fitted on a table wants its columns' names
        theirs = np.asarray(say(inputs), np.float64).reshape(TRIED, -1)[:, -1 if readout.link == "sigmoid" else 0 :]
    if ours.shape != theirs.shape or not np.allclose(ours, theirs, AS_TOLD, AS_TOLD):
        rule = "" if readout.link == "identity" else f"the {readout.link} of "
        raise InterventionError(
            f"{say.__name__} of this {type(probe).__name__} is not {rule}x W^T + b with its weights: fit a "
            "LogisticRegression or a Ridge, or give (coef_, intercept_) for these products themselves"
        )


def _linear(weights: Any, bias: Any, classes: bool) -> LinearReadout:
    dense = weights.toarray() if hasattr(weights, "toarray") else weights  # after `sparsify`
    rows = np.atleast_2d(np.asarray(dense, np.float64))
    rows = rows.reshape(len(rows), -1)
    link = ("sigmoid" if len(rows) == 1 else "softmax") if classes else "identity"
    return LinearReadout(rows, np.broadcast_to(np.asarray(bias, np.float64), (len(rows),)).copy(), link)


# Attributes that an object has -> the reader of it.
_READERS: dict[tuple[str, ...], Callable[[Any], LinearReadout]] = {
    ("steps", "predict"): _pipeline,
    ("coef_", "intercept_"): lambda probe: _linear(probe.coef_, probe.intercept_, hasattr(probe, "predict_proba")),
    ("weights", "intercept", "scores"): lambda fit: _linear(fit.weights, fit.intercept, "accuracy" in fit.scores),
    ("hook", "vector"): lambda one: LinearReadout(
        np.asarray(one.vector, np.float64)[None] / np.linalg.norm(one.vector), np.zeros(1), hook=str(one.hook)
    ),
}
