"""`Segments`: a model in pieces, each a graph of its own that is run from some values to others.

A piece begins at values that are fed and ends at values that are asked for; it is opened when it is first run, and
reads the weights between the two alone: all pieces of a model together hold the weights of one model.

The pieces in execution order are the embedding (-1), the layers, and the head (`layers`). A layer begins at the
residual stream before it and at whatever else crosses there; so a row that is patched at layer 7 starts at layer 7. A
row whose first tokens equal those of another run continues from that run's keys and values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.engine import Program
from mionnx.engine.options import Options
from mionnx.errors import InputError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.lacking import refuse_several_streams, refuse_without_cache
from mionnx.machine.once import once_property
from mionnx.rewrite.plan import LOGIT_COLUMNS, LOGIT_TOKENS, CaptureNode, Edit, Gradients, Outputs, Plan
from mionnx.run.call_graph import in_blocks
from mionnx.run.open_graphs import OpenGraph, OpenGraphs

Arrays = dict[str, NDArray[Any]]
Edits = Mapping[Edit, Arrays]  # an intervention -> the inputs that it reads
EMBEDDING = -1
OPEN = 8  # pieces of a layer that stay open: with other interventions and captures it is another one
NO_OUTPUTS = Outputs(logits=False, carried=False)


@dataclass(frozen=True)
class Rows:
    """The tokens of some rows of equal length, without padding."""

    ids: NDArray[np.int64]
    start: int = 0
    # graph input -> keys or values of the positions before `start`, [1, n_kv_heads, seq, head_dim]
    past: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    types: NDArray[np.int64] | None = None  # [seq], which of two texts a token belongs to

    @classmethod
    def blank(cls, count: int, seq: int) -> Self:
        """Rows for a piece behind the embedding, whatever their tokens."""
        return cls(np.zeros((count, seq), np.int64))  # some families read their shape even in the last nodes

    @property
    def count(self) -> int:
        return len(self.ids)


class Segments:
    """The pieces of one model; `model.opened(Segments)` has those with the model's own options."""

    def __init__(self, model: HookedModel, options: Options) -> None:
        self.model, self.layers = model, model.metadata.sizes.num_layers
        self.end = str(HookPoint.ResidPost(self.layers - 1))  # which the head reads
        many = options.for_many_graphs(OPEN * (self.layers + 3))
        self.variants = OpenGraphs(model, replace(many, prepack=options.prepack))

    @classmethod
    def of_sweep(cls, model: HookedModel, options: Options) -> Self:
        """The pieces for many structures and rows: nothing is packed."""
        if not model.metadata.reads_whole:  # whole texts are computed in every layer, and no keys are shared
            refuse_without_cache(model, "a sweep")
        refuse_several_streams(model, "a sweep")
        return cls(model, options.for_many_graphs(1))

    @once_property
    def flow(self) -> Dataflow:
        """The nodes of the whole graph."""
        return Dataflow(self.model.proto)

    def inputs_of(self, layer: int) -> tuple[str, ...]:
        """Names of the values that a piece begins with; behind the head, the logits."""
        if layer == EMBEDDING:
            return ()
        if layer > self.layers:
            return (LOGITS,)
        cut = self._cuts[layer]
        return cut, *(name for name in self._crossings[layer] if name != cut)

    def refuse_crossings(self, what: str) -> None:
        """Refuse what follows the residual stream alone, where a layer reads more of earlier ones than that."""
        for layer in range(self.layers + 1):
            stream, *others = self.inputs_of(layer)
            if others:
                family, reader = self.model.metadata.family, f"layer {layer}" if layer < self.layers else "the head"
                raise InputError(
                    f"{what} follows the residual stream, and {reader} of this {family} reads {', '.join(others)} "
                    f"besides {stream}. Patching sweeps, ablation, captures and gradients work"
                )

    @property
    def _cuts(self) -> list[str]:
        return [*(str(HookPoint.ResidPre(layer)) for layer in range(self.layers)), self.end]

    @once_property
    def _crossings(self) -> list[tuple[str, ...]]:
        return self.flow.crossings([[cut] for cut in self._cuts], [LOGITS], [str(HookPoint.Embed)])

    @once_property
    def after_attention(self) -> tuple[str, ...]:
        """Inputs of the last layer's second piece, behind attention; empty where it cannot be cut."""
        # Where only the last position is read in the end, that piece and the head run at it alone.
        last = self.layers - 1
        names = (str(HookPoint.AttnZ(last)), str(HookPoint.ResidPre(last)))
        # A mixer beside attention reads all positions of the stream too (Falcon-H1).
        mixes = self.model.metadata.layers[last].recurrence is not None
        apart = not mixes and {*names} <= self.model.metadata.hooks.keys() and self.inputs_of(last) == names[1:]
        return names if apart else ()

    def keys_of(self, layer: int) -> dict[str, str]:
        """A layer's keys and values, as its cache takes them -> the graph inputs that take them as past."""
        if layer == EMBEDDING:
            return {}
        rotated, plain = str(HookPoint.AttnRotK(layer)), str(HookPoint.AttnK(layer))
        key = rotated if rotated in self.model.metadata.hooks else plain
        if key not in self.model.metadata.hooks:
            return {}
        inputs = KEYS_AND_VALUES.layer_inputs(layer)
        # Where keys are normed behind their rotation (Llama 4), the cache takes what no hook point has.
        added = [
            self._added.get(past, own) for past, own in zip(inputs, (key, str(HookPoint.AttnV(layer))), strict=True)
        ]
        return dict(zip(added, inputs, strict=True))

    @once_property
    def _added(self) -> dict[str, str]:
        """Graph input of a past -> the value that is put behind it; of caches that are a plain concatenation."""
        ends = [(port.past, self.flow.producer(port.present)) for port in self.model.metadata.ports if port.positional]
        return {
            past: end.input[1]
            for past, end in ends
            if end is not None and end.op_type == "Concat" and len(end.input) == 2 and end.input[0] == past
        }

    def last_position(self, rows: Rows) -> Rows:
        """The same rows, to be computed at the last position alone behind the last attention."""
        seq = rows.ids.shape[1]  # no graph there reads keys and values; some read how many there are
        shapes = self.model.metadata.past_shapes(1, seq)
        names = (name for layer in range(self.layers) for name in self.keys_of(layer).values())
        return Rows(rows.ids, seq - 1, {name: np.zeros(shapes[name], self.model.past_dtypes[name]) for name in names})

    def layer(
        self,
        layer: int,
        rows: Rows,
        stream: Arrays,
        edits: Edits | None = None,
        ends: Sequence[str] = (),
        beside: Sequence[str] = (),
        inputs: Mapping[str, NDArray[Any]] | None = None,
    ) -> tuple[Arrays, Arrays]:
        """Run one piece from `inputs_of(layer)`; returns the values of `inputs_of(layer + 1)`, and those of `ends`."""
        following = self.inputs_of(layer + 1)
        computed = [name for name in following if name not in stream]  # others cross several layers and do not change
        values = self.run(rows, stream, [*dict.fromkeys([*computed, *ends])], edits, NO_OUTPUTS, inputs, beside)
        after = {name: stream[name] if name in stream else values[name] for name in following}
        return after, {name: values[name] for name in ends}

    def logits(
        self,
        rows: Rows,
        stream: Arrays,
        edits: Edits | None = None,
        last: bool = True,
        tokens: NDArray[np.int64] | None = None,
    ) -> NDArray[Any]:
        """Compute the logits, [rows, seq or 1, vocab or tokens], from `inputs_of(layers)` or `after_attention`."""
        some = tokens is not None
        outputs = Outputs(last=last, of_tokens=some, only_these=some, carried=False)
        inputs = {} if tokens is None else {LOGIT_TOKENS: tokens}
        return self.run(rows, stream, [LOGITS], edits, outputs, inputs)[LOGITS]

    def values_at(
        self,
        rows: Rows,
        stream: Arrays,
        edits: Edits | None = None,
        at: int | None = None,
        tokens: NDArray[np.int64] | None = None,
    ) -> NDArray[Any]:
        """The part of the main output that a metric reads, [rows, columns or tokens].

        Args:
            at: the position of the logits; the last if left out, and none where a text has one row of numbers.
        """
        metadata = self.model.metadata
        if metadata.positional and at is None and metadata.head != "span":
            return self.logits(rows, stream, edits, tokens=tokens)[:, -1]
        inputs = {} if tokens is None else {LOGIT_TOKENS: tokens}
        if at is not None:
            inputs[LOGIT_COLUMNS] = np.full((rows.count, 1), at)
        some = tokens is not None and metadata.head != "span"
        outputs = Outputs(
            at_positions=at is not None, of_tokens=some, only_these=some and at is not None, carried=False
        )
        values = self.run(rows, stream, [LOGITS], edits, outputs, inputs)[LOGITS]
        values = values.reshape(rows.count, -1)  # of a span: start and end of each token in turn
        return values[:, tokens] if tokens is not None and not some else values

    def open(
        self,
        starts: Sequence[str],
        ends: Sequence[str],
        edits: Sequence[Edit] = (),
        outputs: Outputs = NO_OUTPUTS,
        gradients: Gradients | None = None,
        tokens: int = 0,
    ) -> OpenGraph:
        """Open the piece between some values and others, "logits" among them.

        Args:
            tokens: of a row; a long one's attention is computed in blocks of queries.
        """
        captures = tuple(CaptureNode(name) for name in ends if name != LOGITS)
        outputs = replace(outputs, logits=LOGITS in ends)
        plan = Plan(tuple(edits), captures, outputs, tuple(starts), gradients=gradients)
        return self.variants.get(in_blocks(plan, self.variants, tokens))

    def run(
        self,
        rows: Rows,
        feeds: Arrays,
        ends: Sequence[str],
        edits: Edits | None = None,  # interventions with the inputs that they read
        outputs: Outputs = NO_OUTPUTS,
        inputs: Mapping[str, NDArray[Any]] | None = None,
        beside: Sequence[str] = (),  # values that other calls ask for: one graph then serves them all
    ) -> Arrays:
        """Run the piece between the values fed, or the tokens, and some others; "logits" is one."""
        edits = edits or {}
        changed = {edit.hook for edit in edits}  # such a value is fed as it was before
        values = {f"{name}.before" if name in changed else name: value for name, value in feeds.items()}
        for own in (*edits.values(), inputs or {}):
            values |= own
        piece = self.open(
            tuple(feeds), [*dict.fromkeys([*beside, *ends])], tuple(edits), outputs, tokens=rows.ids.shape[1]
        )
        return self.compute(piece, rows, ends, values)

    def compute(self, piece: OpenGraph, rows: Rows, ends: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> Arrays:
        """Run an open piece on tokens and further inputs, each cast to the piece's dtype."""
        return piece.program.run(ends, self.feeds(piece, rows, feeds))

    def feeds(self, piece: OpenGraph, rows: Rows, feeds: Mapping[str, NDArray[Any]]) -> Arrays:
        """What an open piece reads of tokens and of further inputs."""
        entries = piece.program.inputs
        cast = {name: value.astype(entries[name].dtype, copy=False) for name, value in feeds.items() if name in entries}
        return {**self._token_inputs(rows, piece.program), **cast}

    def _token_inputs(self, rows: Rows, program: Program) -> Arrays:
        """Tokens, mask, positions and past, as far as a graph reads them."""
        total = rows.ids.shape[1]
        ids = rows.ids[:, rows.start :]
        feeds: Arrays = {
            "input_ids": ids,
            "attention_mask": np.ones((rows.count, total), np.int64),
            "position_ids": np.broadcast_to(np.arange(rows.start, total), ids.shape),
        }
        if self.model.has_token_types:
            feeds["token_type_ids"] = np.broadcast_to(
                np.zeros(total, np.int64) if rows.types is None else rows.types, ids.shape
            )
        for port in self.model.metadata.ports:
            if port.past not in program.inputs:
                continue
            if rows.start and port.positional:
                past = rows.past[port.past][:, :, : rows.start]
                feeds[port.past] = np.broadcast_to(past, (rows.count, *past.shape[1:]))
            else:  # states begin with the text: where a layer has one, `start` is 0
                feeds[port.past] = np.zeros(port.shape(rows.count, 0), self.model.past_dtypes[port.past])
        return feeds
