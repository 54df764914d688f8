"""`SweepResult`: a number for every cell, with table, figure and page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape

from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least
from mionnx.machine.resampling import bootstrap_interval, sign_flip_p_value
from mionnx.machine.typed import typed
from mionnx.view import Columns, HeatMap, Shown, Table, View, long_form

Numbers = NDArray[np.float64]
PRINTED_CELLS = 5  # cells of a printed result
TWO = 2  # pairs from which on there is a spread
PICTURED_NEURONS = 64  # a picture cannot show some thousands of them


@dataclass(repr=False)
@typed(InputError)
class SweepResult(Shown):
    """Values of a sweep.

    Attributes:
        values: the metric at every cell, float64, mean over prompts; axes in the order of `over`.
        by_pair: the metric of every prompt or pair, [pairs, ...].
        labels: name of an axis -> names of its entries: layers, tokens, heads.
        clean, corrupted: the metric without any patch, mean over pairs; `corrupted` is None where there is no second
            run (ablation).
        patching: "denoising" (clean values put into the corrupted run), "noising" (the other way), or "ablation".
        metric, hook: name of the metric, template of the hook point.
        title, about: a short and a longer line for pictures.
        cost: numbers of "cells", of cells "without effect", and "seconds".
        clean_by_pair, corrupted_by_pair: the metric of each pair without any patch, [pairs].
        named: whether positions were given by names, which are their labels then.
    """

    values: Numbers
    by_pair: Numbers
    over: tuple[str, ...]
    labels: dict[str, list[str]]
    clean: float
    corrupted: float | None
    patching: str
    metric: str
    hook: str
    title: str
    about: str
    cost: dict[str, float] = field(default_factory=dict)
    clean_by_pair: Numbers | None = None
    corrupted_by_pair: Numbers | None = None
    named: bool = False

    @property
    def n(self) -> int:
        """Number of prompts or pairs."""
        return len(self.by_pair)

    @property
    def effect_by_pair(self) -> Numbers:
        """Change of the metric by each cell in every pair, [pairs, ...]."""
        corrupted = self.corrupted_by_pair if self.patching == "denoising" else None
        # A denoising sweep patches the corrupted run, so its metric is what a cell changes.
        bases = self.clean_by_pair if corrupted is None else corrupted
        return self.by_pair - self._over_cells(np.array([self.base]) if bases is None else bases)

    def _over_cells(self, by_pair: Numbers) -> Numbers:
        return by_pair.reshape([-1, *[1] * self.values.ndim])

    @property
    def std(self) -> Numbers:
        """Standard deviation of the effect over pairs (n - 1 in the denominator); NaN for one pair."""
        if self.n < TWO:
            return np.full(self.values.shape, np.nan)
        return cast(Numbers, self.effect_by_pair.std(axis=0, ddof=1))

    @property
    def sem(self) -> Numbers:
        """Standard error of the mean effect: the standard deviation over the square root of n."""
        return self.std / np.sqrt(self.n)

    def interval(self, confidence: float = 0.95, resamples: int = 1000, seed: int = 0) -> tuple[Numbers, Numbers]:
        """The ends of a bootstrap interval of each cell's mean effect, in the shape of `values`.

        Percentiles of the mean over pairs drawn with replacement; one draw serves all cells, so that cells compare.

        Raises:
            InputError: one pair, or a confidence that is no share.
        """
        return bootstrap_interval(self.effect_by_pair, confidence, resamples, seed)

    def p_value(self, resamples: int = 1000, seed: int = 0) -> Numbers:
        """The p-value of each cell's mean effect, in the shape of `values`: a test by flipping signs, two-sided.

        Of 12 pairs or fewer it is exact. Cells are many: a bound on the share of false ones asks for more than 0.05.

        Raises:
            InputError: one pair.
        """
        return sign_flip_p_value(self.effect_by_pair, resamples, seed)

    @property
    def shown_spread(self) -> tuple[Numbers, Numbers] | None:
        """Standard deviation and error in the unit of pictures; None for one pair."""
        if self.n < TWO or self.clean_by_pair is None:
            return None
        if self.corrupted_by_pair is None or self.clean == self.corrupted:
            return self.std, self.sem
        difference = self.clean_by_pair - self.corrupted_by_pair
        # In the sign of the unit, which is the other run minus the patched one.
        difference = difference if self.patching == "denoising" else -difference
        # The error of a ratio of two means (delta method): pairs that are all restored to the same share have none.
        residuals = self.effect_by_pair - self.normalized * self._over_cells(difference)
        deviation = residuals.std(axis=0, ddof=1) / abs(difference.mean())
        return deviation, deviation / np.sqrt(self.n)

    @property
    def base(self) -> float:
        """The metric of the run that was patched, without a patch."""
        return self.corrupted if self.patching == "denoising" and self.corrupted is not None else self.clean

    @property
    def effect(self) -> Numbers:
        """Change of the metric by each cell: values minus base; exactly 0 for cells without effect."""
        return self.values - self.base

    @property
    def normalized(self) -> Numbers:
        """The effect as a share of the difference between the two runs: 0 is none of it, 1 all."""
        if self.corrupted is None:
            raise InputError("an ablation has no second run to normalise by: use `effect`")
        if self.clean == self.corrupted:
            raise InputError(f"clean and corrupted both have {self.metric} {self.clean:.6g}: nothing to normalise by")
        other = self.clean if self.patching == "denoising" else self.corrupted
        return self.effect / (other - self.base)

    @property
    def shown(self) -> tuple[str, Numbers]:
        """Label and values of pictures: the normalised effect, or else the effect."""
        if self.corrupted is None or self.clean == self.corrupted:
            return f"change of {self.metric}", self.effect
        return f"share of the difference in {self.metric}", self.normalized

    @property
    def meaning(self) -> str:
        """A sentence on what 1 and 0 mean in pictures."""
        if self.corrupted is None or self.clean == self.corrupted:
            return f"A number is the change of {self.metric} by this cell alone; 0: it stays {self.base:.4g}."
        source, to = ("clean", "restores") if self.patching == "denoising" else ("corrupted", "brings about")
        other = self.clean if self.patching == "denoising" else self.corrupted
        return (
            f"1: the {source} run's value at this cell alone {to} the whole difference ({self.metric} goes from "
            f"{self.base:.4g} to {other:.4g}); 0: none of it; below 0: it goes the other way."
        )

    def top(self, k: int = 10) -> list[tuple[dict[str, int | str], float]]:
        """The k cells with the largest effect: their layer, head, position (or its name) by axis, and the effect."""
        at_least("k", k, 0)
        return [
            ({name: self._entry(name, at) for name, at in zip(self.over, cell, strict=True)}, float(self.effect[cell]))
            for cell in self._largest(k)
        ]

    def _by_token(self, axis: str) -> bool:
        """Whether an axis' labels are tokens, which may be there twice."""
        return axis == "source" or (axis == "position" and not self.named)

    def _entry(self, axis: str, index: int) -> int | str:
        """Layer, head, position or neuron of an entry; a position's name if it has one."""
        if self._by_token(axis):
            return index
        return self.labels[axis][index] if axis == "position" else int(self.labels[axis][index])

    def _columns(self) -> Columns:
        axes: dict[str, list[Any]] = {"pair": [*range(self.n)]}
        for axis in self.over:
            entries = [self._entry(axis, index) for index in range(len(self.labels[axis]))]
            pairs = [*zip(entries, self.labels[axis], strict=True)]
            axes |= {f"{axis}, {axis}_token": pairs} if self._by_token(axis) else {axis: entries}
        return long_form(axes, {"value": self.by_pair, "effect": self.effect_by_pair})

    def _by_hook(self) -> dict[str, float]:
        """Of each layer's cells the largest effect to either side."""
        if "layer" not in self.over:
            return {} if "{" in self.hook else {self.hook: _farthest(self.effect.ravel())}
        by_layer = np.moveaxis(self.effect, self.over.index("layer"), 0)
        names = [self.hook.format(i=layer) for layer in self.labels["layer"]]
        return dict(zip(names, (_farthest(cells.ravel()) for cells in by_layer), strict=True))

    def _largest(self, k: int) -> list[tuple[int, ...]]:
        # Stable: equal effects in the order of the grid.
        order = np.argsort(-np.abs(self.effect), axis=None, kind="stable")[:k]
        return [tuple(cell) for cell in np.transpose(np.unravel_index(order, self.values.shape)).tolist()]

    def _facts(self) -> Iterator[str]:
        yield f"{self.patching} at {self.hook}"
        yield f"{' x '.join(self.over)} {list(self.values.shape)}"
        yield count(len(self.by_pair), "prompt" if self.corrupted is None else "pair")

    def _lines(self) -> Iterator[str]:
        what, numbers = self.shown
        yield self.facts()
        yield f"{what}, the largest effects:"
        for cell in self._largest(PRINTED_CELLS):
            yield f"{self._with_error(numbers, cell):>7}  {', '.join(self._places(cell))}"

    def _with_error(self, numbers: Numbers, cell: tuple[int, ...]) -> str:
        """A number of pictures, with its standard error if there are several pairs."""
        spread = self.shown_spread
        return f"{decimal(numbers[cell], 2)}{'' if spread is None else f'±{decimal(spread[1][cell], 2)}'}"

    def _places(self, cell: tuple[int, ...]) -> Iterator[str]:
        for name, index, label in zip(self.over, cell, self._labels_of(cell), strict=True):
            yield f"{name} {index} {label!r}" if self._by_token(name) else f"{name} {label}"

    def to_dict(self) -> dict[str, Any]:
        names = ["title", "about", "hook", "metric", "patching", "over", "labels", "clean", "corrupted", "values"]
        names += ["cost", "effect", "by_pair", "n"]
        # For one pair they would be NaN, or say nothing new.
        if self.shown_spread is not None:
            names += ["clean_by_pair", "corrupted_by_pair", "std", "sem"]
        return {name: getattr(self, name) for name in names}

    def view(self) -> View:
        """Heat map with selectors of further axes; if more than 64 neurons, the leading ones."""
        what, numbers = self.shown
        entries = pictured_entries(numbers, self.over)
        part, errors = np.ix_(*entries), None
        hover: dict[str, Any] = {self.metric: self.values[part]}
        if self.shown_spread is not None:
            deviation, errors = (one[part] for one in self.shown_spread)
            hover |= {"standard error": errors, "standard deviation": deviation, "n": self.n}
        labels, facts = {}, [self.facts()]
        for name, own, size in zip(self.over, entries, numbers.shape, strict=True):
            labels[name] = [self.labels[name][i] for i in own]
            if len(own) < size:
                facts.append(f"the {len(own)} {name}s with the largest numbers, of {size}")
        cells = HeatMap(labels, {what: numbers[part]}, hover=hover, errors=errors)
        return View(self.title, [cells], about=self.about, facts="; ".join(facts), meaning=self.meaning)

    def facts(self) -> str:
        """One line with the metric of the runs without a patch."""
        other = "" if self.corrupted is None else f", corrupted {self.corrupted:.4g}"
        pairs = "" if self.shown_spread is None else f"; mean of {self.n}, ± is its standard error"
        return f"{self.metric}: clean {self.clean:.4g}{other}{pairs}"

    def table(self, k: int = 10) -> Table:
        """Table for a terminal: the map if it has two axes and fits, else the largest cells."""
        what, numbers = self.shown
        # With its standard error a number is twice as wide.
        if len(self.over) == 2 and numbers.shape[1] <= (24 if self.shown_spread is None else 12):
            rows, columns = (self.labels[name] for name in self.over)
            table = Table(" / ".join(self.over), *columns, title=escape(f"{self.title}\n{what}"))
            for i, label in enumerate(rows):
                # Brackets of a hook's name are markup to rich.
                table.add_row(label, *(self._with_error(numbers, (i, j)) for j in range(numbers.shape[1])))
            return table
        title = escape(f"{self.title}\nthe {k} cells with the largest effect")
        several = ("standard deviation", "standard error") if self.n >= TWO else ()
        table = Table(*self.over, f"change of {self.metric}", *several, title=title)
        for cell in self._largest(k):
            spread = (self.std[cell], self.sem[cell]) if several else ()
            table.add_row(*self._labels_of(cell), *(decimal(one, 4) for one in (self.effect[cell], *spread)))
        return table

    def _labels_of(self, cell: tuple[int, ...]) -> list[str]:
        return [self.labels[name][index] for name, index in zip(self.over, cell, strict=True)]


def _farthest(numbers: Numbers) -> float:
    return float(numbers[np.nan_to_num(np.abs(numbers)).argmax()])


def pictured_entries(numbers: Numbers, over: Sequence[str]) -> list[list[int]]:
    """Choose the entries of each axis that a picture shows, ascending: all, and of many neurons the leading ones."""
    entries = [[*range(size)] for size in numbers.shape]
    for axis, name in enumerate(over):
        if name == "neuron" and numbers.shape[axis] > PICTURED_NEURONS:
            others = tuple(other for other in range(numbers.ndim) if other != axis)
            # NaN counts as nothing, or one broken cell would choose the neurons.
            largest = np.abs(np.nan_to_num(numbers)).max(axis=others)
            entries[axis] = sorted(np.argsort(-largest, kind="stable")[:PICTURED_NEURONS].tolist())
    return entries
