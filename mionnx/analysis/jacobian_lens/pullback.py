"""`Pullback`: directions of the last residual stream taken back to earlier layers, all rows at once.

J^T v of one text: the mean over source positions of the derivative of (v times the sum of the last stream over target
positions) by the stream of a layer. The text runs forwards once, and every row of numbers back
(`mionnx.rewrite.gradient.rows`). Where a family's graph does not take rows of its own on the way back, each row is one
of a batch of `gradients`: the same numbers, with the text computed once a row.
"""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.gradients.gradients import gradients
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.lacking import refuse_several_streams, refuse_without_vocabulary
from mionnx.rewrite.gradient.rows import mean_name
from mionnx.rewrite.plan import METRIC_SEED, METRIC_WEIGHTS, GradientNode, Gradients
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.run.segments import Rows, Segments

AGREE = 1e-3  # of the largest number: rows together and rows apart
Numbers = NDArray[np.float32]


class Pullback:
    """The way back of one model, from the last stream to those of some layers."""

    def __init__(self, model: Runner, layers: Sequence[int], rules: str) -> None:
        refuse_without_vocabulary(model.hooked, "a lens")
        refuse_several_streams(model.hooked, "a lens")
        if model.bidirectional:
            raise InputError(
                f"a Jacobian lens counts on targets behind their sources, and {model.hooked.name} reads texts in both "
                "directions"
            )
        self.model, self.rules = model, rules
        self.of = stream(model.num_layers - 1)
        self.by = [stream(layer) for layer in layers]
        self.together: bool | None = None  # whether rows go back at once; None before the first text tells

    def rows(self, ids: NDArray[np.int64], numbers: Numbers, at: NDArray[np.int64]) -> Numbers:
        """Rows [rows, hidden] of numbers at positions `at` of a text, taken back: [layers, rows, hidden]."""
        if self.together is None:
            self.together = self._go_together(ids, numbers[:1], at)
        return self._at_once(ids, numbers, at) if self.together else self._one_by_one(ids, numbers, at)

    def _go_together(self, ids: NDArray[np.int64], row: Numbers, at: NDArray[np.int64]) -> bool:
        """Whether two rows together give what each gives alone: a graph with one row is an ordinary gradient's."""
        pair = np.concatenate([row, row[:, ::-1]])
        try:
            both = self._at_once(ids, pair, at)
            apart = np.concatenate([self._at_once(ids, one[None], at) for one in pair], axis=1)
        except Exception as error:  # mionnx' own, or of an engine: shapes of one row where there are several
            name = self.model.hooked.name
            warnings.warn(f"{name} takes its rows back as a batch, which is slower: {error}", stacklevel=2)
            return False
        return both.shape == apart.shape and bool(np.abs(both - apart).max() <= AGREE * np.abs(apart).max())

    def _at_once(self, ids: NDArray[np.int64], numbers: Numbers, at: NDArray[np.int64]) -> Numbers:
        segments = self.model.opened(Segments)
        request = Gradients("cotangent", tuple(map(GradientNode, self.by)), self.rules, self.of, rows=True)
        piece = segments.open((), (), gradients=request)
        weights = np.zeros((1, len(ids)), np.float32)
        weights[:, at] = 1 / len(at)
        ends = [mean_name(name) for name in self.by]
        feeds: dict[str, Any] = {METRIC_SEED: _seed(ids, numbers, at), METRIC_WEIGHTS: weights}
        means = segments.compute(piece, Rows(ids[None]), ends, feeds)
        return np.stack([means[end][:, 0].astype(np.float32) for end in ends])

    def _one_by_one(self, ids: NDArray[np.int64], numbers: Numbers, at: NDArray[np.int64]) -> Numbers:
        batch, seed = np.repeat(ids[None], len(numbers), axis=0), _seed(ids, numbers, at)
        cache = gradients(self.model, batch, self.by, of=self.of, cotangent=seed, rules=self.rules)
        grad = cast(HookCache, cache.grad)
        return np.stack([grad[name][:, at].astype(np.float32).mean(axis=1) for name in self.by])


def stream(layer: int) -> str:
    """The hook point of a layer's output."""
    return str(HookPoint.ResidPost(layer))


def _seed(ids: NDArray[np.int64], numbers: Numbers, at: NDArray[np.int64]) -> Numbers:
    seed = np.zeros((len(numbers), len(ids), numbers.shape[1]), np.float32)
    seed[:, at] = numbers[:, None]
    return seed
