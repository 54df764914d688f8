"""`contrast`: steering directions from pairs of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from mionnx.analysis.steering.calibration import Texts, map_values, texts_of
from mionnx.analysis.steering.control_vector import VECTOR_HOOK
from mionnx.analysis.steering.direction_methods import directions_of, separation
from mionnx.analysis.steering.directions import Directions, template_of
from mionnx.errors import InputError
from mionnx.graph.hook_points import HookPoint
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.runner import Runner


@typed()
def contrast(
    model: Runner,
    positive: Texts,
    negative: Texts,
    hook: str | HookPoint = VECTOR_HOOK,
    *,
    layers: Sequence[int] | None = None,
    positions: int | Sequence[int] = -1,
    method: str = "mean_difference",
    progress: bool | None = None,
    batch_size: BatchSize = AUTO,
) -> Directions:
    """The direction from negative to positive prompts, in every layer.

    Args:
        positive, negative: prompts; the n-th of the one and of the other are a pair.
        hook: a kind of hook point with one vector a token: "resid_post", "hook_mlp_out", ...
        layers: all if left out.
        positions: the tokens that are compared, negative ones from the end; the mean is taken over several.
        method: "mean_difference", or "pca": the axis along which the pairs' differences are largest, as long as
            their mean along it.
        progress: see `patch_sweep`.
        batch_size: prompts of one pass, those of like length together; "auto": as run well and fit into memory.

    Returns:
        one vector a layer; strength 1 is the pairs' difference.

    Raises:
        InputError: no prompts, or not as many on both sides.
        HookError, InterventionError: no such hook point, layer or position; prompts that do not differ there.

    Example:
        directions = model.contrast("The capital of Germany is", "The capital of France is")
        model.generate("The capital of France is", directions.spec(2), max_new_tokens=2).texts
    """
    sides = [texts_of("positive", positive), texts_of("negative", negative)]
    if len(sides[0]) != len(sides[1]):
        raise InputError(f"{len(sides[0])} positive and {len(sides[1])} negative prompts make no pairs")
    chosen = tuple(range(model.num_layers)) if layers is None else tuple(sorted({*layers}))
    short, template = template_of(hook)
    points = [template.format(i=layer) for layer in chosen]
    at = [positions] if isinstance(positions, int | np.integer) else [*positions]
    # Both sides in one list, so that prompts of like length share a pass.
    ids, mean = model.ids([*sides[0], *sides[1]]), partial(np.mean, axis=0)
    activations = map_values(model, ids, points, at, mean, batch_size, "capturing", progress)
    plus, minus = np.split(np.stack(activations, axis=1), 2, axis=1)  # [layers, pairs, width]
    vectors = directions_of(plus, minus, method, chosen)
    return Directions(vectors, chosen, short, method, len(sides[0]), separation(plus, minus, vectors, method))
