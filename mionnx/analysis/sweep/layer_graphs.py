"""A model as separate graphs: the embedding, one graph a layer, and the head.

A row that is patched at layer 7 starts at layer 7: it joins the others there, and all go on together. Each graph is
opened once, whatever the sweep measures; together they hold the weights of one model.

1. A layer's graph starts at the residual stream before the layer, and at whatever else crosses there
   (`Dataflow.crossings`).
2. Where only the last position is read in the end, the last layer is two graphs: attention at all positions; then
   everything after attention, and the head, at the last position alone.
3. A row whose first tokens equal those of the clean run continues from that run's keys and values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.engine import Program
from mionnx.engine.options import Options
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.inputs.lacking import refuse_several_streams, refuse_without_cache
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.machine.once import once_property
from mionnx.rewrite.plan import LOGIT_TOKENS, CaptureNode, Edit, Outputs, Plan
from mionnx.run.open_graphs import OpenGraph, OpenGraphs

Arrays = dict[str, NDArray[Any]]
EMBED = "hook_embed"


@dataclass(frozen=True)
class Rows:
    """The tokens of some rows of equal length, without padding.

    Attributes:
        ids: [rows, seq].
        start: the first position that is computed.
        past: graph input -> keys or values of the positions before it, [1, n_kv_heads, seq, head_dim].
    """

    ids: NDArray[np.int64]
    start: int = 0
    past: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self.ids)


class LayerGraphs:
    """The graphs of one model's layers, opened as they are used.

    Attributes:
        model: the hooked model.
        layers: number of layers.
        end: name of the value that the head reads.
    """

    def __init__(self, model: HookedModel, options: Options) -> None:
        refuse_without_cache(model, "a sweep")  # layers run on the keys and values of others
        refuse_several_streams(model, "a sweep")
        sizes = model.metadata.sizes
        self.model = model
        self.variants = OpenGraphs(model, options.for_many_graphs(8 * (sizes.num_layers + 3)))
        self.layers = sizes.num_layers
        self.end = str(HookPoint.ResidPost(self.layers - 1))

    def inputs_of(self, layer: int) -> tuple[str, ...]:
        """Names of the values that a layer's graph reads; after the last layer, those of the head."""
        if layer == self.layers:
            return (self.end,)
        cut = str(HookPoint.ResidPre(layer))
        return cut, *(name for name in self._crossings[layer] if name != cut)

    @once_property
    def _crossings(self) -> list[tuple[str, ...]]:
        """Names of the values that cross into each layer."""
        cuts = [[str(HookPoint.ResidPre(layer))] for layer in range(self.layers)]
        return Dataflow(self.model.proto).crossings(cuts, [self.end], [EMBED])

    @once_property
    def after_attention(self) -> tuple[str, ...]:
        """Inputs of the last layer's second graph, behind attention; empty where it cannot be cut."""
        last = self.layers - 1
        names = (str(HookPoint.AttnZ(last)), str(HookPoint.ResidPre(last)))
        apart = {*names} <= self.model.metadata.hooks.keys() and self.inputs_of(last) == names[1:]
        return names if apart else ()

    def keys_of(self, layer: int) -> dict[str, str]:
        """Hook points of a layer's keys and values -> the graph inputs that take them as past."""
        rotated, plain = str(HookPoint.AttnRotK(layer)), str(HookPoint.AttnK(layer))
        key = rotated if rotated in self.model.metadata.hooks else plain
        if key not in self.model.metadata.hooks:
            return {}
        return dict(zip((key, str(HookPoint.AttnV(layer))), KEYS_AND_VALUES.layer_inputs(layer), strict=True))

    def last_position(self, rows: Rows) -> Rows:
        """The same rows, to be computed at the last position alone behind the last attention.

        No graph behind attention reads keys and values; some read how many there are.
        """
        metadata, seq = self.model.metadata, rows.ids.shape[1]
        shapes = metadata.past_shapes(1, seq)
        names = (name for layer in range(self.layers) for name in self.keys_of(layer).values())
        return Rows(rows.ids, seq - 1, {name: np.zeros(shapes[name], self.model.past_dtype) for name in names})

    def embed(self, rows: Rows, edits: Mapping[Edit, Arrays] | None = None) -> Arrays:
        """Compute the residual stream before the first layer."""
        return self.run(rows, {}, edits, wants=self.inputs_of(0))

    def layer(
        self, layer: int, rows: Rows, stream: Arrays, edits: Mapping[Edit, Arrays] | None = None,
        wants: Sequence[str] = (),
    ) -> tuple[Arrays, Arrays]:  # fmt: skip
        """Compute one layer.

        Args:
            layer: its number.
            rows: the tokens.
            stream: the values of `inputs_of(layer)`.
            edits: interventions with the inputs that they read.
            wants: names of values to capture.

        Returns:
            the values of `inputs_of(layer + 1)`, and the captures.
        """
        following = self.inputs_of(layer + 1)
        renamed = {str(HookPoint.ResidPre(layer + 1)): str(HookPoint.ResidPost(layer))}
        sources = [renamed.get(name, name) for name in following]
        carried = [name for name in sources if name in stream]  # crosses several layers: nothing changes it any more
        outputs = dict.fromkeys([*(name for name in sources if name not in carried), *wants])
        values = self.run(rows, stream, edits or {}, list(outputs))
        values |= {name: stream[name] for name in carried}
        after = {name: values[source] for name, source in zip(following, sources, strict=True)}
        return after, {name: values[name] for name in wants}

    def logits(
        self,
        rows: Rows,
        stream: Arrays,
        edits: Mapping[Edit, Arrays] | None = None,
        last: bool = True,
        tokens: NDArray[np.int64] | None = None,
    ) -> NDArray[Any]:
        """Compute the logits, [rows, seq or 1, vocab or tokens].

        Args:
            rows, stream, edits: see `layer`; the stream is `inputs_of(layers)` or `after_attention`.
            last: at the last position only.
            tokens: ids; logits of these only.
        """
        some = tokens is not None
        outputs = Outputs(logits=True, last=last, of_tokens=some, only_these=some, carried=False)
        feeds = {**stream, **({} if tokens is None else {LOGIT_TOKENS: tokens})}
        return self.run(rows, feeds, edits or {}, outputs=outputs, starts=tuple(stream))["logits"]

    def open(self, starts: tuple[str, ...], edits: Sequence[Edit], wants: Sequence[str], outputs: Outputs) -> OpenGraph:
        """Open the graph between some values and others."""
        return self.variants.get(Plan(tuple(edits), tuple(map(CaptureNode, wants)), outputs, starts))

    def run(
        self,
        rows: Rows,
        feeds: Arrays,
        edits: Mapping[Edit, Arrays] | None = None,
        wants: Sequence[str] = (),
        outputs: Outputs | None = None,
        starts: tuple[str, ...] | None = None,
    ) -> Arrays:
        """Run the graph that starts at the values fed, or at `starts` among them."""
        edits = edits or {}
        begins = tuple(feeds) if starts is None else starts
        graph = self.open(begins, tuple(edits), wants, outputs or Outputs(logits=False, carried=False))
        given = {_input_name(name, edits): value for name, value in feeds.items()}
        for inputs in edits.values():
            given |= inputs
        names = ["logits"] if outputs else list(wants)
        return graph.program.run(names, {**self.token_inputs(rows, graph.program), **given})

    def token_inputs(self, rows: Rows, program: Program) -> Arrays:
        """Tokens, mask, positions and past, as far as a graph reads them."""
        total = rows.ids.shape[1]
        ids = rows.ids[:, rows.start :]
        feeds: Arrays = {
            "input_ids": ids,
            "attention_mask": np.ones((rows.count, total), np.int64),
            "position_ids": np.broadcast_to(np.arange(rows.start, total), ids.shape),
        }
        for name in program.inputs:
            if name.startswith(f"{KEYS_AND_VALUES.past}."):
                feeds[name] = self._past(name, rows)
        if self.model.metadata.recurrent:
            sizes, dtype = self.model.metadata.sizes, self.model.past_dtype
            start = RWKVState.empty(sizes, rows.count, dtype).feeds(sizes, rows.count, dtype)
            feeds |= {name: np.asarray(value) for name, value in start.items()}
        return feeds

    def _past(self, name: str, rows: Rows) -> NDArray[Any]:
        metadata = self.model.metadata
        if not rows.start:
            return np.zeros(metadata.past_shapes(rows.count, 0)[name], self.model.past_dtype)
        past = rows.past[name][:, :, : rows.start]
        return np.broadcast_to(past, (rows.count, *past.shape[1:]))


def _input_name(name: str, edits: Mapping[Edit, Arrays]) -> str:
    """Name of the graph input for a value at which a graph starts."""
    return f"{name}.before" if any(edit.hook == name for edit in edits) else name
