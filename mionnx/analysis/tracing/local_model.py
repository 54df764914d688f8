"""`LocalModel`: a model whose MLPs' features are those of transcoders, as two open graphs.

Everything but what is linear in the features, the errors and the tokens of a prompt is a constant of that prompt: the
local replacement model of Ameisen et al. 2025.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.transcoder_set import NORMED_INPUT, TranscoderSet
from mionnx.analysis.lens.token_vectors import Vocabulary
from mionnx.analysis.weights.weights import weights
from mionnx.engine.options import Options
from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.graph.report import Report
from mionnx.inputs.lacking import refuse_normed_stream, refuse_several_streams, refuse_without_vocabulary
from mionnx.machine.once import Once, once_property
from mionnx.rewrite.gradient.way_back import TwoGraphs, way_back
from mionnx.rewrite.plan import Plan
from mionnx.run.open_graphs import OpenGraph
from mionnx.run.runner import Runner
from mionnx.run.segments import Rows, Segments

Arrays = dict[str, NDArray[Any]]
READ = 2**14  # tokens whose columns of the unembedding are in memory at once


@dataclass(frozen=True)
class OpenWays:
    """Both graphs of a model, open."""

    graphs: TwoGraphs
    forward: OpenGraph
    back: OpenGraph


class Ways:
    """The open graphs of one model, by the hook points that transcoders read and stand for."""

    def __init__(self, model: HookedModel, options: Options) -> None:
        self.model = model
        self._open: Once[Any, OpenWays] = Once()

    def get(self, key: Any, make: Callable[[], OpenWays]) -> OpenWays:
        """Those of a key; others are closed, since each holds weights."""
        self._open.keep(lambda other: other == key)
        return self._open.get(key, make)

    @once_property
    def mean_unembedding(self) -> NDArray[np.float32]:
        """The mean over the vocabulary of the unembedding's columns, [hidden]."""
        matrix = Vocabulary(self.model, Options()).unembedding
        total = np.zeros(len(matrix))
        for begin in range(0, matrix.shape[1], READ):
            total += matrix[:, begin : begin + READ].astype(np.float32).sum(axis=1, dtype=np.float64)
        return (total / matrix.shape[1]).astype(np.float32)


