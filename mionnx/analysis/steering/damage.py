"""What a direction does to texts that it is not meant for: their loss at each strength, and a random direction beside.

A strength that flips an answer may leave a model that writes no text any more. The damage is how much the mean loss of
neutral texts grows (nats a token), and the largest strength within a bound is one that steers without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.steering.calibration import Texts, one_list_each, texts_of
from mionnx.analysis.steering.directions import Direction
from mionnx.errors import InputError
from mionnx.inputs.lacking import refuse_without_vocabulary
from mionnx.machine.brief import Brief
from mionnx.machine.stored import Storable
from mionnx.run.batching import BatchSize
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

Numbers = NDArray[np.float64]


@dataclass(frozen=True, repr=False, eq=False)
class Damage(Brief, Storable):
    """The harm of a direction by its strengths.

    Attributes:
        losses: how much the mean loss of the neutral texts grows, nats a token, float64 [strengths].
        within: the bound.
        largest: the strength farthest from 0 whose damage, and that of all between, is within the bound; NaN if none
            of the strengths but 0 is.
        probabilities: of the target under a random direction of equal length, [prompts, strengths].
        random_losses: the damage of that direction, [strengths].
    """

    losses: Numbers
    within: float
    largest: float
    probabilities: Numbers
    random_losses: Numbers


def check_guard(model: Runner, damage_texts: Texts | None, within: float, positions: Any) -> None:
    """Refuse what a guard cannot measure, before anything runs."""
    if damage_texts is None:
        return
    refuse_without_vocabulary(model.hooked, "the loss of texts")
    if model.bidirectional:
        raise InputError("damage_texts are read by their next tokens, which an encoder has none of")
    if not 0 < within < np.inf:
        raise InputError(f"within={within!r}: nats a token, above 0")
    if one_list_each(positions):
        raise InputError("positions for each prompt say nothing of damage_texts: give the same for all")
    short = [text for text in texts_of("damage_texts", damage_texts) if len(model.tokenize(text)) < 2]
    if short:
        raise InputError(f"{short[0]!r} is one token, and the loss is that of next tokens")


def random_direction(direction: Direction, seed: int = 0) -> Direction:
    """A direction of equal length, uniform over all."""
    vector = np.random.default_rng(seed).normal(size=direction.vector.shape)
    return Direction(direction.hook, (vector * direction.norm / np.linalg.norm(vector)).astype(np.float32))


def losses_of(
    model: Runner, texts: Texts, direction: Direction, strengths: Numbers, positions: Any, batch_size: BatchSize
) -> Numbers:
    """How much the mean loss of texts grows by each strength, [strengths]."""
    rows, means = texts_of("damage_texts", texts), []
    for strength in [0.0, *strengths.tolist()]:
        edit = Intervention.Add((strength * direction.vector).astype(np.float32), positions=positions)
        spec = HookSpec().intervene(direction.hook, edit).set_metric("loss")
        cache = model.forward(rows, spec, logits=False, batch_size=batch_size)
        means.append(float(np.mean(np.asarray(cache.metric, np.float64))))
    return np.array(means[1:]) - means[0]


def largest_within(strengths: Numbers, losses: Numbers, within: float) -> float:
    """The strength farthest from 0 before which, on its side, no damage is above the bound."""
    fitting: list[float] = []
    for sign in (1, -1):
        side = np.flatnonzero(strengths * sign > 0)
        for at in side[np.argsort(strengths[side] * sign)]:
            if not losses[at] <= within:
                break
            fitting.append(float(strengths[at]))
    return max(fitting, key=abs, default=float("nan"))
