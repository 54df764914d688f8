"""A model in graphs, each a graph of its own: the embedding, one piece a layer, and the head.

Rows that are patched at layer 7 start at layer 7: they join the others there, and all go on together. The graphs are
opened once, whatever the sweep asks for, and their weights are together those of one model.

1. A piece starts at the residual stream before its layer, and at whatever else crosses there (`Dataflow.crossings`).
2. Where only the last position is read in the end, the last layer is two graphs: attention at all positions; what
   follows it, and the head, at the last position alone.
3. A text of which the first tokens are the same as in a run that is known already continues from that run's keys and
   values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.engine import Program
from mionnx.engine.options import Options
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import DTYPES, HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.rewrite.plan import LOGIT_TOKENS, CaptureNode, Edit, Outputs, Plan
from mionnx.run.graph_pool import GraphPool, OpenGraph

Arrays = dict[str, NDArray[Any]]
EMBED = "hook_embed"


@dataclass(frozen=True)
class Text:
    """The tokens of some rows, all alike in length, without padding.

    Attributes:
        ids: [rows, seq].
        start: the first position that is computed.
        known: keys and values of the positions before it, [1, n_kv_heads, seq, head_dim] by the graph's names.
    """

    ids: NDArray[np.int64]
    start: int = 0
    known: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many."""
        return len(self.ids)


