"""`sparse_probe`: what a few coordinates of an activation tell, beside random coordinates and shuffled labels.

Gurnee et al. 2023, "Finding neurons in a haystack" (arXiv:2305.01610): coordinates are ranked by the difference between
the classes' means, on the texts that are fitted on alone, and a probe reads the leading k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.activations import Activations
from mionnx.analysis.probes.probe import ITERATIONS, SEEDS, folds_of, harvested, read_labels, values_of
from mionnx.errors import InputError, RuntimeMissingError, install
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.progress import shown
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed
from mionnx.view import Columns, Lines, Series, Shown, Table, View, long_form

SPARSE_SIZES = (1, 2, 4, 8, 16)
SPARSE_SCORES = ("auc", "average_precision", "accuracy")
MOST_CONTROLLED = 200
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class SparseProbes(Shown):
    """Held-out scores of probes that read a few coordinates, by hook point and number of coordinates.

    Attributes:
        hooks: the hook points.
        sizes: numbers of coordinates, ascending.
        scores: "auc", "average_precision" and "accuracy" (balanced) -> float64 [hooks, sizes], mean over folds.
        random: the same of random coordinates, mean over draws.
        shuffled: the same with shuffled labels, coordinates chosen by these.
        coordinates: hook point -> the leading coordinates on all texts, int64 [largest size].
        classes: the two labels, ascending.
        settings: "folds", "penalty", "controls", "seed", and numbers of "tokens" and "texts".
    """

    hooks: list[str]
    sizes: list[int]
    scores: dict[str, Numbers]
    random: dict[str, Numbers]
    shuffled: dict[str, Numbers]
    coordinates: dict[str, NDArray[np.int64]]
    classes: list[Any]
    settings: dict[str, Any]

    @property
    def auc(self) -> Numbers:
        """[hooks, sizes]: held-out area under the ROC curve."""
        return self.scores["auc"]

    def top(self, k: int = 5) -> list[tuple[str, int, float, float]]:
        """The k largest leads over random coordinates: hook point, number of coordinates, AUC, that of random ones."""
        at_least("k", k, 0)
        lead = self.auc - self.random["auc"]
        order = np.argsort(-lead, axis=None, kind="stable")[:k]
        places = [divmod(int(at), len(self.sizes)) for at in order]
        return [
            (self.hooks[i], self.sizes[j], float(self.auc[i, j]), float(self.random["auc"][i, j])) for i, j in places
        ]

    def _facts(self) -> Iterator[str]:
        yield from (count(len(self.hooks), "hook point"), f"{self.sizes[0]} to {self.sizes[-1]} coordinates")
        yield f"{self.settings['tokens']:,} tokens of {count(self.settings['texts'], 'text')}"

    def _lines(self) -> Iterator[str]:
        for hook, size, score, other in self.top(5):
            yield f"{decimal(score, 3)} (random {decimal(other, 3)})  {count(size, 'coordinate')} of {hook}"

    def _by_hook(self) -> dict[str, float]:
        return dict(zip(self.hooks, self.auc.max(axis=1).tolist(), strict=True))

    def view(self) -> View:
        """Curves over the number of coordinates: each hook point, and the means of both controls."""
        series = [Series(hook, values) for hook, values in zip(self.hooks, self.auc, strict=True)]
        for name, scores in (("random coordinates", self.random), ("shuffled labels", self.shuffled)):
            series.append(Series(name, scores["auc"].mean(axis=0)))
        curves = Lines(np.array(self.sizes), series, "coordinates", "AUC, held out", 0, 1, levels={"chance": 0.5})
        meaning = "Coordinates are chosen on the texts that are fitted on; the two controls are means over hook points."
        return View("Sparse probes", [curves, self.table()], facts=", ".join(self._facts()), meaning=meaning)

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: every hook point and size, or the first k."""
        table = Table("hook point", "coordinates", "AUC", "random", "shuffled", "accuracy")
        cells = [(i, j) for i in range(len(self.hooks)) for j in range(len(self.sizes))][:k]
        for i, j in cells:
            numbers = (self.auc, self.random["auc"], self.shuffled["auc"], self.scores["accuracy"])
            table.add_row(self.hooks[i], str(self.sizes[j]), *(decimal(float(one[i, j]), 3) for one in numbers))
        return table

    def _columns(self) -> Columns:
        layers = [(hook, HookPoint.parse(hook).layer) for hook in self.hooks]
        numbers = dict(self.scores) | {"random_auc": self.random["auc"], "shuffled_auc": self.shuffled["auc"]}
        return long_form({"hook, layer": layers, "coordinates": self.sizes}, numbers)


