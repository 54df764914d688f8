"""`ProbeResult`: held-out scores by hook point, and the directions that the probes read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.steering.directions import Direction
from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.view import Columns, HeatMap, Lines, Series, Shown, Table, View, long_form

Numbers = NDArray[np.float64]


@dataclass(eq=False)
class Fit(Storable):
    """The probe of one hook point."""

    scores: dict[str, Numbers]  # name -> [folds]
    weights: Numbers  # [classes, ...], or [1, ...] for two classes and for values; for activations as they are
    intercept: Numbers  # [classes] or [1]


@dataclass(eq=False, repr=False)
@typed(InputError, leave=["hook", "label"])
class ProbeResult(Shown):
    """Linear probes, by hook point.

    Attributes:
        fits: hook point -> its probe.
        classes: the label of each class, ascending; None where values were predicted.
        baseline: the accuracy of the most frequent class; 0 for values.
        settings: "folds", "penalty", "seed", and the number of labelled "tokens", of their "texts", and of the "groups"
            that stay in one fold.

    Example:
        result.accuracy["blocks.2.hook_resid_post"], result.top(3)
    """

    fits: dict[str, Fit]
    classes: list[Any] | None
    baseline: float
    settings: dict[str, Any]
    INSIDE: ClassVar = (Fit,)

    @property
    def metric(self) -> str:
        """The leading score: "accuracy", or "r2" of values."""
        return "r2" if self.classes is None else "accuracy"

    @property
    def accuracy(self) -> dict[str, float]:
        """Hook point -> held-out accuracy, mean over folds."""
        return self.score("accuracy")

    @property
    def auc(self) -> dict[str, float]:
        """Hook point -> held-out area under the ROC curve, of several classes each against the rest."""
        return self.score("auc")

    @property
    def r2(self) -> dict[str, float]:
        """Hook point -> held-out R2, the share of the variance that is predicted."""
        return self.score("r2")

    def score(self, metric: str) -> dict[str, float]:
        """Hook point -> a held-out score, mean over the folds that have it.

        Raises:
            InputError: no such score.
        """
        names = [*next(iter(self.fits.values())).scores]
        if metric not in names:
            raise InputError(f"no score {metric!r} of these probes, only {', '.join(names)}")
        return {hook: _mean(fit.scores[metric]) for hook, fit in self.fits.items()}

    def spread(self, metric: str | None = None) -> dict[str, float]:
        """Hook point -> the standard deviation of a score over folds (n - 1)."""
        name = metric or self.metric
        self.score(name)  # refuses a score that these probes do not have
        return {hook: float(np.nanstd(fit.scores[name], ddof=1)) for hook, fit in self.fits.items()}

    def top(self, k: int = 5) -> list[tuple[str, float]]:
        """The k hook points with the highest score, and it."""
        scores = self.score(self.metric)
        return sorted(scores.items(), key=lambda one: -one[1])[:k]

    def direction(self, hook: str | HookPoint, label: Any = None) -> Direction:
        """The direction along which a probe's answer grows.

        Adding it with strength 1 raises the logit of the label (of two classes, its log-odds; of values, the
        prediction) by 1: it is w / |w|^2, w being the weights for activations as they are.

        Args:
            label: the class; left out for values, and for two classes the second one.

        Raises:
            HookError: no probe there, or values that are no vectors.
            InputError: a label that is no class.
        """
        name = str(hook)
        if name not in self.fits:
            raise HookError(f"no probe at {name!r}{nearest(name, self.fits) or '; ' + ', '.join(self.fits)}")
        weights = self._weights(self.fits[name].weights, label)
        if weights.ndim != 1:
            raise HookError(f"{name} has values {list(weights.shape)}: a direction is of vectors; read `fits` itself")
        norm = float(weights @ weights)
        if not norm:
            raise InputError(f"the probe at {name} reads nothing: its weights are zero")
        return Direction(name, (weights / norm).astype(np.float32))

    def _weights(self, weights: Numbers, label: Any) -> Numbers:
        if self.classes is None:
            if label is not None:
                raise InputError(f"label={label!r}: these probes predict values")
            return weights[0]
        # Two classes have one row of weights, for the second against the first.
        if label is None and len(self.classes) == len(weights) + 1:
            return weights[0]
        if isinstance(label, np.ndarray) or label not in self.classes:
            raise InputError(f"label={label!r}; the classes are {', '.join(map(repr, self.classes))}")
        place = self.classes.index(label)
        if len(weights) == 1:
            return weights[0] if place else -weights[0]
        return weights[place]

    def _facts(self) -> Iterator[str]:
        yield count(len(self.fits), "hook point")
        yield "values" if self.classes is None else f"{len(self.classes)} classes"
        yield self._texts()
        yield f"{self.settings['tokens']:,} tokens"

    def _lines(self) -> Iterator[str]:
        yield self.facts()
        for hook, score in self.top():
            yield f"{decimal(score):>5}±{decimal(self.spread()[hook])}  {hook}"

    def _texts(self) -> str:
        """Number of texts, and of groups if several texts are of one."""
        texts, groups = self.settings["texts"], self.settings["groups"]
        return count(texts, "text") + (f" in {count(groups, 'group')}" if groups != texts else "")

    def facts(self) -> str:
        """One line on how the scores came about."""
        baseline = "" if self.classes is None else f", baseline {decimal(self.baseline)}"
        folds = self.settings["folds"]
        parts = "texts" if self.settings["groups"] == self.settings["texts"] else "groups"
        return f"{self.metric} on {parts} held out ({folds} folds, ± is the standard deviation over them){baseline}"

    def to_dict(self) -> dict[str, Any]:
        """All scores by hook point, as JSON can hold them; the weights are in a .safetensors file."""
        spread = self.spread()
        rows = [{"hook": hook, **fit.scores, "spread": spread[hook]} for hook, fit in self.fits.items()]
        summary = {"metric": self.metric, "baseline": self.baseline, "classes": self.classes}
        return {**summary, **self.settings, "hooks": rows}

    def view(self) -> View:
        """Map of the scores above the baseline, and curves over the layers."""
        scores, spread, kinds = self.score(self.metric), self.spread(), self._kinds()
        # Outside the layers: the embedding, the final norm.
        places = sorted({-1 if point.layer is None else point.layer for points in kinds.values() for point in points})
        series = [self._series(kind, points, places) for kind, points in kinds.items()]
        unit = "layer" if places[0] >= 0 else "layer (-1: outside the layers)"
        curves = Lines(np.array(places), series, unit, f"{self.metric}, held out", levels={"baseline": self.baseline})
        layers = [[point.layer for point in points] for points in kinds.values()]
        # A map of kinds and layers, if every kind has the same layers; else a line a hook point.
        grid = len({tuple(one) for one in layers}) == 1 and None not in layers[0]
        names = [point.name for points in kinds.values() for point in points]
        axes = {"hook point": [*kinds], "layer": [*map(str, layers[0])]} if grid else {"hook point": names}
        shape = [*map(len, axes.values())]
        values, errors = (np.array([of[name] for name in names]).reshape(shape) for of in (scores, spread))
        folds = self.settings["folds"]
        hover = {self.metric: values, "standard error": errors / np.sqrt(folds), "standard deviation": errors}
        above = {f"{self.metric} above the baseline": values - self.baseline}
        cells = HeatMap(axes, above, hover={**hover, "n": f"{folds} folds"})
        about = f"Linear probes on {self.settings['tokens']:,} tokens of {self._texts()}"
        meaning = f"A number is {self.metric} minus {decimal(self.baseline)}, which needs no activations."
        return View("Linear probes", [cells, curves, self.table()], self.facts(), facts=about, meaning=meaning)

    def _series(self, kind: str, points: list[HookPoint], places: list[int]) -> Series:
        at = {-1 if point.layer is None else point.layer: point.name for point in points}
        scores, spread = self.score(self.metric), self.spread()
        values, errors = ([of[at[place]] if place in at else np.nan for place in places] for of in (scores, spread))
        return Series(kind, values, errors=errors)

    def _columns(self) -> Columns:
        points, folds = [HookPoint.parse(hook) for hook in self.fits], self.settings["folds"]
        pairs = [(point.name, point.layer) for point in points]
        names = [*next(iter(self.fits.values())).scores]
        numbers = {name: np.stack([fit.scores[name] for fit in self.fits.values()]) for name in names}
        return long_form({"hook, layer": pairs, "fold": range(folds)}, numbers)

    def _by_hook(self) -> dict[str, float]:
        return self.score(self.metric)

    def _kinds(self) -> dict[str, list[HookPoint]]:
        kinds: dict[str, list[HookPoint]] = {}
        for point in map(HookPoint.parse, self.fits):
            kinds.setdefault(point.short, []).append(point)
        return kinds

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: every hook point with its scores, or the first k."""
        names = [*next(iter(self.fits.values())).scores]
        table = Table("hook point", *map(str, names), "±", title=self.facts(), on_page={"heading": "Scores"})
        spread, scores = self.spread(), [self.score(name) for name in names]
        for hook in [*self.fits][:k]:
            table.add_row(hook, *(decimal(score[hook], 3) for score in scores), decimal(spread[hook], 3))
        return table


def _mean(scores: Numbers) -> float:
    """The mean of the folds that have a score; NaN if none has."""
    finite = scores[np.isfinite(scores)]
    return float(finite.mean()) if len(finite) else float("nan")
