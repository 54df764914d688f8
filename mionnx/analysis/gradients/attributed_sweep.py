"""`AttributedSweep`: the cells of a sweep to first order, and how well they agree with exact ones."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.result import SweepResult
from mionnx.errors import InputError
from mionnx.machine.brief import Brief
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least
from mionnx.machine.typed import typed
from mionnx.view import Table

CORRELATED = 2  # cells that a correlation needs

Numbers = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Agreement(Brief):
    """Agreement of effects to first order with exact ones.

    Attributes:
        cells: compared cells.
        pearson: correlation of the effects; NaN if either does not vary.
        top: number of leading cells that are compared.
        shared: how many of the `top` leading cells of both are the same.
    """

    cells: int
    pearson: float
    top: int
    shared: int

    def __str__(self) -> str:
        same = f"{self.shared} of the leading {self.top} in common"
        return f"{self.cells} cells computed exactly: Pearson {decimal(self.pearson, 3)}, {same}"


@dataclass(repr=False)
@typed(InputError)
class AttributedSweep(SweepResult):
    """First-order estimates of a sweep: the metric without a patch, plus each cell's effect.

    Attributes:
        rules: the rules of going back, "gradient" or propagation rules.
        linearize_at: the prompt at which gradients are taken: "corrupted", "clean", "mean" of both, or "path" between
            them.
        steps: gradients that are averaged along the path; 1 without one.
        exact: the metric at the cells that were computed exactly, in the shape of `values`; NaN elsewhere.
    """

    rules: str = "gradient"
    linearize_at: str = "corrupted"
    steps: int = 1
    exact: Numbers = field(default_factory=lambda: np.empty(0))

    @property
    def meaning(self) -> str:
        """A sentence on what 1 and 0 mean in pictures."""
        return f"Estimated to first order, by {self.how}. {super().meaning}"

    @property
    def how(self) -> str:
        """The rules, and where they are used."""
        where = f"along {self.steps} steps of the path" if self.steps > 1 else f"at {self.linearize_at}"
        return f"{self.rules} {where}"

    def agreement(self, exact: SweepResult | None = None, k: int | None = None) -> Agreement:
        """Compare with exact values.

        Args:
            exact: `patch_sweep` over the same cells; those that `confirm` computed if left out.
            k: leading cells, by the size of the effect, of which the common ones are counted; by default 10, and of
                cells that `confirm` computed the leading half.

        Raises:
            InputError: no cell was computed exactly, a sweep over others, or `k` below 1.

        Example:
            result = model.attribute_patch(clean, corrupted, "z", confirm=10)
            result.agreement().pearson
        """
        values = self.exact if exact is None else exact.values
        if exact is not None and (exact.hook, exact.over, exact.labels) != (self.hook, self.over, self.labels):
            raise InputError(
                f"a sweep over other cells: {exact.hook} {exact.over}; this one is {self.hook} {self.over}"
            )
        compared = np.isfinite(values) if values.shape == self.values.shape else np.zeros(self.values.shape, bool)
        if not compared.any():
            raise InputError("no cell was computed exactly: give confirm=10, or a patch_sweep to compare with")
        estimates, truth = self.effect[compared], values[compared] - (self.base if exact is None else exact.base)
        default = min(10, len(estimates)) if exact is not None else max(1, len(estimates) // 2)
        at_least("top", default if k is None else k, 1)
        count = min(default if k is None else k, len(estimates))
        leading = [{*np.argsort(-np.abs(one), kind="stable")[:count].tolist()} for one in (estimates, truth)]
        return Agreement(len(estimates), _pearson(estimates, truth), count, len(leading[0] & leading[1]))

    def confirmed(self) -> Table:
        """The cells that were computed exactly, the largest exact effect first: estimated and exact.

        Raises:
            InputError: none was.
        """
        table = Table(*self.over, "to first order", "exact", title=str(self.agreement()))
        effect = self.exact - self.base
        order = [cell for cell in np.argsort(-np.abs(effect), axis=None) if np.isfinite(effect.flat[cell])]
        for cell in map(tuple, np.transpose(np.unravel_index(order, effect.shape)).tolist()):
            table.add_row(*self._named(cell).values(), decimal(self.effect[cell], 4), decimal(effect[cell], 4))
        return table

    def facts(self) -> str:
        """One line with the metric of the runs without a patch, and the agreement with exact cells."""
        agreement = f"; {self.agreement()}" if np.isfinite(self.exact).any() else ""
        return f"{super().facts()}; {self.how}{agreement}"

    def _facts(self) -> Iterator[str]:
        yield from super()._facts()
        yield self.how

    def to_dict(self) -> dict[str, Any]:
        """All attributes, as JSON can hold them."""
        own = {"rules": self.rules, "linearize_at": self.linearize_at, "steps": self.steps}
        return {**super().to_dict(), **own, "exact": self.exact if self.exact.size else None}


def _pearson(one: Numbers, other: Numbers) -> float:
    if len(one) < CORRELATED or not np.ptp(one) or not np.ptp(other):
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])
