"""From logits to the next token: the steps of transformers' `generate`, in its order and with its rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.machine.arrays import to_array
from mionnx.machine.softmax import log_softmax, softmax
from mionnx.machine.typed import typed

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token; names and meanings are those of transformers' `generate`.

    Attributes:
        do_sample: sample; otherwise take the top token, ties going to the lowest id.
        temperature: logits are divided by it; only when sampling.
        top_k: keep the k most likely tokens only, 0 for all; only when sampling.
        top_p: keep the most likely tokens that together reach this probability; only when sampling.
        repetition_penalty: above 1 makes tokens that stand in the text less likely (Keskar et al. 2019).
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, fine in (
            ("temperature", self.temperature > 0),
            ("top_k", self.top_k >= 0 and int(self.top_k) == self.top_k),
            ("top_p", 0 < self.top_p <= 1),
            ("repetition_penalty", self.repetition_penalty > 0),
        ):
            value: Any = getattr(self, name)
            if not fine or not np.isfinite(value):
                limits = {"top_k": "an integer of 0 or above", "top_p": "above 0 and at most 1"}
                raise InputError(f"{name} must be {limits.get(name, 'above 0')}, got {value}")

    def scores(self, logits: Row, text: NDArray[np.int64]) -> Row:
        """The processed logits of one row.

        Args:
            text: the ids of the row so far, padding left out; read for a repetition penalty only.
        """
        scores = penalised(logits, text, self.repetition_penalty)
        if not self.do_sample:
            return scores
        return nucleus(top(scores / self.temperature, self.top_k), self.top_p)

    def choose(self, logits: Row, text: NDArray[np.int64], random: np.random.Generator) -> int:
        """The next token of one row; see `scores`."""
        scores = self.scores(logits, text)
        if not self.do_sample:
            return int(np.argmax(scores))
        return int(random.choice(len(scores), p=softmax(scores)))


def penalised(logits: Row, text: NDArray[np.int64], penalty: float) -> Row:
    """Penalise tokens of the text: divide positive logits, multiply negative ones."""
    if penalty == 1:
        return logits
    scores, seen = logits.copy(), np.unique(text)
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    return scores


def top(scores: Row, k: int) -> Row:
    """Mask all but the k largest with -inf; values equal to the k-th stay."""
    if k == 0 or k >= len(scores):
        return scores
    return np.where(scores < np.partition(scores, -k)[-k], -np.inf, scores)


def nucleus(scores: Row, p: float) -> Row:
    """Mask all but the most likely tokens that reach probability p (Holtzman et al. 2019)."""
    if p >= 1:
        return scores
    order = np.argsort(scores, kind="stable")
    rest = order[np.cumsum(softmax(scores[order])) <= 1 - p]
    nucleus_scores = scores.copy()
    nucleus_scores[rest[rest != order[-1]]] = -np.inf
    return nucleus_scores


@typed(InputError)
def sample_token(logits: ArrayLike, temperature: float = 0.0, seed: int | None = None) -> int:
    """Choose a token from the logits of one position.

    Args:
        logits: [vocab].
        temperature: 0 takes the top token, ties going to the lowest id; above 0, samples softmax(logits / temperature).
        seed: of the sampling; the same seed, logits and temperature give the same token.

    Raises:
        InputError: a negative temperature, NaN or infinity, or logits that are no vector.

    Example:
        sample_token(model.forward("The capital of France is").output()[0, -1], temperature=0.7, seed=0)
    """
    vector = logit_vector(logits)
    refuse_seed(seed)
    if not temperature >= 0 or not np.isfinite(temperature):
        raise InputError(f"temperature must be 0 or above, got {temperature}")
    if temperature == 0:
        return int(np.argmax(vector))
    with np.errstate(over="ignore"):  # at a tiny temperature all but the top token become -inf, which is right
        probabilities = np.exp(log_softmax((vector - vector.max()) / temperature))
    return int(np.random.default_rng(seed).choice(len(vector), p=probabilities / probabilities.sum()))


def refuse_seed(seed: int | None) -> None:
    """Refuse a seed that numpy does not take."""
    if seed is not None and seed < 0:
        raise InputError(f"seed must be an integer of 0 or above, got {seed}")


def logit_vector(logits: ArrayLike) -> NDArray[np.float64]:
    """The logits of one position, [vocab], in float64.

    Raises:
        InputError: another shape, NaN, or no finite largest one.
    """
    try:
        array = np.asarray(to_array(logits), np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"logits are no array of numbers: {error}") from error
    if array.ndim != 1 or array.size == 0:
        raise InputError(f"logits of one position are [vocab], got shape {list(array.shape)}")
    if np.isnan(array).any():
        raise InputError(f"logits have NaN, first at token {int(np.argmax(np.isnan(array)))}")
    if not np.isfinite(array.max()):
        raise InputError(f"logits may be -inf, but not all of them, and not inf; the largest is {array.max()}")
    return array
