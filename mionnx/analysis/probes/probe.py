"""`probe`: linear probes by scikit-learn at every hook point of a harvest, scored on held-out texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.probes.labels import Labelled, read_labels
from mionnx.analysis.probes.probe_result import Fit, ProbeResult
from mionnx.errors import HookError, InputError, RuntimeMissingError, install, nearest
from mionnx.machine.progress import shown
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed

TWO = 2  # classes
SEEDS = 2**32 - 1  # the largest that scikit-learn takes
ITERATIONS = 5000  # most of a logistic regression
Scores = dict[str, float]


@typed(leave=["labels", "groups"])
def probe(
    activations: Activations,
    labels: Any,
    points: Sequence[str] | None = None,
    *,
    groups: Sequence[Any] | None = None,
    per: str | None = None,
    kind: str | None = None,
    folds: int = 5,
    penalty: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
) -> ProbeResult:
    """Fit a linear probe at each hook point, and score it on texts that it was not fitted on.

    Values are standardised; the probe is scikit-learn's LogisticRegression, or Ridge for numbers. Texts are divided
    into folds, and each fold's texts are scored by the probe that was fitted on the others: no text is in both. Equal
    texts count as one where all their tokens were harvested; elsewhere only their number tells texts apart. The
    weights in the result are fitted on all texts.

    Args:
        activations: of a folder that `harvest` wrote, `Activations("folder")`.
        labels: one a text or one a token, in the order of the harvest; None for those to be left out.
        points: the hook points; all that were harvested if left out. All numbers of a value count, heads together.
        groups: one a text, of any kind: texts of one group stay in one fold (the same country in several sentences).
        per: "text" or "token", where there are as many texts as tokens and their number does not tell.
        kind: "classification" or "regression"; by default floats are numbers to predict and all else is a class.
        folds: parts of the texts.
        penalty: of the squared weights of standardised values: 1/C of LogisticRegression, alpha of Ridge.
        seed: of the division into folds.
        progress: None for a bar in a terminal or notebook when it takes longer than two seconds, and a line a minute in
            a log; True at once, False for none.

    Raises:
        HookError: a hook point that was not harvested.
        InputError: labels of another number, one class only, or fewer texts than folds.
        RuntimeMissingError: scikit-learn is not installed (extra `probe`).

    Example:
        result = mionnx.probe(Activations("folder"), ["Europe", "Asia", ...])
        result.accuracy, model.generate(prompt, result.direction("blocks.2.hook_resid_post", "Asia").spec(4.0))
    """
    at_least("folds", folds, 2)
    at_least("seed", seed, 0)
    at_most("seed", seed, SEEDS)
    if not isinstance(activations, Activations):
        raise InputError(f"activations are an Activations, of a harvest's folder, got {type(activations).__name__}")
    if not 0 < penalty < np.inf:
        raise InputError(f"penalty={penalty!r}: a number above 0")
    names = [*activations] if points is None else [*points]
    for name in names:
        if name not in activations:
            raise HookError(f"{name!r} was not harvested{nearest(name, activations) or '; ' + ', '.join(activations)}")
    labelled = read_labels(activations, labels, per, kind, groups)
    with _scikit_learn(), shown(progress) as show:
        parts = [*_folds(labelled, folds, seed)]
        fits = {}
        for number, name in enumerate(names):
            fits[name] = _fit(np.asarray(activations[name])[labelled.tokens], labelled, parts, penalty)
            show("probes", number + 1, len(names))
    texts = np.unique(np.asarray(activations.text_index)[labelled.tokens])
    sizes = {"tokens": len(labelled.tokens), "texts": len(texts), "groups": len(np.unique(labelled.groups))}
    settings = {"folds": folds, "penalty": penalty, "seed": seed, **sizes}
    return ProbeResult(fits, labelled.classes, labelled.baseline, settings)


@contextmanager
def _scikit_learn() -> Iterator[None]:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise RuntimeMissingError(f"probes are fitted by scikit-learn: {install('probe')}") from error
    yield


def _folds(labelled: Labelled, folds: int, seed: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Tokens to fit on and tokens to score, by texts."""
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    texts = len(np.unique(labelled.groups))
    if texts < folds:
        raise InputError(f"{texts} labelled texts in {folds} folds: give folds={max(2, texts)} or more texts")
    regression = labelled.classes is None
    split = (GroupKFold if regression else StratifiedGroupKFold)(folds, shuffle=True, random_state=seed)
    for fit, score in split.split(np.empty(len(labelled.targets)), labelled.targets, labelled.groups):
        if not regression and len({*labelled.targets[fit].tolist()}) < len(labelled.classes or ()):
            raise InputError("a class is in the texts of one fold only: give more texts of each class, or fewer folds")
        yield fit, score


def _model(labelled: Labelled, penalty: float) -> Any:
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = Ridge(alpha=penalty) if labelled.classes is None else LogisticRegression(C=1 / penalty, max_iter=ITERATIONS)
    return make_pipeline(StandardScaler(), probe)


def _fit(
    values: NDArray[Any], labelled: Labelled, parts: Sequence[tuple[NDArray[Any], NDArray[Any]]], penalty: float
) -> Fit:
    """Score the folds, then fit on all of them."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    scored = []
    for fit, score in parts:
        model = _model(labelled, penalty).fit(flat[fit], labelled.targets[fit])
        scored.append(_scores(model, flat[score], labelled.targets[score], labelled))
    model = _model(labelled, penalty).fit(flat, labelled.targets)
    scale = model[0].scale_
    weights = np.atleast_2d(model[-1].coef_) / scale
    intercept = np.atleast_1d(model[-1].intercept_) - weights @ model[0].mean_
    scores = {name: np.array([one[name] for one in scored]) for name in scored[0]}
    return Fit(scores, weights.reshape(-1, *values.shape[1:]), intercept)


def _scores(model: Any, values: NDArray[Any], targets: NDArray[Any], labelled: Labelled) -> Scores:
    from sklearn.metrics import r2_score, roc_auc_score

    if labelled.classes is None:
        return {"r2": float(r2_score(targets, model.predict(values)))}
    scores = {"accuracy": float((model.predict(values) == targets).mean())}
    if len({*targets.tolist()}) < len(labelled.classes):
        return {**scores, "auc": float("nan")}  # a class that no text of the fold has
    chances = model.predict_proba(values)
    numbers = np.arange(chances.shape[1])
    chances = chances[:, 1] if len(numbers) == TWO else chances
    auc = roc_auc_score(targets, chances, multi_class="ovr", labels=numbers)
    return {**scores, "auc": float(auc)}
