"""Exact runs of circuits: the kept edges carry new values, all others the corrupted prompt's.

1. A row is one circuit. Each receiver reads the corrupted stream, plus, for each kept edge into it, what the sender
   writes now minus what it wrote on the corrupted prompt. The embedding writes that of the clean prompt.
2. Receivers that keep edges from the same senders read the same stream, which is computed once.
3. Where an attention's output is normed before it is added (Gemma 2), no head writes a share of its own: a receiver
   then reads that output computed from the kept heads' values now, and the other heads' corrupted ones.
4. With no edge this is the corrupted run, with all edges the clean one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

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


class Writes(ABC):
    """Changes of the stream by some senders in each circuit, beside the corrupted prompt.

    Attributes:
        senders: their numbers.
    """

    senders: list[int]

    @abstractmethod
    def sums(self, circuit: int, kept: Masks) -> Floats:
        """[masks, seq, hidden]: the stream's change by kept senders, [masks, these senders]."""


@dataclass(frozen=True)
class Shares(Writes):
    """Senders whose changes add up.

    Attributes:
        changes: [circuits, these senders, seq, hidden].
    """

    senders: list[int]
    changes: Floats

    def sums(self, circuit: int, kept: Masks) -> Floats:
        """A product of masks and changes."""
        own = self.changes[circuit]
        return (kept.astype(np.float32) @ own.reshape(len(own), -1)).reshape(len(kept), *own.shape[1:])


@dataclass(frozen=True)
class Normed(Writes):
    """Heads whose outputs are normed together.

    Attributes:
        now, corrupted: what the heads read, [circuits, seq, n_heads, head_dim], and on the corrupted prompt.
        written: the attention's output there, [seq, hidden].
    """

    senders: list[int]
    parts: Parts
    layer: int
    now: Floats
    corrupted: Floats
    written: Floats

    def sums(self, circuit: int, kept: Masks) -> Floats:
        """The attention's output for each different mask."""
        some, which = np.unique(kept, axis=0, return_inverse=True)
        mixed = np.where(some[:, None, :, None], self.now[circuit], self.corrupted)
        change: Floats = self.parts.write([self.layer], {self.layer: mixed})[self.layer] - self.written
        change[~some.any(axis=1)] = 0
        return change[which.ravel()]


@dataclass
class CircuitRun:
    """Some circuits on one pair of prompts.

    Attributes:
        values: what nodes write on the clean prompt, and on the corrupted one.
        masks: [circuits, senders, receivers]: the kept edges.
        writes: of the senders so far.
    """

    parts: Parts
    values: NodeValues
    masks: Masks
    writes: list[Writes] = field(default_factory=list)

    @property
    def nodes(self) -> Nodes:
        """The model's nodes."""
        return self.parts.nodes

    def logits(self, tokens: Sequence[int] | None) -> Floats:
        """The logits of each circuit at the last position, [circuits, vocab or tokens]."""
        start = str(HookPoint.ResidPre(0))
        embedded = self.values.of(start, CLEAN) - self.values.of(start, CORRUPTED)
        self._write(self._numbers(str(HookPoint.Embed)), np.repeat(embedded[None, None], len(self.masks), axis=0))
        for layer in range(self.nodes.layers):
            read = self._heads_read(layer)
            if self.nodes.parallel:
                written = self._mlp_writes(layer)
            self._attention_writes(layer, read)
            if not self.nodes.parallel:
                written = self._mlp_writes(layer)
            self._write(self._numbers(str(HookPoint.MlpOut(layer))), written[:, None])
        streams, which = self._streams([len(self.nodes.receivers) - 1])
        return self.parts.logits(streams, tokens)[which[:, 0]]

    def _numbers(self, hook: str) -> list[int]:
        return [number for number, node in enumerate(self.nodes.senders) if node.hook == hook]

    def _write(self, senders: list[int], changes: Floats) -> None:
        self.writes.append(Shares(senders, changes))

    def _streams(self, receivers: Sequence[int]) -> tuple[Floats, NDArray[np.int64]]:
        """Compute the streams for receivers of one stage.

        Returns:
            [streams, seq, hidden], the different ones; and [circuits, receivers], which of them each reads.
        """
        base = self.values.of(self.nodes.stream(self.nodes.receivers[receivers[0]].stage), CORRUPTED)
        streams: list[Floats] = []
        which = np.empty((len(self.masks), len(receivers)), np.int64)
        written = [sender for one in self.writes for sender in one.senders]
        for circuit, mask in enumerate(self.masks):
            own = np.zeros((len(receivers), mask.shape[0]), bool)
            own[:, written] = mask[written][:, receivers].T
            masks, inverse = np.unique(own, axis=0, return_inverse=True)
            which[circuit] = inverse.ravel() + sum(map(len, streams))
            streams.append(base + sum(one.sums(circuit, masks[:, one.senders]) for one in self.writes))
        return np.concatenate(streams), which

    def _heads_read(self, layer: int) -> Floats:
        """Values that heads read, by their queries and keys, [circuits, seq, n_heads, head_dim]."""
        hooks = self.parts.attention_inputs(layer)
        receivers = [number for number, node in enumerate(self.nodes.receivers) if node.hook in hooks]
        streams, which = self._streams(receivers)
        values, inputs = self.parts.read(layer, streams), {}
        for name in hooks:
            columns = [column for column, number in enumerate(receivers) if self.nodes.receivers[number].hook == name]
            heads = [_head(self.nodes.receivers[receivers[column]]) for column in columns]
            inputs[name] = np.stack(
                [values[name][which[:, column], head] for column, head in zip(columns, heads, strict=True)], axis=1
            )
        return self.parts.attend(layer, inputs)

    def _attention_writes(self, layer: int, read: Floats) -> None:
        z, out = str(HookPoint.AttnZ(layer)), str(HookPoint.AttnOut(layer))
        senders, base, written = self._numbers(z), self.values.of(z, CORRUPTED), self.values.of(out, CORRUPTED)
        if not self.parts.linear[layer]:
            self.writes.append(Normed(senders, self.parts, layer, read, base, written))
            return
        changes = np.zeros((len(self.masks), len(senders), *written.shape), np.float32)
        circuits, heads = np.nonzero(self.masks[:, senders].any(axis=2))  # what nobody reads is not computed
        if len(circuits):
            own = (np.arange(len(senders)) == heads[:, None])[:, None, :, None]
            mixed = np.where(own, read[circuits], base)
            changes[circuits, heads] = self.parts.write([layer], {layer: mixed})[layer] - written
        self._write(senders, changes)

    def _mlp_writes(self, layer: int) -> Floats:
        """Change of the MLP's output from the corrupted prompt's, [circuits, seq, hidden]."""
        hook = str(HookPoint.MlpPre(layer))
        (receiver,) = (number for number, node in enumerate(self.nodes.receivers) if node.hook == hook)
        streams, which = self._streams([receiver])
        changed: Floats = self.parts.think(layer, streams) - self.values.of(str(HookPoint.MlpOut(layer)), CORRUPTED)
        return changed[which[:, 0]]


def _head(node: Node) -> int:
    return node.head or 0


def circuits_at_once(nodes: Nodes, seq: int, hidden: int) -> int:
    """Number of circuits for which memory has room."""
    a_layer = max(1, len(nodes.receivers) // nodes.layers)
    return int(max(1, memory.available() // SHARE // (4 * seq * hidden * (len(nodes.senders) + 2 * a_layer))))