class LayerGraphs:
    """The graphs of one model.

    Attributes:
        model: the hooked model.
        end: the value that the head reads.
    """

    def __init__(self, model: HookedModel, options: Options) -> None:
        sizes = model.metadata.sizes
        self.model = model
        self.variants = GraphPool(model, options.for_many_graphs(8 * (sizes.num_layers + 3)))
        self.layers = sizes.num_layers
        self.end = str(HookPoint.ResidPost(self.layers - 1))

    def starts(self, layer: int) -> tuple[str, ...]:
        """What the piece of a layer starts with; of the layer after the last, what the head reads."""
        if layer == self.layers:
            return (self.end,)
        cut = str(HookPoint.ResidPre(layer))
        return cut, *(name for name in self._crossings[layer] if name != cut)

    @cached_property
    def _crossings(self) -> list[tuple[str, ...]]:
        """What crosses into each layer."""
        cuts = [[str(HookPoint.ResidPre(layer))] for layer in range(self.layers)]
        return Dataflow(self.model.proto).crossings(cuts, [self.end], [EMBED])

    @cached_property
    def parted(self) -> tuple[str, ...]:
        """What the second part of the last layer starts with; empty if the layer has no two parts."""
        last = self.layers - 1
        names = (str(HookPoint.AttnZ(last)), str(HookPoint.ResidPre(last)))
        apart = {*names} <= self.model.metadata.hooks.keys() and self.starts(last) == names[1:]
        return names if apart else ()

    def keys_of(self, layer: int) -> dict[str, str]:
        """The hook points whose values become a layer's keys and values -> the inputs that they are in a later call."""
        rotated, plain = str(HookPoint.AttnRotK(layer)), str(HookPoint.AttnK(layer))
        key = rotated if rotated in self.model.metadata.hooks else plain
        if key not in self.model.metadata.hooks:
            return {}
        return dict(zip((key, str(HookPoint.AttnV(layer))), KEYS_AND_VALUES.layer_inputs(layer), strict=True))

    def last_of(self, text: Text) -> Text:
        """The same text, of which what follows attention is computed at the last position alone.

        No piece after attention reads keys and values; some read how many there are.
        """
        sizes, seq = self.model.metadata.sizes, text.ids.shape[1]
        nothing = np.zeros((1, sizes.num_kv_heads, seq, sizes.head_dim), DTYPES[self.model.metadata.dtype])
        names = (name for layer in range(self.layers) for name in self.keys_of(layer).values())
        return Text(text.ids, seq - 1, dict.fromkeys(names, nothing))

    def embed(self, text: Text) -> Arrays:
        """The stream before the first layer."""
        return self.run(text, {}, wants=self.starts(0))

    def layer(
        self, layer: int, text: Text, stream: Arrays, edits: Mapping[Edit, Arrays] | None = None,
        wants: Sequence[str] = (),
    ) -> tuple[Arrays, Arrays]:  # fmt: skip
        """One layer.

        Args:
            layer: which.
            text: the tokens.
            stream: what `starts(layer)` names.
            edits: interventions with the inputs that they read.
            captures: values to capture.

        Returns:
            what `starts(layer + 1)` names, and the captures.
        """
        following = self.starts(layer + 1)
        renamed = {str(HookPoint.ResidPre(layer + 1)): str(HookPoint.ResidPost(layer))}
        made = [renamed.get(name, name) for name in following]
        carried = [name for name in made if name in stream]  # it crosses several layers: nothing changes it any more
        outputs = dict.fromkeys([*(name for name in made if name not in carried), *wants])
        found = self.run(text, stream, edits or {}, list(outputs))
        found |= {name: stream[name] for name in carried}
        after = {name: found[source] for name, source in zip(following, made, strict=True)}
        return after, {name: found[name] for name in wants}

    def logits(
        self,
        text: Text,
        stream: Arrays,
        edits: Mapping[Edit, Arrays] | None = None,
        last: bool = True,
        tokens: NDArray[np.int64] | None = None,
    ) -> NDArray[Any]:
        """The logits, [rows, seq or 1, vocab or tokens].

        Args:
            text, stream, edits: see `layer`; the stream is `starts(layers)` or `parted`.
            last: of the last position only.
            tokens: of these tokens only.
        """
        some = tokens is not None
        outputs = Outputs(logits=True, last=last, of_tokens=some, only_these=some, carried=False)
        feeds = {**stream, **({} if tokens is None else {LOGIT_TOKENS: tokens})}
        return self.run(text, feeds, edits or {}, outputs=outputs, starts=tuple(stream))["logits"]

    def open(self, starts: tuple[str, ...], edits: Sequence[Edit], wants: Sequence[str], outputs: Outputs) -> OpenGraph:
        """The piece that begins with some values, and gives others."""
        return self.variants.get(Plan(tuple(edits), tuple(map(CaptureNode, wants)), outputs, starts))

    def run(
        self,
        text: Text,
        feeds: Arrays,
        edits: Mapping[Edit, Arrays] | None = None,
        wants: Sequence[str] = (),
        outputs: Outputs | None = None,
        starts: tuple[str, ...] | None = None,
    ) -> Arrays:
        """Run the piece that begins with the values fed (or with `starts` of them)."""
        edits = edits or {}
        begins = tuple(feeds) if starts is None else starts
        piece = self.open(begins, tuple(edits), wants, outputs or Outputs(logits=False, carried=False))
        given = {_entered(name, edits): value for name, value in feeds.items()}
        for inputs in edits.values():
            given |= inputs
        names = ["logits"] if outputs else list(wants)
        return piece.program.run(names, {**self._context(text, piece.program), **given})

    def _context(self, text: Text, program: Program) -> Arrays:
        """Tokens, masks and the past, as far as a piece reads them."""
        total = text.ids.shape[1]
        ids = text.ids[:, text.start :]
        feeds: Arrays = {
            "input_ids": ids,
            "attention_mask": np.ones((text.rows, total), np.int64),
            "position_ids": np.broadcast_to(np.arange(text.start, total), ids.shape),
        }
        for name in program.inputs:
            if name.startswith(f"{KEYS_AND_VALUES.past}."):
                feeds[name] = self._past(name, text)
        if self.model.metadata.recurrent:
            sizes, dtype = self.model.metadata.sizes, DTYPES[self.model.metadata.dtype]
            start = RWKVState.empty(sizes, text.rows, dtype).feeds(sizes, text.rows, dtype)
            feeds |= {name: np.asarray(value) for name, value in start.items()}
        return feeds

    def _past(self, name: str, text: Text) -> NDArray[Any]:
        sizes = self.model.metadata.sizes
        if not text.start:
            shape = (text.rows, sizes.num_kv_heads, 0, sizes.head_dim)
            return np.zeros(shape, DTYPES[self.model.metadata.dtype])
        past = text.known[name][:, :, : text.start]
        return np.broadcast_to(past, (text.rows, *past.shape[1:]))


def _entered(name: str, edits: Mapping[Edit, Arrays]) -> str:
    """The input's name of a value that a piece begins with."""
    return f"{name}.before" if any(edit.hook == name for edit in edits) else name
