"""`HookCaches`: the results of a list of prompts, a `HookCache` for each of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, overload

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.plan import BoundCapture
from mionnx.errors import HookError, InputError
from mionnx.graph.axes import KEYS, TOKEN_AXES, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.brief import Brief, count, shape_of
from mionnx.machine.stored import Storable, Stored
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import GRADIENT
from mionnx.run.hook_cache import HookCache, Key


@typed(InputError, leave=["index"])
class HookCaches(Brief, Stored, Sequence[HookCache]):
    """The results of prompts that ran in batches, in the order given, without padding.

    A list of `HookCache`s: `caches[7]` is that of prompt 7, as `forward` gives it for that prompt alone, its first axis
    a batch of 1. A hook point in the place of a number gives its values of all prompts as one array, where they have
    one shape: `caches["resid_post", 2]` is [rows, 1, hidden] after `capture(..., positions=-1)`.

    Attributes:
        batches: the rows of each batch, in the order in which they ran.
    """

    INSIDE: ClassVar[tuple[type[Storable], ...]] = (HookCache,)

    def __init__(self, rows: Sequence[HookCache], batches: Sequence[Sequence[int]] = ()) -> None:
        self._rows, self.batches = [*rows], [[*batch] for batch in batches]

    def _contents(self) -> dict[str, Any]:
        return {"rows": self._rows, "batches": self.batches}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        return cls(**contents)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[HookCache]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> HookCache: ...
    @overload
    def __getitem__(self, index: slice) -> "HookCaches": ...
    @overload
    def __getitem__(self, index: Key) -> NDArray[Any]: ...
    def __getitem__(self, index: int | slice | Key) -> "HookCache | HookCaches | NDArray[Any]":
        if isinstance(index, slice):
            return HookCaches(self._rows[index])
        if isinstance(index, HookPoint | str | tuple):
            return self._stacked(str(index), lambda cache: cache.require(index))
        return self._rows[index]

    def output(self) -> NDArray[Any]:
        """The logits of all prompts, [rows, seq, vocab], or the part that `logits=` asked for.

        Raises:
            HookError: there are none, or prompts of unequal length have unequally many.
        """
        return self._stacked("logits", lambda cache: cache.output())

    @property
    def metric(self) -> NDArray[Any] | None:
        """The spec's metric, float32 [rows]; None if it has none."""
        metrics = [cache.metric for cache in self._rows if cache.metric is not None]
        return np.concatenate(metrics) if metrics else None

    def _stacked(self, name: str, value: Callable[[HookCache], NDArray[Any]]) -> NDArray[Any]:
        """One array of all rows.

        Raises:
            HookError: rows of unequal shapes.
        """
        arrays = [value(cache) for cache in self._rows]
        shapes = sorted({array.shape[1:] for array in arrays})
        if len(shapes) > 1:
            raise HookError(
                f"{name} is {list(shapes[0])} in one row and {list(shapes[-1])} in another: ask for positions= to have "
                "one shape in texts of any length, or read caches[row] one by one"
            )
        return np.concatenate(arrays)

    def _facts(self) -> Iterator[str]:
        yield count(len(self), "row")
        if self.batches:
            yield f"{len(self.batches)} batch{'es' * (len(self.batches) != 1)}"
        yield count(len(self._rows[0]) if self._rows else 0, "capture")

    def _lines(self) -> Iterator[str]:
        for number, cache in enumerate(self._rows):
            values = [f"{name} {shape_of(cache[name])}" for name in list(cache)[:2]]
            yield f"row {number}: {', '.join(values) or repr(cache)}"


def rows_of(cache: HookCache, bound: BoundSpec, batch: TokenBatch) -> list[HookCache]:
    """Cut the results of a padded batch into one `HookCache` a row, without padding.

    Args:
        batch: its tokens, padded on the left.

    Returns:
        caches of one row each; their arrays are parts of the batch's.
    """
    here = _on_cpu(cache)
    return [_Row(bound, batch, row).of(here) for row in range(batch.batch)]


def _on_cpu(cache: HookCache) -> HookCache:
    """The same results, copied from their device once."""
    grad = None if cache.grad is None else HookCache(None, dict(cache.grad), num_layers=cache.num_layers)
    logits = None if not cache.has_logits else cache.output()
    past, count = (cache.kv_cache, cache.state), cache.num_layers
    return HookCache(logits, dict(cache), *past, cache.top_ids, num_layers=count, metric=cache.metric, grad=grad)


class _Row:
    """One row of a batch."""

    def __init__(self, bound: BoundSpec, batch: TokenBatch, row: int) -> None:
        self.bound, self.row = bound, row
        own = int(batch.real[row].sum())
        keys = batch.attention_mask[row] == 1
        first = int(keys.argmax())
        self.tokens = slice(batch.seq - own, batch.seq)
        self.keys: slice | NDArray[np.bool_] = slice(first, batch.total) if keys[first:].all() else keys

    def of(self, cache: HookCache) -> HookCache:
        """The results of the row."""
        part = self.bound.logits
        axes = ("batch", "chosen" if part is not None and part.positions is not None else "seq", "last")
        logits = None if not cache.has_logits else self._cut(cache.output(), axes)
        top = None if cache.top_ids is None else self._cut(cache.top_ids, axes)
        return HookCache(
            logits,
            self._captured(cache, self.bound.captures),
            None if cache.kv_cache is None else cache.kv_cache.row(self.row),
            None if cache.state is None else cache.state.row(self.row),
            top,
            num_layers=cache.num_layers,
            metric=None if cache.metric is None else cache.metric[self.row : self.row + 1],
            grad=None if cache.grad is None else self._gradients(cache.grad),
        )

    def _gradients(self, grad: HookCache) -> HookCache:
        return HookCache(None, self._captured(grad, self.bound.gradients, GRADIENT), num_layers=grad.num_layers)

    def _captured(self, cache: Mapping[str, Any], captures: Sequence[BoundCapture], ending: str = "") -> dict[str, Any]:
        arrays = {}
        for capture in captures:
            name, axes = capture.node.output.removesuffix(ending), [*capture.node.axes]
            if capture.request.positions is not None:
                axes[sequence_axis(axes)] = "chosen"
            arrays[name] = self._cut(cache[name], axes)
        return arrays

    def _cut(self, value: NDArray[Any], axes: Sequence[str]) -> NDArray[Any]:
        """A value without other rows and padding."""
        places: list[Any] = [slice(self.row, self.row + 1)]
        places += [
            self.keys if axis == KEYS else self.tokens if axis in TOKEN_AXES else slice(None) for axis in axes[1:]
        ]
        return value[tuple(places)]
