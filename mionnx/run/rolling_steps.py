"""Steps of a generation in calls of one shape, for CUDA graphs; see `mionnx.engine.rolling_cache`."""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.engine.engine import Program
from mionnx.engine.rolling_cache import padded
from mionnx.inputs.token_batch import TokenBatch

MASK = "attention_mask"
ROUND = 64  # columns of keys, past and new, are a multiple of this


def rolls(program: Program, bound: BoundSpec, batch: TokenBatch) -> bool:
    """Whether the steps from here on can be calls of one shape.

    What has an axis of keys is another shape at every step, and its columns are those of the text.
    """
    if not program.rolls or bound.model.metadata.recurrent or batch.final_lengths is None:
        return False
    axes = [*(edit.axes for edit, _ in bound.edits), *(capture.node.axes for capture in bound.captures)]
    return not any("seq_k" in one for one in axes)


class Rolling:
    """The steps of one generation, from its second pass on.

    Args:
        outputs: names to fetch, those of the next past among them.
        inputs: of the first such step.
        present_to_past: output -> the input that takes it.
    """

    def __init__(
        self,
        program: Program,
        outputs: Sequence[str],
        inputs: Mapping[str, Any],
        present_to_past: Mapping[str, str],
        batch: TokenBatch,
    ) -> None:
        assert batch.final_lengths is not None  # as `rolls` says
        left = int((batch.final_lengths - batch.lengths).max())
        self.columns = -(-(batch.total + left) // ROUND) * ROUND
        self.names = {*present_to_past.values()}
        past = {name: padded(np.asarray(inputs[name]), self.columns - 1) for name in self.names}
        self.cache = program.rolling(outputs, {**self._others(inputs, batch), **past}, present_to_past)
        self.inputs = program.inputs
        finalize(self, self.cache.free.append, self.cache)

    def _others(self, inputs: Mapping[str, Any], batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """The inputs besides the past, the mask padded as that is."""
        mask = np.zeros((batch.batch, self.columns), np.int64)
        mask[:, self.columns - batch.total :] = batch.attention_mask
        others = {name: np.asarray(value) for name, value in inputs.items() if name not in self.names}
        return {**others, MASK: mask}

    def step(self, inputs: Mapping[str, Any], batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """Run one step: output -> array, without the past."""
        others = self._others(inputs, batch)
        return self.cache.step({name: value for name, value in others.items() if name in self.inputs})

    def past(self, batch: TokenBatch) -> dict[str, NDArray[Any]]:
        """Keys and values after the steps so far: input -> array."""
        return self.cache.past(batch.total)
