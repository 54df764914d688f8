"""`SpecRows`: a bound spec on a list of texts, and the part of it that belongs to some of the rows."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.row_values import RowValues
from mionnx.bind.selection import Selection
from mionnx.errors import GradientError
from mionnx.graph.axes import TOKEN_AXES
from mionnx.inputs.token_batch import TokenBatch
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.kinds.kind import ValueShape
from mionnx.spec.metric import MetricSpec, Tokens


def differs_by_row(bound: BoundSpec) -> bool:
    """Whether a spec has limits of rows, or entries for each row or column of a batch."""
    metric = bound.spec.metric
    if metric is not None and (_listed(metric.answer) or _listed(metric.versus) or metric.tensors):
        return True
    return any(_differs(edit.axes, one) for edit, one in bound.edits)


def _differs(axes: Sequence[str], one: Intervention) -> bool:
    if one.rows is not None or _nested(one) or isinstance(one.positions, str):
        return True
    if one.rules.shape is ValueShape.DIRECTIONS:
        return False
    sizes = (zip(axes[::-1], value.shape[::-1], strict=False) for value in one.values)
    return any(size > 1 and axis in (*TOKEN_AXES, "batch") for pairs in sizes for axis, size in pairs)


def _nested(one: Intervention) -> bool:
    return isinstance(one.positions, tuple) and isinstance(one.positions[0], tuple)


def _listed(tokens: Tokens) -> bool:
    return tokens is not None and not isinstance(tokens, str | int | np.integer)


@dataclass(frozen=True)
class SpecRows:
    """A bound spec on a list of texts.

    Attributes:
        whole: all rows as one batch: what the rows, columns and values of the spec are counted in.
    """

    bound: BoundSpec
    whole: TokenBatch

    @cached_property
    def selections(self) -> list[Selection]:
        """The part of the whole that each intervention selects."""
        return self.bound.selections(self.whole)

    def of(self, rows: Sequence[int], width: int) -> HookSpec:
        """The spec of a batch of some rows, padded on the left.

        An intervention that is limited to other rows is not in it.

        Args:
            rows: their numbers in the whole.
            width: tokens of the longest of them.
        """
        part, spec = copy(self.bound.spec), self.bound.spec
        points = [point for point, _ in self.bound.hooks.interventions]
        parts = [self._intervention(selection, rows, width) for selection in self.selections]
        part.interventions = [(point, one) for point, one in zip(points, parts, strict=True) if one is not None]
        part.metric = None if spec.metric is None else _metric(spec.metric, rows)
        return part

    def _intervention(self, selection: Selection, rows: Sequence[int], width: int) -> Intervention | None:
        """An intervention of the part; None if it is limited to other rows."""
        one, values = selection.intervention, RowValues(selection, rows, width)
        if not values.chosen or (isinstance(one.positions, str) and not values.in_phase):
            return None
        changed: dict[str, Any] = {}
        if one.rows is not None:
            changed["rows"] = tuple(rows.index(row) for row in values.chosen)
        if _nested(one):
            changed["positions"] = _positions(selection, rows)
        if one.rules.shape is not ValueShape.DIRECTIONS and one.values:
            taken = tuple(map(values.of, one.values))
            changed |= {"several": taken} if one.value is None else {"value": taken[0]}
        return replace(one, **changed)


def _positions(selection: Selection, rows: Sequence[int]) -> tuple[Any, ...]:
    """The positions of some rows.

    Where the selected rows have unequal numbers of them, a value has an entry for every column, and their order says
    nothing: in ascending order they mean the same even where the rows of a part have equal numbers.
    """
    positions: Any = selection.intervention.positions
    absolute = selection.positions or {}
    if len({len(positions[row]) for row in absolute}) == 1:
        return tuple(positions[row] for row in rows)
    return tuple(tuple(sorted(absolute[row])) if row in absolute else positions[row] for row in rows)


def _metric(metric: MetricSpec, rows: Sequence[int]) -> MetricSpec:
    part = copy(metric)
    part.answer, part.versus = (_taken(tokens, rows) for tokens in (metric.answer, metric.versus))
    if metric.reference is not None and metric.reference.ndim == 2:
        part.reference = metric.reference[list(rows)]
    if metric.cotangent is not None:
        part.cotangent = (
            metric.cotangent[list(rows)] if metric.cotangent.ndim == 2 and metric.of is None else metric.cotangent
        )
        if part.cotangent is metric.cotangent and metric.cotangent.size > max(1, metric.cotangent.shape[-1]):
            raise GradientError(
                f"cotangent {list(metric.cotangent.shape)} has numbers for every position, which the rows of several "
                "batches do not share: run them as one batch, batch_size=None"
            )
    return part


def _taken(tokens: Tokens, rows: Sequence[int]) -> Tokens:
    entries: Any = tokens
    return [entries[row] for row in rows] if _listed(tokens) else tokens
