"""Labels of harvested tokens: given by text or by token, as classes or as numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.activations import Activations
from mionnx.errors import InputError, nearest
from mionnx.inputs.token_rows import read_array

PROBE_KINDS, PER = ("classification", "regression"), ("text", "token")


@dataclass(frozen=True)
class Labelled:
    """The tokens that have a label.

    Attributes:
        tokens: their places in the harvest.
        groups: the group of each, which stays in one fold: its text, or what `groups=` says.
        targets: class number or value of each.
        classes: the label of each class, ascending; None for values.
    """

    tokens: NDArray[np.int64]
    groups: NDArray[np.int64]
    targets: NDArray[Any]
    classes: list[Any] | None

    @property
    def baseline(self) -> float:
        """The accuracy of always saying the most frequent class; 0, the R2 of the mean, for values."""
        return 0.0 if self.classes is None else float(np.bincount(self.targets).max() / len(self.targets))


def read_labels(
    activations: Activations, labels: Any, per: str | None, kind: str | None, groups: Any = None
) -> Labelled:
    """Labels of the tokens of a harvest; arguments as for `probe`."""
    for name, choice, allowed in (("per", per, PER), ("kind", kind, PROBE_KINDS)):
        if choice is not None and choice not in allowed:
            raise InputError(f"{name}={choice!r}; {' or '.join(allowed)}{nearest(choice, allowed)}")
    if isinstance(labels, str | bytes | dict) or not hasattr(labels, "__len__"):
        raise InputError(f"labels are a list or an array, one a text or one a token, got {type(labels).__name__}")
    column = [*read_array("labels", labels).tolist()] if hasattr(labels, "shape") else [*labels]
    text_of = np.asarray(activations.text_index).astype(np.int64)
    if _of_tokens(activations, text_of, len(column), per):
        by_token = column
    else:
        by_token = [column[text] for text in text_of.tolist()]
    tokens = np.array([at for at, label in enumerate(by_token) if label is not None], np.int64)
    chosen = [by_token[at] for at in tokens.tolist()]
    if not chosen:
        raise InputError("no token has a label")
    if kind is None:
        kind = "regression" if all(isinstance(label, float | np.floating) for label in chosen) else "classification"
    targets, classes = _classes(chosen) if kind == "classification" else (_numbers(chosen), None)
    together = _alike(activations, text_of) if groups is None else _grouped(activations, text_of, groups)
    return Labelled(tokens, together[tokens], targets, classes)


def _grouped(activations: Activations, text_of: NDArray[np.int64], groups: Any) -> NDArray[np.int64]:
    """The group of each token, by its text."""
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
    return (per or fitting[-1]) == "token"


def _classes(labels: list[Any]) -> tuple[NDArray[np.int64], list[Any]]:
    kinds = {type(label) for label in labels}
    try:
        classes = sorted({*labels})
    except TypeError:
        raise InputError(f"labels of several kinds: {', '.join(sorted(one.__name__ for one in kinds))}") from None
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
