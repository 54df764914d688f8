"""`probe`: linear probes by scikit-learn at every hook point of a harvest, scored on held-out texts.

Labels are given by text or by token, as classes or as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.probes.probe_result import Fit, ProbeResult
from mionnx.errors import HookError, InputError, RuntimeMissingError, install, nearest
from mionnx.inputs.token_rows import read_array
from mionnx.machine.progress import shown
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed

PROBE_KINDS, PER = ("classification", "regression"), ("text", "token")
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
        kind: "classification" or "regression"; by default numbers of which any is a float are to be predicted, and all
            else is a class.
        folds: parts of the texts.
        penalty: of the squared weights of standardised values: 1/C of LogisticRegression, alpha of Ridge.
        seed: a number that determines the division into folds.
        progress: see `patch_sweep`.

    Raises:
        HookError: a hook point that was not harvested.
        InputError: labels of another number, one class only, or fewer texts than folds; values that are not finite.
        RuntimeMissingError: scikit-learn is not installed (extra `probe`).

    Example:
        result = mionnx.probe(Activations("folder"), ["Europe", "Asia", ...])
        result.accuracy, model.generate(prompt, result.direction("blocks.2.hook_resid_post", "Asia").spec(4.0))
    """
    at_least("folds", folds, 2)
    at_least("seed", seed, 0)
    at_most("seed", seed, SEEDS)
    if not 0 < penalty < np.inf:
        raise InputError(f"penalty={penalty!r}: a number above 0")
    names = harvested(activations, points)
    labelled = read_labels(activations, labels, per, kind, groups)
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise RuntimeMissingError(f"probes are fitted by scikit-learn: {install('probe')}") from error
    with shown(progress) as show:
        parts = [*folds_of(labelled, folds, seed)]
        _refuse_equal(labelled, parts)
        fits = {}
        for number, name in enumerate(names):
            fits[name] = _fit(values_of(activations, name, labelled), labelled, parts, penalty)
            show("probes", number + 1, len(names))
    texts = np.unique(np.asarray(activations.text_index)[labelled.tokens])
    sizes = {"tokens": len(labelled.tokens), "texts": len(texts), "groups": len(np.unique(labelled.groups))}
    settings = {"folds": folds, "penalty": penalty, "seed": seed, **sizes}
    # the accuracy of always saying the most frequent class; the R2 of the mean
    baseline = 0.0 if labelled.classes is None else float(np.bincount(labelled.targets).max() / len(labelled.targets))
    return ProbeResult(fits, labelled.classes, baseline, settings)


def harvested(activations: Activations, points: Sequence[str] | None) -> list[str]:
    """The hook points that are probed, all of which were harvested."""
    names = [*activations] if points is None else [*points]
    if not names:
        raise InputError(f"points={points}: hook points that were harvested: {', '.join(activations)}")
    for name in names:
        if name not in activations:
            raise HookError(f"{name!r} was not harvested{nearest(name, activations) or '; ' + ', '.join(activations)}")
    return names


def values_of(activations: Activations, name: str, labelled: Labelled) -> NDArray[Any]:
    """The values of the labelled tokens at a hook point, [tokens, ...], all of them finite."""
    values = np.asarray(activations[name])[labelled.tokens]
    if not (finite := np.isfinite(values.reshape(len(values), -1)).all(axis=1)).all():
        tokens = labelled.tokens[~finite]
        raise InputError(
            f"{name} has NaN or infinity at {len(tokens)} of {len(values)} labelled tokens, the first of them token "
            f"{tokens[0]} of the harvest: give those None as label, or leave the hook point out"
        )
    return values


@dataclass(frozen=True)
class Labelled:
    """The tokens that have a label."""

    tokens: NDArray[np.int64]  # places in the harvest
    groups: NDArray[np.int64]  # the group of each token, which stays in one fold: its text, or that of `groups=`
    targets: NDArray[Any]  # class number or value of each token
    classes: list[Any] | None  # labels, ascending; None for values


