"""`calibrate`: the length of the residual stream, which says whether a steering strength is small or large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.steering.directions import Directions
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

Texts = str | Sequence[str]


def texts_of(name: str, texts: Texts) -> list[str]:
    """One text or several as a list."""
    rows = [texts] if isinstance(texts, str) else list(texts)
    if not rows or not all(isinstance(text, str) and text for text in rows):
        raise InputError(f"{name} must be one or more texts, got {texts!r}")
    return rows


def one_list_each(positions: Any) -> bool:
    """Whether positions are a list for each prompt, rather than the same for all."""
    # None and "prompt" are the same tokens in every text.
    plain = isinstance(positions, str | int | np.integer) or positions is None
    return not plain and not all(isinstance(one, int | np.integer) for one in positions)


def positions_of(positions: Any, prompt: int, count: int) -> Any:
    """The positions in one of `count` prompts."""
    if not one_list_each(positions):
        return positions
    if len(positions) != count:
        raise InputError(f"positions for {len(positions)} prompts, and there are {count}")
    return list(positions[prompt])


def whole_numbers(positions: Any) -> list[int] | None:
    """The positions in every text; None for all of them."""
    if positions is None or (isinstance(positions, str) and positions == "prompt"):
        return None
    several = [positions] if isinstance(positions, int | np.integer) else positions
    listed = isinstance(several, Sequence | np.ndarray) and not isinstance(positions, bool)
    if not listed or not all(isinstance(one, int | np.integer) and not isinstance(one, bool) for one in several):
        raise InputError(f'positions are integers, or "prompt" or None for all tokens, got {positions!r}')
    return [int(one) for one in several]


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
    """[points]: the median length of the values at the chosen tokens, but the first of a text if there are others."""

    def lengths(texts: Sequence[Tokens], positions: Any) -> list[NDArray[np.float64]]:
        at = None if isinstance(positions, str) else positions
        return map_values(model, texts, points, at, partial(np.linalg.norm, axis=-1), batch_size, "measuring")

    each = [positions_of(positions, prompt, len(texts)) for prompt in range(len(texts))]
    if one_list_each(positions):
        # Each text has its own spec then, and a batch has one.
        by_text = [lengths([text], own)[0] for text, own in zip(texts, each, strict=True)]
    else:
        by_text = lengths(texts, positions)
    later = np.concatenate([_later(len(text), own) for text, own in zip(texts, each, strict=True)])
    pooled = np.concatenate(by_text, axis=1)
    # Only where every token is the first of its text do first tokens count: see `calibrate`.
    return np.asarray(np.median(pooled[:, later] if later.any() else pooled, axis=1))


def _later(length: int, positions: Any) -> NDArray[np.bool_]:
    if positions is None or isinstance(positions, str):
        return np.arange(length) > 0
    return np.atleast_1d(positions) % length > 0


def map_values(
    model: Runner,
    texts: Sequence[Any],
    points: Sequence[str],
    positions: int | Sequence[int] | None,
    reduce: Callable[[NDArray[np.float64]], Any],
    batch_size: BatchSize,
    stage: str,
    progress: bool | None = None,
) -> list[NDArray[np.float64]]:
    """[points, ...] for each text: a function of the values [positions, width] at hook points."""

    def read(row: int, cache: HookCache) -> NDArray[np.float64]:
        values = numbers(cache)
        # Norms and means of float16 values overflow or lose digits in float16.
        return np.stack([reduce(values[point][0].astype(np.float64)) for point in points])

    spec = HookSpec().capture([*points], positions=positions)
    return map_rows(model, ListRequest([*texts], spec, batch_size, logits=False), read, stage, progress=progress)
