"""`Parts`: the parts of a model run one by one, each on many rows at once."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.nodes import ROLES, Nodes
from mionnx.analysis.circuits.separate import writes_linearly
from mionnx.analysis.sweep.layer_graphs import Arrays, LayerGraphs, Rows
from mionnx.graph.hook_points import HookPoint
from mionnx.rewrite.plan import CaptureNode, GradientNode, Gradients, Outputs, Plan, gradient_name

TOKENS = 4096  # most tokens of one call
Floats = NDArray[np.float32]
NOTHING = Outputs(logits=False, carried=False)


class Parts:
    """The parts of one model, on prompts of one length.

    Attributes:
        graphs: the model.
        nodes: its nodes.
        ids: [seq]; only their number counts where a graph starts behind the embedding.
    """

    def __init__(self, graphs: LayerGraphs, nodes: Nodes, ids: NDArray[np.int64]) -> None:
        self.graphs, self.nodes, self.ids = graphs, nodes, ids

    def attention_inputs(self, layer: int) -> tuple[str, ...]:
        """The hook points of a layer's queries, keys and values."""
        return tuple(str(getattr(HookPoint, variant)(layer)) for variant in ROLES)

    def read(self, layer: int, streams: Floats) -> Arrays:
        """Queries, keys and values of streams [rows, seq, hidden]."""
        return self._run({str(HookPoint.ResidPre(layer)): streams}, self.attention_inputs(layer))

    def attend(self, layer: int, values: Mapping[str, Floats]) -> Floats:
        """Values that heads read, by queries, keys and values: [rows, seq, n_heads, head_dim]."""
        z = str(HookPoint.AttnZ(layer))
        return self._run(values, (z,))[z]

    def write(self, layers: Sequence[int], z: Mapping[int, Floats]) -> dict[int, Floats]:
        """Outputs of some layers' attention, [rows, seq, hidden], from the values of their heads."""
        names = {layer: str(HookPoint.AttnOut(layer)) for layer in layers}
        made = self._run({str(HookPoint.AttnZ(layer)): z[layer] for layer in layers}, tuple(names.values()))
        return {layer: made[name] for layer, name in names.items()}

    def think(self, layer: int, streams: Floats) -> Floats:
        """Outputs of a layer's MLP on streams [rows, seq, hidden]."""
        out = str(HookPoint.MlpOut(layer))
        return self._run({self.nodes.stream(self.nodes.mlp_stage(layer)): streams}, (out,))[out]

    def logits(self, streams: Floats, tokens: Sequence[int] | None) -> Floats:
        """The last position's logits of streams [rows, seq, hidden]: [rows, vocab or tokens]."""
        only = None if tokens is None else np.array(tokens)
        made = [
            self.graphs.logits(self._rows(len(part)), {self.graphs.end: part}, tokens=only)[:, -1]
            for part in self._chunks(streams)
        ]
        return np.concatenate(made)

    def gradients(self, of: Sequence[str], by: Sequence[str], streams: Arrays, seeds: Arrays, rules: str) -> Arrays:
        """The sum of values times numbers, differentiated by the streams that they are read from.

        Args:
            of: names of the values; each depends on one of the streams.
            by: names of the streams.
            streams: their values, [rows, seq, hidden].
            seeds: value -> the numbers, of its shape.
            rules: the name of the rules of going back.
        """
        wanted = Gradients("cotangent", tuple(map(GradientNode, by)), rules, of[0], tuple(of[1:]))
        plan = Plan(captures=tuple(map(CaptureNode, of)), outputs=NOTHING, starts=tuple(by), gradients=wanted)
        graph = self.graphs.variants.get(plan)
        feeds = {**streams, **{entry: seeds[name] for name, entry in wanted.seeds.items()}}
        rows = self._rows(len(streams[by[0]]))
        made = graph.program.run([*map(gradient_name, by)], {**self.graphs.token_inputs(rows, graph.program), **feeds})
        return {name: made[gradient_name(name)] for name in by}

    @cached_property
    def linear(self) -> list[bool]:
        """For each layer, whether its attention's output is a sum over heads."""
        return [writes_linearly(self.graphs.model, layer) for layer in range(self.nodes.layers)]

    def _run(self, values: Mapping[str, Floats], wants: tuple[str, ...]) -> Arrays:
        count = len(next(iter(values.values())))
        made: list[Arrays] = []
        for part in self._slices(count):
            fed = {name: np.ascontiguousarray(value[part]) for name, value in values.items()}
            made.append(self.graphs.run(self._rows(len(next(iter(fed.values())))), fed, wants=wants))
        return made[0] if len(made) == 1 else {name: np.concatenate([one[name] for one in made]) for name in wants}

    def _chunks(self, array: Floats) -> Iterator[Floats]:
        return (np.ascontiguousarray(array[part]) for part in self._slices(len(array)))

    def _slices(self, count: int) -> Iterator[slice]:
        most = max(1, TOKENS // len(self.ids))
        return (slice(begin, begin + most) for begin in range(0, count, most))

    def _rows(self, count: int) -> Rows:
        return Rows(np.repeat(self.ids[None], count, axis=0))
