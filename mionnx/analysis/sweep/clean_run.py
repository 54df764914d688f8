"""The runs that a sweep starts from: the prompts as they are, with everything that patched runs begin with."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.layer_graphs import Arrays, LayerGraphs, Text


@dataclass
class CleanRun:
    """What prompts of one length gave.

    Attributes:
        ids: [rows, seq].
        streams: layer -> what the piece of that layer begins with.
        values: hook point -> its value, [rows, ...].
        known: keys and values, by the names of the inputs that take them; empty of a recurrent model.
        logits: [rows, vocab], at the last position.
    """

    ids: NDArray[np.int64]
    streams: dict[int, Arrays] = field(default_factory=dict)
    values: Arrays = field(default_factory=dict)
    known: Arrays = field(default_factory=dict)
    logits: NDArray[Any] = field(default_factory=lambda: np.empty(0))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        found: list[Arrays] = [*self.streams.values(), self.values, self.known, {"logits": self.logits}]
        return sum(array.nbytes for arrays in found for array in arrays.values())

    def row(self, index: int) -> "CleanRun":
        """One of the rows, [1, ...]."""

        def of(found: Arrays) -> Arrays:
            return {name: array[index : index + 1] for name, array in found.items()}

        streams = {layer: of(stream) for layer, stream in self.streams.items()}
        own = slice(index, index + 1)
        return CleanRun(self.ids[own], streams, of(self.values), of(self.known), self.logits[own])


def run_clean(graphs: LayerGraphs, ids: NDArray[np.int64], layers: Collection[int], hooks: Collection[str]) -> CleanRun:
    """Run prompts of one length, and keep what patched runs need.

    Args:
        graphs: the model.
        ids: [rows, seq].
        layers: those that patched runs begin with.
        hooks: hook points whose values are kept.
    """
    made, text = CleanRun(ids), Text(ids)
    stream = graphs.embed(text)
    for layer in range(graphs.layers):
        if layer in layers:
            made.streams[layer] = stream
        keys = graphs.keys_of(layer)
        here = [hook for hook in hooks if hook.startswith(f"blocks.{layer}.")]
        stream, found = graphs.layer(layer, text, stream, wants=tuple(dict.fromkeys([*keys, *here])))
        made.values |= {hook: found[hook] for hook in here}
        made.known |= {name: found[hook] for hook, name in keys.items()}
    made.logits = graphs.logits(text, stream)[:, -1]
    return made
