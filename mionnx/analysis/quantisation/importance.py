"""Importance of the inputs of a model's matrices: their mean squares over a text."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.layer_chain import LayerChain, Stage
from mionnx.engine.options import Options
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress, silent
from mionnx.quantise.matrices import find_weights

Importance = dict[str, NDArray[np.float64]]


def mean_squares(
    model: HookedModel, calls: Sequence[TokenBatch], options: Options, progress: Progress = silent
) -> Importance:
    """Measure what the products of a model read.

    Args:
        calls: prompts without padding.
        progress: called as (stage, done, total) in layers.

    Returns:
        weight -> the mean square of each of its inputs over all tokens, [in].
    """
    chain = LayerChain(model, find_weights(model), options, inputs=True)
    stages, tokens = [*map(Stage.first, calls)], sum(call.input_ids.size for call in calls)
    squares = Importance()
    for number, piece in enumerate(chain.pieces):
        progress("what matrices read", number, len(chain.pieces))
        here = {name: value for name, value in chain.read.items() if chain.place(name) == piece}
        for prompt, stage in enumerate(stages):
            stages[prompt], values = chain.step(piece, stage, {}, here.values())
            values |= stage.stream
            sums = {value: _squares(values[value]) for value in {*here.values()}}
            for name, value in here.items():
                squares[name] = squares.get(name, np.zeros(1)) + sums[value] / tokens
    return squares


def _squares(value: NDArray[np.floating]) -> NDArray[np.float64]:
    rows = value.reshape(-1, value.shape[-1])
    return np.asarray(np.square(rows, dtype=np.float64).sum(axis=0))
