"""Values of a model's nodes on two prompts, captured in one pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.nodes import Nodes
from mionnx.analysis.circuits.parts import Floats, Parts
from mionnx.analysis.gradients.first_order import part_of, rows_of
from mionnx.analysis.sweep.comparison import Pair
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.run.hook_cache import HookCache
from mionnx.run.metric_place import values_read
from mionnx.run.nan_logits import numbers
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

OFF = 1e-3  # by which a stream may differ from its sum, as a share of its largest number; float16 rounds by as much


@dataclass(frozen=True)
class NodeValues:
    """Values of two prompts."""

    values: HookCache | Mapping[str, NDArray[Any]]  # hook point -> [2, ...]: the base, and the other
    logits: NDArray[Any]  # [2, columns], where the metric reads

    def of(self, name: str, row: int) -> Floats:
        """A value of one of the two prompts, without the batch axis."""
        value: Floats = self.values[name][row].astype(np.float32, copy=False)
        return value

    def changes(self, parts: Parts) -> Floats:
        """Changes of the base's stream, one sender with the other's value, [senders, seq, hidden]."""
        # A head's change is that of its attention's output when this head alone has the other's value.
        mixed, changes = {}, []
        points = parts.nodes.with_heads
        for layer, point in points.items():
            base, other = (self.of(point, row) for row in (0, 1))
            mixed[layer] = one_head_each(base, other)
        outputs = parts.attention_out(mixed)
        heads = {points[i]: out - self.of(str(HookPoint.AttnOut(i)), 0) for i, out in outputs.items()}
        for node in parts.nodes.senders:
            if node.head is not None:
                changes.append(heads[node.hook][node.head])
            else:
                # The embedding's node is named by its hook point; what it adds with positions is the stream before
                # layer 0.
                name = str(HookPoint.ResidPre(0)) if node.layer is None else node.hook
                changes.append(self.of(name, 1) - self.of(name, 0))
        return np.stack(changes)


def one_head_each(base: Floats, other: Floats) -> Floats:
    """Mix values by row: in row h, head h is the other's; [n_heads, seq, n_heads, head_dim]."""
    # Row h, position, head, width: the diagonal of rows and heads.
    own = np.eye(base.shape[1], dtype=bool)[:, None, :, None]
    return np.where(own, other[None], base[None])


def captures(nodes: Nodes) -> list[str]:
    """The hook points that are captured of each prompt."""
    names = [str(HookPoint.ResidPre(0))]
    for layer in range(nodes.layers):
        heads = nodes.heads_point(layer)
        names += [*([heads] if heads else []), *nodes.outputs(layer)]
        names += [nodes.stream(stage) for stage in {2 * layer, nodes.mlp_stage(layer), 2 * layer + 2}]
        names += [nodes.sum_point(half) for half in (2 * layer, 2 * layer + 1)] if nodes.normed else []
    return [*dict.fromkeys(names)]


def node_values(model: Runner, nodes: Nodes, pair: Pair, also: Sequence[str] = ()) -> NodeValues:
    """Run both prompts of a pair; `also`: further hook points to capture."""
    rows = rows_of(pair, [one for one in (pair.base, pair.other) if one is not None])
    cache = model.forward(rows, HookSpec().capture([*captures(nodes), *also]), logits=part_of(pair, model))
    values = NodeValues(numbers(cache), values_read(model.hooked, cache.output()))
    _refuse_other_sums(model, nodes, values)
    return values


def _refuse_other_sums(model: Runner, nodes: Nodes, values: NodeValues) -> None:
    """Refuse a stream that is scaled, or added to otherwise."""
    for layer in range(nodes.layers):
        pre, mid, post = (nodes.stream(2 * layer + later) for later in range(3))
        added = nodes.outputs(layer)
        if nodes.normed:
            ends = {nodes.sum_point(2 * layer): [pre, added[0]], nodes.sum_point(2 * layer + 1): [mid, added[1]]}
        else:
            ends = {post: [pre, *added]} if nodes.parallel else {mid: [pre, added[0]], post: [mid, *added[1:]]}
        for end, parts in ends.items():
            value, expected = values.of(end, 0), sum(values.of(name, 0) for name in parts)
            if np.abs(value - expected).max() > OFF * np.abs(value).max():
                raise InputError(
                    f"edges: in {model.hooked.metadata.family!r}, {end} is not what the stream before and the outputs "
                    "of its layer add up to, so no edge can be told from another. Patching sweeps, captures and "
                    "gradients work"
                )
