"""Runs without a patch, with the values at which patched runs start."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.corruption import Corruption
from mionnx.errors import ModelError
from mionnx.rewrite.plan import Edit
from mionnx.run.nan_logits import ON_NAN, has_nan
from mionnx.run.segments import EMBEDDING, Arrays, Rows, Segments


@dataclass
class CleanRun:
    """Values of a run without a patch, on prompts of one length.

    Attributes:
        streams: layer -> inputs of that layer's graph.
        values: hook point -> its value, [rows, ...].
        past: graph input -> keys or values; empty for a recurrent model.
        logits: [rows, vocab], at the position that is read; of an encoder the numbers of its head.
        corruption: the interventions in force, the same in all rows.
    """

    ids: NDArray[np.int64]
    streams: dict[int, Arrays] = field(default_factory=dict)
    values: Arrays = field(default_factory=dict)
    past: Arrays = field(default_factory=dict)
    logits: NDArray[Any] = field(default_factory=lambda: np.empty(0))
    corruption: Corruption | None = None
    at: int | None = None  # the position that is read; None for the last, or where a text has one row of numbers
    types: NDArray[np.int64] | None = None  # [seq], which of two texts a token belongs to

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        parts: list[Arrays] = [*self.streams.values(), self.values, self.past]
        return self.logits.nbytes + sum(array.nbytes for arrays in parts for array in arrays.values())

    def row(self, index: int) -> "CleanRun":

        def of(arrays: Arrays) -> Arrays:
            return {name: array[index : index + 1] for name, array in arrays.items()}

        streams = {layer: of(stream) for layer, stream in self.streams.items()}
        own = slice(index, index + 1)
        return replace(
            self,
            ids=self.ids[own],
            streams=streams,
            values=of(self.values),
            past=of(self.past),
            logits=self.logits[own],
        )

    def corrupted(self, layer: int, rows: Rows) -> dict[Edit, Arrays]:
        """The interventions of one layer; see `Corruption.at`."""
        return {} if self.corruption is None else self.corruption.at(layer, rows)


def run_clean(
    graphs: Segments,
    ids: NDArray[np.int64],
    layers: Collection[int],
    hooks: Collection[str],
    corruption: Corruption | None = None,
    at: int | None = None,
    types: NDArray[np.int64] | None = None,
) -> CleanRun:
    """Run prompts of one length, [rows, seq], and store the values that patched runs need, which start at `layers`."""
    if graphs.model.rounds_by_call and len(ids) > 1:  # the rows of one call would change each other
        return _joined([run_clean(graphs, row[None], layers, hooks, corruption, at, types) for row in ids])
    run, rows = CleanRun(ids, corruption=corruption, at=at, types=types), Rows(ids, types=types)
    stream = Arrays()
    for layer in range(EMBEDDING, graphs.layers):  # the embedding counts as a layer before the first
        if layer in layers:
            run.streams[layer] = stream  # what enters the layer, so that a patched run can start there
        keys = graphs.keys_of(layer)
        own = [hook for hook in hooks if hook.startswith(f"blocks.{layer}.")]
        # A key or value may be one of the hook points too: an output is asked for once.
        outputs = tuple(dict.fromkeys([*keys, *own]))
        stream, values = graphs.layer(layer, rows, stream, run.corrupted(layer, rows), outputs)
        run.values |= {hook: values[hook] for hook in own}
        run.past |= {name: values[hook] for hook, name in keys.items()}
    # A sweep reads one position alone.
    run.logits = graphs.values_at(rows, stream, run.corrupted(graphs.layers, rows), at)
    if has_nan(run.logits):
        # The cause is looked for only now: a check of each layer would slow every run.
        _refuse_nan(graphs, rows, run)
    return run


def _joined(runs: Sequence[CleanRun]) -> CleanRun:

    def of(arrays: Sequence[Arrays]) -> Arrays:
        return {name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]}

    streams = {layer: of([run.streams[layer] for run in runs]) for layer in runs[0].streams}
    ids, logits = (np.concatenate(parts) for parts in zip(*((run.ids, run.logits) for run in runs), strict=True))
    values, past = of([run.values for run in runs]), of([run.past for run in runs])
    return replace(runs[0], ids=ids, streams=streams, values=values, past=past, logits=logits)


def _refuse_nan(graphs: Segments, rows: Rows, run: CleanRun) -> NoReturn:
    """Name the first layer whose input has NaN."""
    stream = Arrays()
    for layer in range(EMBEDDING, graphs.layers):
        if any(has_nan(array) for array in stream.values()):
            raise ModelError(f"logits are NaN without a patch; first at the input of layer {layer}: {ON_NAN}")
        stream, _ = graphs.layer(layer, rows, stream, run.corrupted(layer, rows))
    where = "the output of the last layer" if any(has_nan(array) for array in stream.values()) else "the logits"
    raise ModelError(f"logits are NaN without a patch; first at {where}: {ON_NAN}")
