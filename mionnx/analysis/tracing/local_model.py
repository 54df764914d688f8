"""`LocalModel`: a model whose MLPs' features are those of transcoders, as two open graphs.

Everything but what is linear in the features, the errors and the tokens of a prompt is a constant of that prompt: the
local replacement model of Ameisen et al. 2025.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.attribution.linear_parts import LinearParts
from mionnx.analysis.features.transcoder_set import NORMED_INPUT, TranscoderSet
from mionnx.analysis.lens.token_vectors import Vocabulary
from mionnx.analysis.tracing.prefixes import Prefixes
from mionnx.analysis.weights.weights import weights
from mionnx.engine.options import Options
from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.report import Report
from mionnx.inputs.lacking import refuse_normed_stream, refuse_several_streams, refuse_without_vocabulary
from mionnx.machine.once import Once, once_property
from mionnx.rewrite.gradient.way_back import (
    EMBED_POINT,
    FINAL_POINT,
    FROZEN_PATTERN,
    ROW_PRODUCTS,
    TOKEN_PRODUCTS,
    Attention,
    TwoGraphs,
    way_back,
)
from mionnx.rewrite.plan import Plan
from mionnx.run.open_graphs import OpenGraph
from mionnx.run.runner import Runner
from mionnx.run.segments import Rows, Segments

Arrays = dict[str, NDArray[Any]]
Kind = TypeVar("Kind")
LARGE_CONSTANTS = 2**27  # bytes of values, behind which the engine gives its own memory back
FLOAT_BYTES, SCORE_COPIES = 4, 3  # bytes of a number; scores as computed, masked, as a pattern
PASSES = 3  # of other lengths, that show what is a cut of what
READ = 2**14  # tokens whose columns of the unembedding are in memory at once


class Ways:
    """The graphs of one model, by the hook points that transcoders read and stand for; open one of each kind."""

    def __init__(self, model: HookedModel, options: Options) -> None:
        self.model = model
        self._graphs: Once[Any, TwoGraphs] = Once()
        self._forward: Once[Any, OpenGraph] = Once()
        self._back: Once[Any, OpenGraph] = Once()
        self._prefixes: Once[Any, Prefixes] = Once()

    def graphs(self, key: Any, make: Callable[[], TwoGraphs]) -> TwoGraphs:
        """Both graphs of a key; others go."""
        return self._only(self._graphs, key, make)

    def forward(self, key: Any, make: Callable[[], OpenGraph]) -> OpenGraph:
        """The open graph forwards; others are closed, since each holds weights."""
        return self._only(self._forward, key, make)

    def back(self, key: Any, make: Callable[[], OpenGraph]) -> OpenGraph:
        """The open graph of the way back; others are closed."""
        return self._only(self._back, key, make)

    def prefixes(self, key: Any, make: Callable[[], Prefixes]) -> Prefixes:
        """How the constants of a graph follow from those of more tokens."""
        return self._only(self._prefixes, key, make)

    @staticmethod
    def _only(store: Once[Any, Kind], key: Any, make: Callable[[], Kind]) -> Kind:
        store.keep(lambda other: other == key)
        return store.get(key, make)

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

    def __init__(
        self,
        model: Runner,
        transcoders: TranscoderSet,
        rules: str = FROZEN_PATTERN,
        end: str = FINAL_POINT,  # the hook point that targets are linear in
        layers: int | None = None,  # the first layers, whose features lead there; of logits all of them
    ) -> None:
        self.model, self.transcoders, self.rules, self.end = model, transcoders, rules, end
        self.layers, self.logits = model.num_layers if layers is None else layers, layers is None
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
        self.model.opened(Segments).refuse_crossings("an attribution graph")
        if self.logits:
            _ = self.model.opened(LinearParts).factor  # refuses a head that transforms what it reads
        if hooked.metadata.dtype != "float32":
            raise InputError(
                f"{hooked.name} computes in {hooked.metadata.dtype}; effects are sums of many terms, in float32: "
                'from_pretrained(..., dtype="float32"), or "int4"'
            )
        if len(coders) != self.model.num_layers:
            raise InputError(f"transcoders of {len(coders)} layers, for a model of {self.model.num_layers}")
        widths = {coders.d_in, coders.d_out}
        if widths != {self.model.hidden_size}:
            raise InputError(f"transcoders of width {coders.d_in}, for a stream of {self.model.hidden_size}")
        for point in (*self.read_at, *self.write_at, self.end):
            if point not in hooked.metadata.hooks:
                raise HookError(f"{hooked.name} has no hook point {point!r}{nearest(point, hooked.metadata.hooks)}")

    def graphs(self, gathered: bool = False, attention: Attention | None = None) -> TwoGraphs:
        """Both graphs.

        Args:
            gathered: whether the way back gathers the vectors of sources from rows.
            attention: a layer, whose queries and keys are the ends of the way, and their hook points.
        """
        hooked, coders = self.model.hooked, self.transcoders
        hooked.need_weights("an attribution graph")
        points = self.read_at, self.write_at, self.model.hidden_size, coders.skips
        ends = {"end": self.end, "logits": self.logits and not attention, "attention": attention}
        how: dict[str, Any] = {**ends, "gathered": gathered, "rules": self.rules}
        make = partial(way_back, hooked.proto, hooked.metadata.hooks, *points, **how)
        return self.ways.graphs((*self._points_read, *how.values()), make)

    @property
    def _points_read(self) -> tuple[Any, ...]:
        coders = self.transcoders
        return coders.hook, coders.hook_out, coders.skips, self.layers, self.end, self.logits

    def _open(self, graph: bytes) -> OpenGraph:
        pool = self.model.variants
        pool.settle(pool.packs(1))
        options = pool.options if pool.packs_gradients else replace(pool.options, prepack=False)
        program = pool.engine.open(graph, self.model.hooked.folder, options)
        return OpenGraph(Plan(), program, Report(), graph, pool.weights, options)

    def run(
        self, ids: Sequence[int], captures: bool = True, attention: Attention | None = None
    ) -> tuple[Arrays, Arrays]:
        """One text forwards: what the way back reads, and captured values."""
        graphs = self.graphs(False, attention)
        forward = self.ways.forward(self._forward_key(attention), lambda: self._open(graphs.forward))
        outputs = [*graphs.constants, *(graphs.captures if captures else ())]
        feeds = self.model.opened(Segments).feeds(forward, Rows(np.asarray(ids, np.int64)[None]), {})
        # Patterns of long texts are large: they stay where the engine has them, and the way back reads them there.
        values = forward.program.run_on_device(outputs, feeds)
        constants = {name: values.pop(name) for name in graphs.constants}
        points = [*self.read_at, *self.write_at, EMBED_POINT, *graphs.captures] if captures else []
        seen = {name: np.asarray(constants[name] if name in constants else values[name]) for name in points}
        if sum(array.nbytes for array in constants.values()) > LARGE_CONSTANTS:
            self.model.variants.engine.release()  # what the engine took besides, as far as it gives it back
        return constants, seen

    def _forward_key(self, attention: Attention | None = None) -> tuple[Any, ...]:
        return (*self._points_read, self.rules, attention)

    def first_tokens(self, ids: Sequence[int], end: int, constants: Arrays) -> Arrays:
        """What the way back reads for the first `end` tokens of a text; `constants` are those of all, or none."""

        def computed(tokens: int) -> Arrays:
            return self.run(ids[:tokens], captures=False)[0]

        def seen() -> Prefixes:
            return Prefixes([(length, constants), *((n, computed(n)) for n in (length - 1, length - 2))])

        length, cut = len(ids), None
        # a text of few tokens always as computed: its bits are not to depend on what ran before
        if constants and PASSES < length > end:
            cut = self.ways.prefixes(self._forward_key(), seen).cut(constants, length, end)
        return cut or computed(end)

    def taken(self, seq: int) -> int:
        """Bytes that the engine takes to run a text, and keeps as long as one of its values is there.

        They are logits, scores of one layer as they become a pattern, and captured values.
        """
        sizes = self.model.hooked.metadata.sizes
        captured = (2 * self.layers + 1) * self.model.hidden_size
        scores = SCORE_COPIES * self.model.num_heads * seq
        return FLOAT_BYTES * seq * (sizes.vocab_size * self.logits + scores + captured)

    def back(self, feeds: Mapping[str, Any], gathered: bool, attention: Attention | None = None) -> Arrays:
        """Run the way back: products of the rows of `feeds` with all sources, by name."""
        layers = self.layers if attention is None else attention[0]
        outputs = [*(ROW_PRODUCTS(i) for i in range(layers)), TOKEN_PRODUCTS]
        key = (*self._points_read, gathered, self.rules, attention)
        back = self.ways.back(key, lambda: self._open(self.graphs(gathered, attention).back))
        values = {name: np.array(value) for name, value in back.program.run_on_device(outputs, feeds).items()}
        if sum(value.nbytes for value in feeds.values()) > LARGE_CONSTANTS:
            self.model.variants.engine.release()  # calls with other numbers of rows would leave gaps between them
        return values

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

        A column of the unembedding less another one's or, where versus is -1, less the mean over the vocabulary, times
        the factor that the head gives all logits.
        """
        matrix = self.model.opened(Vocabulary).unembedding
        columns = np.asarray(matrix[:, targets.ravel()].T, np.float32).reshape(len(targets), 2, -1)
        others = np.where(targets[:, 1:] < 0, self.ways.mean_unembedding, columns[:, 1])
        return np.ascontiguousarray((columns[:, 0] - others) * np.float32(self.model.opened(LinearParts).factor))

    def written(self, layer: int, feature: int) -> NDArray[np.float32]:
        """What a feature writes in all at activation 1, [hidden]."""
        return np.asarray(self.transcoders.layer(layer).decoder[feature], np.float32).sum(axis=0)
