"""`Attributions`: direct contributions over several prompts, with their mean and spread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attribution.attribution import PRINTED_COMPONENTS, Attribution, heads_of, places_of, view_of
from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.view import Columns, Shown, View

Numbers = NDArray[np.float64]
TWO = 2  # prompts from which on there is a spread


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class Attributions(Shown, Sequence[Attribution]):
    """The `Attribution` of each of several prompts, as a sequence, and their mean."""

    each: tuple[Attribution, ...]
    INSIDE: ClassVar = (Attribution,)

    @overload
    def __getitem__(self, row: int) -> Attribution: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Attribution, ...]: ...
    def __getitem__(self, row: int | slice) -> Attribution | tuple[Attribution, ...]:
        return self.each[row]

    def __len__(self) -> int:
        return len(self.each)

    @property
    def n(self) -> int:
        return len(self.each)

    @property
    def labels(self) -> list[str]:
        """The components, as in each `Attribution`."""
        return self.each[0].labels

    @property
    def by_pair(self) -> Numbers:
        """[prompts, component]: the contributions in each prompt."""
        return np.stack([one.values for one in self.each])

    @property
    def values(self) -> Numbers:
        """[component]: the mean contributions."""
        return np.asarray(self.by_pair.mean(axis=0))

    @property
    def std(self) -> Numbers:
        """[component]: the standard deviation over prompts (by n - 1); NaN for one."""
        return np.full(len(self.labels), np.nan) if self.n < TWO else np.asarray(self.by_pair.std(axis=0, ddof=1))

    @property
    def sem(self) -> Numbers:
        """[component]: the standard error of the mean."""
        return np.asarray(self.std / np.sqrt(self.n))

    @property
    def logits(self) -> Numbers:
        """[prompts]: the logit, or difference, that the contributions add up to."""
        return np.array([one.logit for one in self.each])

    @property
    def heads(self) -> Numbers | None:
        """[layer, head]: the mean contributions of the heads; None where they have no shares."""
        return heads_of(self.labels, self.values, self.each[0].num_layers)

    @property
    def what(self) -> str:
        """The logit or difference of logits, in words."""
        quantity = "logit of the answer" if self.each[0].versus is None else "lead of the answer"
        return f"mean {quantity} over {count(self.n, 'prompt')}{' before the soft cap' * self.each[0].capped}"

    def top(self, k: int | None = None) -> list[tuple[str, float]]:
        """The components with the largest mean contributions of either sign; all if `k` is left out."""
        at_least("k", 0 if k is None else k, 0)
        return [(self.labels[i], float(self.values[i])) for i in self._order()[:k]]

    def _order(self) -> list[int]:
        order: list[int] = np.argsort(-np.abs(self.values), kind="stable").tolist()
        return order

    def _facts(self) -> Iterator[str]:
        yield f"{self.what}: {decimal(float(self.logits.mean()), 4)}"
        yield count(len(self.labels), "component")

    def _lines(self) -> Iterator[str]:
        yield "the largest mean contributions, ± is the standard error:"
        for i in self._order()[:PRINTED_COMPONENTS]:
            yield f"{decimal(self.values[i], 3, sign=True):>9}±{decimal(self.sem[i], 3)}  {self.labels[i]}"

    def to_dict(self) -> dict[str, Any]:
        """Everything."""
        facts = ("tokens", "position", "answer", "versus", "logit")
        names = ("n", "labels", "values", "std", "sem", "heads", "by_pair")
        values = {name: getattr(self, name) for name in names}
        return {**values, "prompts": [{name: getattr(one, name) for name in facts} for one in self.each]}

    def _columns(self) -> Columns:
        places = {name: column * self.n for name, column in places_of(self.labels).items()}
        pairs = np.repeat(np.arange(self.n), len(self.labels))
        return {"pair": pairs, **places, "contribution": self.by_pair.ravel()}

    def view(self) -> View:
        """Bars of the means with their standard errors, and the heads as a map."""
        logit = float(self.logits.mean())
        errors = None if self.n < TWO else self.sem
        return view_of(self, self.what, logit, f"{self.what}: {decimal(logit, 3)}", errors=errors)