class LocalModel:
    """A model with transcoders."""

    def __init__(self, model: Runner, transcoders: TranscoderSet) -> None:
        self.model, self.transcoders, self.layers = model, transcoders, model.num_layers
        self.ways = model.opened(Ways)
        self.read_at, self.write_at = self._points(transcoders.hook), self._points(transcoders.hook_out)
        self._check()

    def _points(self, pattern: str) -> list[str]:
        normed = pattern == NORMED_INPUT
        return [str(HookPoint.MlpPre(i)) if normed else pattern.format(i) for i in range(self.layers)]

    def _check(self) -> None:
        """Refuse what cannot be traced, before anything runs."""
        hooked, coders = self.model.hooked, self.transcoders
        refuse_without_vocabulary(hooked, "an attribution graph")
        refuse_normed_stream(hooked, "an attribution graph")
        if self.model.bidirectional:
            raise InputError(f"an attribution graph counts on causal attention, and {hooked.name} reads both ways")
        if any(layer.recurrence for layer in hooked.metadata.layers):
            raise InputError(f"{hooked.name} has recurrent layers, which have no patterns to hold: not traced")
        refuse_several_streams(hooked, "an attribution graph")
        if hooked.metadata.dtype != "float32":
            raise InputError(
                f"{hooked.name} computes in {hooked.metadata.dtype}; effects are sums of many terms, in float32: "
                'from_pretrained(..., dtype="float32"), or "int4"'
            )
        if len(coders) != self.layers:
            raise InputError(f"transcoders of {len(coders)} layers, for a model of {self.layers}")
        widths = {coders.d_in, coders.d_out}
        if widths != {self.model.hidden_size}:
            raise InputError(f"transcoders of width {coders.d_in}, for a stream of {self.model.hidden_size}")
        for point in (*self.read_at, *self.write_at):
            if point not in hooked.metadata.hooks:
                raise HookError(f"{hooked.name} has no hook point {point!r}{nearest(point, hooked.metadata.hooks)}")

    @once_property
    def opened(self) -> OpenWays:
        """Both graphs, opened on first use of these hook points."""
        coders = self.transcoders
        return self.ways.get((coders.hook, coders.hook_out, coders.skips), self._open)

    def _open(self) -> OpenWays:
        hooked, pool = self.model.hooked, self.model.variants
        hooked.need_weights("an attribution graph")
        graphs = way_back(
            hooked.proto,
            hooked.metadata.hooks,
            self.read_at,
            self.write_at,
            self.model.hidden_size,
            self.transcoders.skips,
            [LOGITS],
        )
        pool.settle(pool.packs(1))
        options = pool.options if pool.packs_gradients else replace(pool.options, prepack=False)
        forward, back = (
            OpenGraph(Plan(), pool.engine.open(one, hooked.folder, options), Report(), one, pool.weights, options)
            for one in (graphs.forward, graphs.back)
        )
        return OpenWays(graphs, forward, back)

    def constants(self, ids: Sequence[int]) -> Arrays:
        """What the way back reads of one text."""
        return self._run(ids, self.opened.graphs.constants)

    def run(self, ids: Sequence[int]) -> Arrays:
        """One text forwards: the same, values at hook points, and logits."""
        graphs = self.opened.graphs
        return self._run(ids, [*graphs.constants, *graphs.captures])

    def _run(self, ids: Sequence[int], outputs: Sequence[str]) -> Arrays:
        rows = Rows(np.asarray(ids, np.int64)[None])
        return self.model.opened(Segments).compute(self.opened.forward, rows, outputs, {})

    def back(self, outputs: Sequence[str], feeds: Mapping[str, Any]) -> Arrays:
        """Run the way back."""
        return self.opened.back.program.run(outputs, feeds)

    def scale(self, layer: int) -> NDArray[np.float32] | None:
        """What the value at the hook point is divided by before features read it; None for nothing."""
        if self.transcoders.hook != NORMED_INPUT:
            return None
        scale = np.asarray(weights(self.model).reader.read("ln2_w", layer), np.float32)
        if not scale.all():
            raise InputError(f"layer {layer}: the norm's weight has zeros, so that features cannot read before it")
        return scale

    def directions(self, targets: NDArray[np.int64]) -> NDArray[np.float32]:
        """What logits are of the final norm's output, [targets, hidden], of pairs [targets, 2] of answer and versus.

        A column of the unembedding less another one's or, where versus is -1, less the mean over the vocabulary.
        """
        matrix = self.model.opened(Vocabulary).unembedding
        columns = np.asarray(matrix[:, targets.ravel()].T, np.float32).reshape(len(targets), 2, -1)
        others = np.where(targets[:, 1:] < 0, self.ways.mean_unembedding, columns[:, 1])
        return np.ascontiguousarray(columns[:, 0] - others)

    def written(self, layer: int, feature: int) -> NDArray[np.float32]:
        """What a feature writes in all at activation 1, [hidden]."""
        return np.asarray(self.transcoders.layer(layer).decoder[feature], np.float32).sum(axis=0)

    def top_tokens(self, vectors: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """The tokens whose logits vectors of the stream [n, hidden] raise most through the final norm, [n, k]."""
        graph = weights(self.model).graph
        norm = graph.norm("ln_final").weight if graph.has_norm("ln_final", 0) else None
        wide = vectors if norm is None else vectors * np.asarray(norm, np.float32)
        matrix, best, tops = (
            self.model.opened(Vocabulary).unembedding,
            np.zeros((len(vectors), 0)),
            np.zeros((len(vectors), 0), np.int64),
        )
        for begin in range(0, matrix.shape[1], READ):
            part = wide @ matrix[:, begin : begin + READ].astype(np.float32)
            numbers = np.broadcast_to(begin + np.arange(part.shape[1]), part.shape)
            best, tops = np.concatenate([best, part], axis=1), np.concatenate([tops, numbers], axis=1)
            order = np.argsort(-best, axis=1, kind="stable")[:, :k]
            best, tops = np.take_along_axis(best, order, 1), np.take_along_axis(tops, order, 1)
        return tops
