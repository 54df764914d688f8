"""The recurrent mixer of one layer: a short convolution, a recurrence behind it, or either alone; its law."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from exporters.adopt.flow import Flow, input_of, linear_maps
from exporters.adopt.operators.recurrence import MARKED, MarkedMixer
from exporters.probe import Array
from exporters.recurrence.columns import COLUMNS
from exporters.recurrence.expand import RECURRENCE, RECURRENCE_DOMAIN
from mionnx.errors import ExportError
from mionnx.graph.layers import TERMS, Recurrence


@dataclass(frozen=True)
class MixerValues:
    """The values of one layer's recurrent mixer."""

    inner: list[tuple[str, ir.Value]]  # hook name within the layer and value, between its first and last matrix
    pre: ir.Value  # what its first linear maps read
    z: ir.Value  # [batch, seq, n_heads * value], what its output projection reads
    out: ir.Value  # what is added to the stream
    carried: Mapping[str, tuple[ir.Value, ir.Value]]  # part -> its input and its output of the graph
    recurrence: Recurrence

    def points(self) -> list[tuple[str, ir.Value]]:
        """Hook name within the layer and value, in execution order."""
        return [("ssm.hook_pre", self.pre), *self.inner, ("ssm.hook_z", self.z), ("hook_attn_out", self.out)]

    @property
    def heads(self) -> int:
        """How many heads z has: one, of all channels, behind a convolution alone."""
        return self.recurrence.n_heads or 1


def mixers(flow: Flow, top: ir.Value, bottom: ir.Value) -> list[ir.Node]:
    """The convolutions and recurrences between two values."""
    return [node for node in flow.between(top, bottom) if node.domain == RECURRENCE_DOMAIN]


def find_mixer(flow: Flow, layer: int, top: ir.Value, out: ir.Value) -> MixerValues:
    """Recognise the mixer between a stream and the value it adds; its nodes are told their layer."""
    nodes, maps = mixers(flow, top, out), linear_maps(flow, top, out)
    kinds = [node.op_type for node in nodes]
    if kinds not in ([COLUMNS], [RECURRENCE], [COLUMNS, RECURRENCE]):
        raise ExportError(f"layer {layer}: {len(nodes)} convolutions and recurrences in one branch")
    if len(maps) < 2:
        raise ExportError(f"layer {layer}: no matrices stand before and behind its recurrence")
    points, carried, recurrence = list[tuple[str, ir.Value]](), dict[str, tuple[ir.Value, ir.Value]](), Recurrence()
    for node in nodes:
        node.attributes["layer"] = ir.AttrInt64("layer", layer)
        marked: MarkedMixer = node.meta[MARKED]
        points += marked.points
        carried |= marked.carried
        own = {name: value for name, value in vars(marked.recurrence).items() if value}
        gates = {*recurrence.gates, *own["gates"]}
        recurrence = replace(recurrence, **{**own, "gates": [term for term in TERMS if term in gates]})
    return MixerValues(points, input_of(flow, maps[0]), input_of(flow, maps[-1]), out, carried, recurrence)


def recurred(q: Array, k: Array, v: Array, log_decay: Array, write: Array | None) -> tuple[Array, Array]:
    """y [batch, seq, n_heads, value] and the last state of a recurrence from an empty one, in float64, token by token.

    q, k are [batch, seq, n_heads, key]; `log_decay` [batch, seq, n_heads, 1, key or key * value]; with `write`, [batch,
    seq, n_heads, 1], it is the delta rule.
    """
    decays = np.exp(np.minimum(log_decay.astype(np.float64), 0))
    by_number = log_decay.shape[-1] not in (1, k.shape[-1])
    decays = decays.reshape(*k.shape, -1) if by_number else decays[..., None]
    state, ys = np.zeros((*k.shape[:1], *k.shape[2:], v.shape[3])), list[Array]()
    for t in range(k.shape[1]):
        state = state * decays[:, t]
        key, written = k[:, t, :, :, None].astype(np.float64), v[:, t].astype(np.float64)
        if write is not None:
            written = write[:, t] * (written - (key * state).sum(-2))
        state = state + key * written[:, :, None]
        ys.append((q[:, t, :, :, None] * state).sum(-2))
    return np.stack(ys, 1), state
