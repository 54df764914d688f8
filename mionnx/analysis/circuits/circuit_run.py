"""Exact runs of circuits: the kept edges carry new values, all others the corrupted prompt's.

A row is one circuit. Each receiver reads the corrupted stream, plus, for each kept edge into it, what the sender writes
now minus what it wrote on the corrupted prompt; the embedding writes that of the clean prompt. With no edge this is the
corrupted run, with all edges the clean one.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.circuits.node_values import NodeValues
from mionnx.analysis.circuits.nodes import Node, Nodes
from mionnx.analysis.circuits.parts import Floats, Parts
from mionnx.graph.hook_points import HookPoint
from mionnx.machine import memory

CLEAN, CORRUPTED = 0, 1  # rows of `NodeValues`
SHARE = 4  # what senders write may take this part of the free memory: a quarter
Masks = NDArray[np.bool_]
Sums = Callable[[int, Masks], Floats]


class CircuitRun:
    """Some circuits on one pair of prompts.

    Attributes:
        values: what nodes write on the clean prompt, and on the corrupted one.
        masks: [circuits, senders, receivers]: the kept edges.
        writes: the senders that have written, and a function: circuit, which of them are kept [masks, these senders]
            -> their change of the stream beside the corrupted prompt, [masks, seq, hidden].
    """

    def __init__(self, parts: Parts, values: NodeValues, masks: Masks) -> None:
        self.parts, self.nodes, self.values, self.masks = parts, parts.nodes, values, masks
        self.writes: list[tuple[list[int], Sums]] = []

    def logits(self, tokens: Sequence[int] | None) -> Floats:
        """The logits of each circuit at the last position, [circuits, vocab or tokens]."""
        start = str(HookPoint.ResidPre(0))
        embedding = self.values.of(start, CLEAN) - self.values.of(start, CORRUPTED)
        senders = _numbers(self.nodes.senders, str(HookPoint.Embed))
        self._write(senders, np.repeat(embedding[None, None], len(self.masks), axis=0))
        for layer in range(self.nodes.layers):
            read = self._heads_read(layer)
            if self.nodes.parallel:  # the MLP does not read what the attention of its layer writes
                changes = self._mlp_changes(layer)
            self._write_attention(layer, read)
            if not self.nodes.parallel:
                changes = self._mlp_changes(layer)
            self._write(_numbers(self.nodes.senders, str(HookPoint.MlpOut(layer))), changes[:, None])
        streams, which = self._streams([len(self.nodes.receivers) - 1])
        return self.parts.logits(streams, tokens)[which[:, 0]]

    def _write(self, senders: list[int], changes: Floats) -> None:
        """Add senders whose changes, [circuits, these senders, seq, hidden], add up."""

        def sums(circuit: int, kept: Masks) -> Floats:
            own = changes[circuit]
            return (kept.astype(np.float32) @ own.reshape(len(own), -1)).reshape(len(kept), *own.shape[1:])

        self.writes.append((senders, sums))

    def _streams(self, receivers: Sequence[int]) -> tuple[Floats, NDArray[np.int64]]:
        """Compute the streams for receivers of one stage.

        Returns:
            [streams, seq, hidden], the different ones; and [circuits, receivers], which of them each reads.
        """
        base = self.values.of(self.nodes.stream(self.nodes.receivers[receivers[0]].stage), CORRUPTED)
        streams: list[Floats] = []
        which = np.empty((len(self.masks), len(receivers)), np.int64)
        past = [sender for senders, _ in self.writes for sender in senders]
        for circuit, mask in enumerate(self.masks):
            own = np.zeros((len(receivers), mask.shape[0]), bool)
            own[:, past] = mask[past][:, receivers].T
            # Receivers that keep edges from the same senders read the same stream, which is computed once.
            masks, inverse = np.unique(own, axis=0, return_inverse=True)
            which[circuit] = inverse.ravel() + sum(map(len, streams))
            streams.append(base + sum(sums(circuit, masks[:, senders]) for senders, sums in self.writes))
        return np.concatenate(streams), which

    def _heads_read(self, layer: int) -> Floats:
        """Values that heads read, by their queries and keys, [circuits, seq, n_heads, head_dim]."""
        hooks = self.parts.attention_inputs(layer)
        receivers = _numbers(self.nodes.receivers, *hooks)
        streams, which = self._streams(receivers)
        values = self.parts.qkv(layer, streams)
        heads: dict[str, list[Floats]] = {name: [] for name in hooks}
        for column, node in enumerate(self.nodes.receivers[number] for number in receivers):
            heads[node.hook].append(values[node.hook][which[:, column], node.head])
        return self.parts.attention(layer, {name: np.stack(own, axis=1) for name, own in heads.items()})

    def _write_attention(self, layer: int, read: Floats) -> None:
        z, out = str(HookPoint.AttnZ(layer)), str(HookPoint.AttnOut(layer))
        senders, base = _numbers(self.nodes.senders, z), self.values.of(z, CORRUPTED)
        written = self.values.of(out, CORRUPTED)

        def normed(circuit: int, kept: Masks) -> Floats:
            some, which = np.unique(kept, axis=0, return_inverse=True)
            mixed = np.where(some[:, None, :, None], read[circuit], base)
            change: Floats = self.parts.attention_out({layer: mixed})[layer] - written
            change[~some.any(axis=1)] = 0
            return change[which.ravel()]

        # Where the output is normed before it is added (Gemma 2), no head writes a share of its own: a receiver reads
        # the output computed from the kept heads' values now, and the other heads' corrupted ones.
        if not self.parts.linear[layer]:
            self.writes.append((senders, normed))
            return
        changes = np.zeros((len(self.masks), len(senders), *written.shape), np.float32)
        circuits, heads = np.nonzero(self.masks[:, senders].any(axis=2))  # what nobody reads is not computed
        if len(circuits):
            own = (np.arange(len(senders)) == heads[:, None])[:, None, :, None]
            mixed = np.where(own, read[circuits], base)
            changes[circuits, heads] = self.parts.attention_out({layer: mixed})[layer] - written
        self._write(senders, changes)

    def _mlp_changes(self, layer: int) -> Floats:
        """Change of the MLP's output from the corrupted prompt's, [circuits, seq, hidden]."""
        streams, which = self._streams(_numbers(self.nodes.receivers, str(HookPoint.MlpPre(layer))))
        changes: Floats = self.parts.mlp_out(layer, streams) - self.values.of(str(HookPoint.MlpOut(layer)), CORRUPTED)
        return changes[which[:, 0]]


def _numbers(nodes: Sequence[Node], *hooks: str) -> list[int]:
    return [number for number, node in enumerate(nodes) if node.hook in hooks]


def circuits_at_once(nodes: Nodes, seq: int, hidden: int) -> int:
    """Number of circuits for which memory has room."""
    a_layer = max(1, len(nodes.receivers) // nodes.layers)
    return int(max(1, memory.available() // SHARE // (4 * seq * hidden * (len(nodes.senders) + 2 * a_layer))))