def read_labels(
    activations: Activations, labels: Any, per: str | None, kind: str | None, groups: Any = None
) -> Labelled:
    """The labels of tokens, checked, and which tokens stay together."""
    for name, choice, allowed in (("per", per, PER), ("kind", kind, PROBE_KINDS)):
        if choice is not None and choice not in allowed:
            raise InputError(f"{name}={choice!r}; {' or '.join(allowed)}{nearest(choice, allowed)}")
    if isinstance(labels, str | bytes | dict) or not hasattr(labels, "__len__"):
        raise InputError(f"labels are a list or an array, one a text or one a token, got {type(labels).__name__}")
    # As Python's own numbers, whose type tells classes from values.
    entries = read_array("labels", labels).tolist() if hasattr(labels, "shape") else labels
    column = [one.item() if isinstance(one, np.generic) else one for one in entries]
    nested = [one for one in column if isinstance(one, list | np.ndarray)]
    if nested:
        raise InputError(f"a label is one class or one number, got {nested[0]!r:.60}: give labels [texts] or [tokens]")
    text_of = np.asarray(activations.text_index).astype(np.int64)
    of_tokens = _of_tokens(activations, text_of, len(column), per)
    by_token = column if of_tokens else [column[text] for text in text_of.tolist()]
    tokens = np.array([at for at, label in enumerate(by_token) if label is not None], np.int64)
    chosen = [by_token[at] for at in tokens.tolist()]
    if not chosen:
        raise InputError("no token has a label")
    if kind is None:
        numbers = all(isinstance(label, float | int) and not isinstance(label, bool) for label in chosen)
        values = numbers and any(isinstance(label, float) for label in chosen)
        kind = "regression" if values else "classification"
    targets, classes = _classes(chosen) if kind == "classification" else (_numbers(chosen), None)
    together = _alike(activations, text_of) if groups is None else _grouped(activations, text_of, groups)
    return Labelled(tokens, together[tokens], targets, classes)


def _grouped(activations: Activations, text_of: NDArray[np.int64], groups: Any) -> NDArray[np.int64]:
    if isinstance(groups, str | bytes | dict) or not hasattr(groups, "__len__") or len(groups) != activations.texts:
        raise InputError(f"groups= are one a text: the harvest has {activations.texts}")
    numbers: dict[Any, int] = {}
    try:
        by_text = [numbers.setdefault(group, len(numbers)) for group in groups]
    except TypeError as error:
        raise InputError(f"groups= cannot be told apart: {error}") from error
    return np.array(by_text, np.int64)[text_of]


