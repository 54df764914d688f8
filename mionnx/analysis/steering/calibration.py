"""`calibrate`: the length of the residual stream, which says whether a steering strength is small or large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.steering.directions import Directions
from mionnx.analysis.steering.prompts import Texts, one_list_each, positions_of, texts_of, whole_numbers
from mionnx.errors import HookError, InputError
from mionnx.inputs.tokens import Tokens
from mionnx.machine.stored import Stored
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.nan_logits import numbers
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec


@dataclass(frozen=True)
@typed(InputError)
class SteeringCalibration(Stored):
    """Strengths in units of the stream that they are added to; `save` writes .safetensors.

    Attributes:
        stream_norms: [layers], the median length of the value there over the prompts' tokens but the first of each.
        direction_norms: [layers], the lengths of the directions.
    """

    hook: str
    layers: tuple[int, ...]
    stream_norms: NDArray[np.float64]
    direction_norms: NDArray[np.float64]

    @property
    def scales(self) -> NDArray[np.float64]:
        """[layers]: the strength at which the added vector is as long as the stream."""
        return self.stream_norms / self.direction_norms

    def strength(self, layer: int, share: float) -> float:
        """The strength that adds this share of the stream's length to a layer."""
        return share * float(self.scales[self._at(layer)])

    def share(self, layer: int, strength: float) -> float:
        """The share of the stream's length that a strength adds to a layer."""
        return strength / float(self.scales[self._at(layer)])

    def _at(self, layer: int) -> int:
        if layer not in self.layers:
            raise HookError(f"layer {layer!r} was not calibrated; these were: {', '.join(map(str, self.layers))}")
        return self.layers.index(layer)


@typed(leave=["positions"])
def calibrate(
    model: Runner,
    directions: Directions,
    prompts: Texts,
    positions: int | str | Sequence[int] | None = None,
    *,
    batch_size: BatchSize = AUTO,
) -> SteeringCalibration:
    """Measure the length of the stream, over prompts, at the hook points of directions.

    Args:
        directions: the directions.
        prompts: texts.
        positions: the tokens that are measured, negative ones from each text's end; all if left out, or "prompt". The
            first of a text counts only where no other one is measured, as in prompts of one token: many models give it
            a length a hundred times that of others (massive activations, arXiv:2402.17762), and read nothing there.
        batch_size: prompts of one pass, those of like length together; "auto": as run well and fit into memory.

    Raises:
        InputError: no prompts, or positions that are neither "prompt" nor integers.
        InterventionError: a position that a prompt does not have.

    Example:
        directions = model.contrast("The capital of Germany is", "The capital of France is")
        model.calibrate(directions, "The capital of Italy is").strength(layer=2, share=0.3)
    """
    points = [directions.point(layer) for layer in directions.layers]
    texts = [model.tokenize(text) for text in texts_of("prompts", prompts)]
    norms = vector_norms(model, texts, points, whole_numbers(positions), batch_size)
    return SteeringCalibration(directions.hook, directions.layers, norms, directions.norms.astype(np.float64))


def vector_norms(
    model: Runner, texts: Sequence[Tokens], points: Sequence[str], positions: Any, batch_size: BatchSize = AUTO
) -> NDArray[np.float64]:
    """[points]: the median length of the values at the chosen tokens.

    Texts' first tokens are left out, unless nothing else was chosen.
    """
    each = [positions_of(positions, prompt, len(texts)) for prompt in range(len(texts))]
    if one_list_each(positions):
        rows = zip(texts, each, strict=True)
        lengths = [_lengths(model, [text], points, here, batch_size)[0] for text, here in rows]
    else:
        lengths = _lengths(model, texts, points, positions, batch_size)
    later = np.concatenate([_later(len(text), here) for text, here in zip(texts, each, strict=True)])
    pooled = np.concatenate(lengths, axis=1)
    return np.asarray(np.median(pooled[:, later] if later.any() else pooled, axis=1))


def _later(length: int, positions: Any) -> NDArray[np.bool_]:
    if positions is None or isinstance(positions, str):
        return np.arange(length) > 0
    return np.atleast_1d(positions) % length > 0


def _lengths(
    model: Runner, texts: Sequence[Tokens], points: Sequence[str], positions: Any, batch_size: BatchSize
) -> list[NDArray[np.float64]]:
    """[points, tokens] for each text: the lengths of the values at the same positions of each."""
    spec = HookSpec()
    for point in points:
        spec.capture(point, positions=None if isinstance(positions, str) else positions)

    def read(row: int, cache: HookCache) -> NDArray[np.float64]:
        values = numbers(cache)
        return np.stack([np.linalg.norm(values[point][0].astype(np.float64), axis=-1) for point in points])

    return map_rows(model, ListRequest([*texts], spec, batch_size, logits=False), read, "measuring")
