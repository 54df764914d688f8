"""`Parts`: the parts of a model run one by one, each on many rows at once."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.nodes import Nodes
from mionnx.analysis.sweep.patched_runs import CALL_TOKENS
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.rewrite.plan import GradientNode, Gradients, gradient_name
from mionnx.run.runner import Runner
from mionnx.run.segments import Arrays, Rows, Segments

Floats = NDArray[np.float32]
MOVES = ("Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Cast", "Concat")
LINEAR = {"MatMul", "Gemm", "Add", "Sub", "Mul", *MOVES}


class Parts:
    """The parts of one model, on prompts of `seq` tokens; streams are [rows, seq, hidden]."""

    def __init__(self, model: Runner, nodes: Nodes, seq: int, at: int | None = None) -> None:
        # `at`: the position of an encoder's text that a metric reads; the last of a decoder's.
        # The same pieces as sweeps use, so that a model has them open once.
        self.segments, self.nodes, self.seq, self.at = model.opened(Segments.of_sweep), nodes, seq, at

    def heads_in(self, layer: int, streams: Floats) -> Arrays:
        """Queries, keys and values of streams, and gates of heads that have some."""
        return self._run({str(HookPoint.ResidPre(layer)): streams}, *self.nodes.attention_inputs(layer))

    def attention(self, layer: int, values: Mapping[str, Floats]) -> Floats:
        """Values that heads give, by queries, keys, values and gates: [rows, seq, n_heads, head_dim]."""
        z = str(HookPoint.AttnZ(layer))
        group = max((self.nodes.shared.get(name, 1) for name in values), default=1)
        if group == 1:
            return self._run({**values, **self._idle(z, len(next(iter(values.values()))))}, z)[z]
        # Heads of a group with keys and values of their own: a row for each member, in which all groups have that
        # member's, and of which that member's head counts.
        rows = len(next(iter(values.values())))
        by_member = {
            name: np.concatenate([self._of_members(name, value, member) for member in range(group)])
            for name, value in values.items()
        }
        read = self._run({**by_member, **self._idle(z, group * rows)}, z)[z]
        split = read.reshape(group, rows, read.shape[1], -1, group, read.shape[-1])
        members = np.stack([split[member, :, :, :, member] for member in range(group)], axis=3)
        return members.reshape(rows, *read.shape[1:])

    def _idle(self, value: str, rows: int) -> Arrays:
        """Zeros for a stream of which a value takes nothing: without them the layers before it would be computed."""
        hidden, stream = self.segments.model.metadata.sizes.hidden_size, self.nodes.idle.get(value)
        return {} if stream is None else {stream: np.zeros((rows, self.seq, hidden), np.float32)}

    def _of_members(self, name: str, value: Floats, member: int) -> Floats:
        """Of keys and values by head, [rows, n_heads, ...], those of one member of each group; others as they are."""
        group = self.nodes.shared.get(name, 1)
        return value if group == 1 else value[:, member::group]

    def attention_out(self, z: Mapping[int, Floats]) -> dict[int, Floats]:
        """Outputs of some layers' attention or mixers, from the values of their heads."""
        if not z:
            return {}
        # layers of one width together: a call's values have as many rows each, and pieces of one kind are one piece
        names, points = {layer: str(HookPoint.AttnOut(layer)) for layer in z}, self.nodes.with_heads
        outs: dict[int, Floats] = {}
        for rows in sorted({len(value) for value in z.values()}):
            own = {layer: value for layer, value in z.items() if len(value) == rows}
            outputs = self._run({points[layer]: value for layer, value in own.items()}, *(names[one] for one in own))
            outs |= {layer: outputs[names[layer]] for layer in own}
        return outs

    def mixer_out(self, layer: int, streams: Floats) -> Floats:
        """What a layer's recurrent mixer writes: the values of its heads, or of a mixer without any its output."""
        out = self.nodes.heads_point(layer) or str(HookPoint.AttnOut(layer))
        return self._run({str(HookPoint.ResidPre(layer)): streams}, out)[out]

    def mlp_out(self, layer: int, streams: Floats) -> Floats:
        """Outputs of a layer's MLP."""
        out = str(HookPoint.MlpOut(layer))
        return self._run({self.nodes.stream(self.nodes.mlp_stage(layer)): streams}, out)[out]

    def normed(self, half: int, sums: Floats) -> Floats:
        """The streams that sums behind half a layer are normed to."""
        end = self.nodes.stream(half + 1)
        return self._run({self.nodes.sum_point(half): sums}, end)[end]

    def back_through_norm(self, half: int, sums: Floats, seeds: Floats, rules: str) -> Floats:
        """Gradients by sums behind half a layer, from those by the streams that they are normed to."""
        end, begin = self.nodes.stream(half + 1), self.nodes.sum_point(half)
        most = max(1, CALL_TOKENS // self.seq)
        chunks = [slice(first, first + most) for first in range(0, len(sums), most)]
        backs = [self.gradients([end], [begin], {begin: sums[one]}, {end: seeds[one]}, rules) for one in chunks]
        return np.concatenate([back[begin] for back in backs])

    def logits(self, streams: Floats, tokens: Sequence[int] | None) -> Floats:
        """The logits where a metric reads, [rows, columns or tokens]."""
        ids = None if tokens is None else np.array(tokens)
        chunks = self._chunks({self.segments.end: streams})
        values = [self.segments.values_at(rows, feeds, at=self.at, tokens=ids) for rows, feeds in chunks]
        return np.concatenate(values)

    def gradients(self, of: Sequence[str], by: Sequence[str], streams: Arrays, seeds: Arrays, rules: str) -> Arrays:
        """The sum of values times `seeds` of their shapes, differentiated by the streams that they are read from."""
        # A cotangent for each value: the request's metric is their sum of products.
        request = Gradients("cotangent", tuple(map(GradientNode, by)), rules, of[0], tuple(of[1:]))
        piece = self.segments.open(by, of, gradients=request)
        feeds = {**streams, **{entry: seeds[name] for name, entry in request.seeds.items()}}
        rows, names = Rows.blank(len(streams[by[0]]), self.seq), [gradient_name(name) for name in by]
        return dict(zip(by, self.segments.compute(piece, rows, names, feeds).values(), strict=True))

    @cached_property
    def linear(self) -> list[bool]:
        """For each layer, whether its attention's output is a sum over heads, by linear operators alone."""
        flow = Dataflow(self.segments.model.proto)
        points = map(self.nodes.heads_point, range(self.nodes.layers))
        return [z is None or self._writes_linearly(flow, z, layer) for layer, z in enumerate(points)]

    @staticmethod
    def _writes_linearly(flow: Dataflow, z: str, layer: int) -> bool:
        out = str(HookPoint.AttnOut(layer))
        moving = flow.descendants([z])
        nodes = (flow.nodes[i] for i in flow.ancestors([out], [z]) if moving & {*flow.reads[i]})
        # A product of two values that both move with the heads would not be linear.
        return all(node.op_type in LINEAR and sum(name in moving for name in node.input) == 1 for node in nodes)

    def _run(self, values: Mapping[str, Floats], *ends: str) -> Arrays:
        chunks = [self.segments.run(rows, feeds, ends) for rows, feeds in self._chunks(values)]
        return chunks[0] if len(chunks) == 1 else {name: np.concatenate([one[name] for one in chunks]) for name in ends}

    def _chunks(self, values: Mapping[str, Floats]) -> Iterator[tuple[Rows, Arrays]]:
        count, most = len(next(iter(values.values()))), max(1, CALL_TOKENS // self.seq)
        for begin in range(0, count, most):
            some = slice(begin, begin + most)
            feeds = {name: np.ascontiguousarray(value[some]) for name, value in values.items()}
            yield Rows.blank(min(most, count - begin), self.seq), feeds