def _alike(activations: Activations, text_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """The text of each token, equal texts as one where all their tokens were harvested."""
    # a part of a text does not tell whether two are equal
    settings = activations.settings
    if settings.get("positions") is not None or settings.get("packed"):
        return text_of
    ids = np.asarray(activations.token_ids)
    occurring, starts = np.unique(text_of, return_index=True)
    ends = [*starts[1:].tolist(), len(text_of)]
    numbers: dict[bytes, int] = {}
    texts = (ids[begin:end].tobytes() for begin, end in zip(starts.tolist(), ends, strict=True))
    same = [numbers.setdefault(text, number) for number, text in enumerate(texts)]
    return np.array(same, np.int64)[np.searchsorted(occurring, text_of)]


def _of_tokens(activations: Activations, text_of: NDArray[np.int64], count: int, per: str | None) -> bool:
    """Whether labels are one a token."""
    texts, tokens = activations.texts, activations.tokens
    fitting = [name for name, size in zip(PER, (texts, tokens), strict=True) if size == count]
    if not fitting or (per is not None and per not in fitting):
        raise InputError(f"{count} labels; the harvest has {texts} texts and {tokens} tokens: one for each of either")
    if per is None and len(fitting) > 1 and not np.array_equal(text_of, np.arange(tokens)):
        raise InputError(f"{count} labels for {texts} texts of {tokens} tokens: say per='text' or per='token'")
    # As many texts as tokens are texts of one token: either reading is the same.
    return (per or fitting[-1]) == "token"


def _classes(labels: list[Any]) -> tuple[NDArray[np.int64], list[Any]]:
    if any(isinstance(label, float) and np.isnan(label) for label in labels):
        raise InputError("labels hold NaN: give None for those to be left out")
    try:
        classes = sorted({*labels})
    except TypeError:
        kinds = sorted({type(label).__name__ for label in labels})
        raise InputError(f"labels of several kinds: {', '.join(kinds)}") from None
    if len(classes) == 1:
        raise InputError(f"all labels are {classes[0]!r}: there is nothing to tell apart")
    places = {label: number for number, label in enumerate(classes)}
    return np.array([places[label] for label in labels], np.int64), classes


def _numbers(labels: list[Any]) -> NDArray[np.float64]:
    try:
        numbers = np.array(labels, np.float64)
    except (TypeError, ValueError):
        raise InputError("labels of a regression are numbers") from None
    if not np.isfinite(numbers).all():
        raise InputError("labels of a regression are finite numbers, None for those to be left out")
    if not np.ptp(numbers):
        raise InputError(f"all labels are {numbers[0]:g}: there is nothing to predict")
    return numbers


def folds_of(labelled: Labelled, folds: int, seed: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Tokens to fit on and tokens to score, by texts."""
    from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

    texts = len(np.unique(labelled.groups))
    if texts == 1:
        raise InputError("all labelled texts are one, or of one group: none can be held out")
    if texts < folds:
        raise InputError(f"{texts} labelled texts in {folds} folds: give folds={texts} or more texts")
    regression = labelled.classes is None
    if not regression and (most := int(np.bincount(labelled.targets).max())) < folds:
        raise InputError(f"each class has {most} tokens or fewer, in {folds} folds: give more of each, or fewer folds")
    split = (GroupKFold if regression else StratifiedGroupKFold)(folds, shuffle=True, random_state=seed)
    # The values do not matter to the division, only how many there are.
    for fit, score in split.split(np.empty(len(labelled.targets)), labelled.targets, labelled.groups):
        if not regression and len({*labelled.targets[fit].tolist()}) < len(labelled.classes or ()):
            raise InputError("a class is in the texts of one fold only: give more texts of each class, or fewer folds")
        yield fit, score


def _refuse_equal(labelled: Labelled, parts: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    if labelled.classes is None and not any(np.ptp(labelled.targets[score]) for _, score in parts):
        raise InputError(
            f"{len(parts)} folds, each with texts of one value alone, which has no variance for R2: give fewer folds"
        )


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
    # for activations as they are: the scaler is multiplied into the weights
    scale = model[0].scale_
    weights = np.atleast_2d(model[-1].coef_) / scale
    intercept = np.atleast_1d(model[-1].intercept_) - weights @ model[0].mean_
    scores = {name: np.array([one[name] for one in scored]) for name in scored[0]}
    return Fit(scores, weights.reshape(-1, *values.shape[1:]), intercept)


def _scores(model: Any, values: NDArray[Any], targets: NDArray[Any], labelled: Labelled) -> Scores:
    from sklearn.metrics import r2_score, roc_auc_score

    if labelled.classes is None:
        # a share of the variance, of which equal values have none
        return {"r2": float(r2_score(targets, model.predict(values))) if np.ptp(targets) else float("nan")}
    scores = {"accuracy": float((model.predict(values) == targets).mean())}
    if len({*targets.tolist()}) < len(labelled.classes):
        return {**scores, "auc": float("nan")}  # a class that no text of the fold has
    probabilities = model.predict_proba(values)
    numbers = np.arange(probabilities.shape[1])
    # Of two classes scikit-learn takes the probability of the second alone.
    probabilities = probabilities[:, 1] if len(numbers) == TWO else probabilities
    auc = roc_auc_score(targets, probabilities, multi_class="ovr", labels=numbers)
    return {**scores, "auc": float(auc)}
