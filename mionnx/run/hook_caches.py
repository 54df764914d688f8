"""Results of rows, cut out of a padded batch and joined again: a list in batches has those of one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.plan import BoundCapture
from mionnx.graph.axes import KEYS, TOKEN_AXES, sequence_axis
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.plan import GRADIENT
from mionnx.run.hook_cache import HookCache

CACHED = ("batch", "n_kv_heads", KEYS, "head_dim")  # axes of keys and values
Columns = slice | NDArray[np.bool_]
Arrays = dict[str, tuple[NDArray[Any], list[str]]]  # name -> values and their axes


def rows_of(cache: HookCache, bound: BoundSpec, batch: TokenBatch) -> list[HookCache]:
    """Cut the results of a padded batch into one `HookCache` a row, without padding."""
    logits = cache.output() if cache.has_logits else None  # copied from their device once
    captures = _arrays(cache, bound.captures)
    gradients = None if cache.grad is None else _arrays(cache.grad, bound.gradients, GRADIENT)
    logits_axes, layers = _logits_axes(bound), cache.num_layers

    def of(row: int) -> HookCache:
        columns = _Columns.of(batch, row)

        def part(value: NDArray[Any] | None, axes: Sequence[str]) -> NDArray[Any] | None:
            return None if value is None else value[(slice(row, row + 1), *columns.along(axes))]

        def parts(values: Arrays) -> dict[str, Any]:
            return {name: part(value, axes) for name, (value, axes) in values.items()}

        return HookCache(
            part(logits, logits_axes),
            parts(captures),
            None if cache.kv_cache is None else cache.kv_cache.row(row),
            None if cache.state is None else cache.state.row(row),
            part(cache.top_ids, logits_axes),
            num_layers=layers,
            metric=None if cache.metric is None else cache.metric[row : row + 1],
            grad=None if gradients is None else HookCache(None, parts(gradients), num_layers=layers),
        )

    return [of(row) for row in range(batch.batch)]


def joined(rows: Sequence[HookCache], bound: BoundSpec, batch: TokenBatch) -> HookCache:
    """Join the results of single rows as those of one batch, padded with 0.

    Args:
        rows: the results; each gives up its logits.
    """
    places, first = [_Columns.of(batch, row) for row in range(batch.batch)], rows[0]

    def put(values: Sequence[Any], axes: Sequence[str]) -> NDArray[Any]:
        sizes = [batch.total if axis == KEYS else batch.seq if axis in TOKEN_AXES else None for axis in axes[1:]]
        shape = [own if size is None else size for own, size in zip(values[0].shape[1:], sizes, strict=True)]
        array = np.zeros((len(rows), *shape), values[0].dtype)
        for row, (place, value) in enumerate(zip(places, values, strict=True)):
            columns = place.along(axes)
            if any(isinstance(one, np.ndarray) for one in columns):  # padding between tokens, or behind them
                columns = np.ix_(*(np.arange(size)[one] for size, one in zip(shape, columns, strict=True)))
            array[row][columns] = value[0]
        return array

    def captured(caches: Sequence[HookCache], captures: Sequence[BoundCapture], ending: str = "") -> dict[str, Any]:
        return {name: put([cache[name] for cache in caches], axes) for name, axes in _axes(captures, ending)}

    def past(caches: Sequence[Any], join: Callable[[Sequence[Any]], NDArray[Any]]) -> Any:
        if caches[0] is None:
            return None
        layers = zip(*(cache.layers for cache in caches), strict=True)
        parts = [caches[0].layer_of(join(values) for values in zip(*layer, strict=True)) for layer in layers]
        return type(caches[0])(parts, batch.attention_mask)

    logits_axes = _logits_axes(bound)
    grad = [row.grad for row in rows if row.grad is not None]
    return HookCache(
        None if not first.has_logits else put([row.into_output() for row in rows], logits_axes),
        captured(rows, bound.captures),
        past([row.kv_cache for row in rows], lambda values: put(values, CACHED)),
        past([row.state for row in rows], np.concatenate),
        None if first.top_ids is None else put([row.top_ids for row in rows], logits_axes),
        num_layers=first.num_layers,
        metric=None if first.metric is None else np.concatenate([np.asarray(row.metric) for row in rows]),
        grad=HookCache(None, captured(grad, bound.gradients, GRADIENT), num_layers=first.num_layers) if grad else None,
    )


def _arrays(cache: HookCache, captures: Sequence[BoundCapture], ending: str = "") -> Arrays:
    return {name: (cache[name], axes) for name, axes in _axes(captures, ending)}


def _logits_axes(bound: BoundSpec) -> tuple[str, str, str]:
    part = bound.logits
    return ("batch", "chosen" if part is not None and part.positions is not None else "seq", "last")


def _axes(captures: Sequence[BoundCapture], ending: str) -> list[tuple[str, list[str]]]:
    """Names of captured values and their axes; "chosen" positions have no padding."""
    named = []
    for capture in captures:
        axes = [*capture.node.axes]
        if capture.request.positions is not None:
            axes[sequence_axis(axes)] = "chosen"
        named.append((capture.node.output.removesuffix(ending), axes))
    return named


@dataclass(frozen=True)
class _Columns:
    """The columns of one row's tokens, and of the keys that they read."""

    tokens: Columns
    keys: Columns

    @classmethod
    def of(cls, batch: TokenBatch, row: int) -> Self:
        return cls(_run(batch.real[row]), _run(batch.attention_mask[row] == 1))

    def along(self, axes: Sequence[str]) -> tuple[Any, ...]:
        """The row's own entries of each axis but the first."""
        own = {**dict.fromkeys(TOKEN_AXES, self.tokens), KEYS: self.keys}
        return tuple(own.get(axis, slice(None)) for axis in axes[1:])


def _run(real: NDArray[np.bool_]) -> Columns:
    """The columns of a row's tokens: a slice where they follow each other."""
    first = int(real.argmax())
    last = first + int(real.sum())
    return slice(first, last) if real[first:last].all() else real