@typed(leave=["labels", "groups"])
def sparse_probe(
    activations: Activations,
    labels: Any,
    sizes: Sequence[int] = SPARSE_SIZES,
    points: Sequence[str] | None = None,
    *,
    groups: Sequence[Any] | None = None,
    per: str | None = None,
    folds: int = 3,
    penalty: float = 0.01,
    controls: int = 10,
    seed: int = 0,
    progress: bool | None = None,
) -> SparseProbes:
    """Fit probes on the leading k coordinates of each hook point, and score them on texts held out.

    The probe is scikit-learn's LogisticRegression with balanced classes on standardised values.

    Args:
        activations, labels, points, groups, per: see `probe`; labels of two classes.
        sizes: numbers of coordinates.
        folds: parts of the texts.
        penalty: 1/C of LogisticRegression.
        controls: draws of random coordinates, and of shuffled labels.
        seed: a number that determines folds and draws.
        progress: see `patch_sweep`.

    Raises:
        HookError: a hook point that was not harvested.
        InputError: another number of classes than two, more coordinates than there are, fewer texts than folds.
        RuntimeMissingError: scikit-learn is not installed (extra `probe`).

    Example:
        found = mionnx.sparse_probe(Activations("folder"), ["Europe", "Asia", ...], sizes=[1, 4])
        found.coordinates["blocks.2.mlp.hook_act"][0], found.top(3)
    """
    for name, value, least in (("folds", folds, 2), ("seed", seed, 0), ("controls", controls, 1)):
        at_least(name, value, least)
    at_most("seed", seed, SEEDS)
    at_most("controls", controls, MOST_CONTROLLED)
    if not 0 < penalty < np.inf:
        raise InputError(f"penalty={penalty!r}: a number above 0")
    counts = sorted({int(size) for size in sizes})
    if not counts or counts[0] < 1:
        raise InputError(f"sizes={list(sizes)}: numbers of coordinates from 1")
    names = harvested(activations, points)
    labelled = read_labels(activations, labels, per, "classification", groups)
    if labelled.classes is None or len(labelled.classes) != 2:
        raise InputError(f"labels of {len(labelled.classes or ())} classes: a sparse probe tells two apart")
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise RuntimeMissingError(f"probes are fitted by scikit-learn: {install('probe')}") from error
    parts, results, leading = [*folds_of(labelled, folds, seed)], [], {}
    with shown(progress) as show:
        for number, name in enumerate(names):
            values = values_of(activations, name, labelled)
            flat = values.reshape(len(values), -1).astype(np.float64)
            if counts[-1] > flat.shape[1]:
                raise InputError(f"{counts[-1]} coordinates of {name}, which has {flat.shape[1]}")
            results.append(_of_point(flat, labelled.targets, parts, counts, penalty, controls, seed))
            leading[name] = _ranked(flat, labelled.targets)[: counts[-1]]
            show("sparse probes", number + 1, len(names))
    scores, others, mixed = (
        {name: np.stack([one[kind][name] for one in results]) for name in SPARSE_SCORES} for kind in range(3)
    )
    texts = len(np.unique(np.asarray(activations.text_index)[labelled.tokens]))
    settings = {"folds": folds, "penalty": penalty, "controls": controls, "seed": seed}
    settings |= {"tokens": len(labelled.tokens), "texts": texts}
    return SparseProbes(names, counts, scores, others, mixed, leading, labelled.classes, settings)


def _ranked(values: Numbers, targets: NDArray[Any]) -> NDArray[np.int64]:
    """Coordinates by the difference between the two classes' means, the largest first."""
    difference = values[targets == 1].mean(axis=0) - values[targets == 0].mean(axis=0)
    return np.argsort(-np.abs(difference), kind="stable").astype(np.int64)


def _of_point(
    values: Numbers,
    targets: NDArray[Any],
    parts: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    sizes: Sequence[int],
    penalty: float,
    controls: int,
    seed: int,
) -> tuple[dict[str, Numbers], ...]:
    """Scores [sizes] of the leading coordinates, of random ones, and with shuffled labels: means over folds."""
    random = np.random.default_rng(seed)
    chosen, drawn, mixed = ([], [], [])
    for fit, score in parts:
        order = _ranked(values[fit], targets[fit])
        chosen.append([_scored(values[:, order[:size]], targets, fit, score, penalty) for size in sizes])
        for _ in range(controls):
            others = random.permutation(values.shape[1])
            drawn.append([_scored(values[:, others[:size]], targets, fit, score, penalty) for size in sizes])
            labels = random.permutation(targets[fit])
            own = _ranked(values[fit], labels)
            mixed.append([_scored(values[:, own[:size]], targets, fit, score, penalty, labels) for size in sizes])
    return tuple(
        {name: np.array([[one[name] for one in row] for row in rows]).mean(axis=0) for name in SPARSE_SCORES}
        for rows in (chosen, drawn, mixed)
    )


def _scored(
    values: Numbers,
    targets: NDArray[Any],
    fit: NDArray[Any],
    score: NDArray[Any],
    penalty: float,
    labels: NDArray[Any] | None = None,
) -> dict[str, float]:
    """Fit on some tokens, by other labels than theirs if they are given, and score on others."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    logistic = LogisticRegression(C=1 / penalty, class_weight="balanced", max_iter=ITERATIONS)
    model = make_pipeline(StandardScaler(), logistic).fit(values[fit], targets[fit] if labels is None else labels)
    numbers, true = model.decision_function(values[score]), targets[score]
    if len({*true.tolist()}) < 2:
        raise InputError("the texts of a fold are of one class: give more texts of each, or fewer folds")
    return {
        "auc": float(roc_auc_score(true, numbers)),
        "average_precision": float(average_precision_score(true, numbers)),
        "accuracy": float(balanced_accuracy_score(true, numbers > 0)),
    }
