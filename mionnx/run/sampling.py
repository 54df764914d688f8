"""From logits to the next token, and to the end of a text, by the rules of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError, InterventionError
from mionnx.graph.hooked_model import DTYPES
from mionnx.graph.metadata import Metadata
from mionnx.inputs.token_batch import TokenBatch
from mionnx.inputs.tokens import Decoder, decode
from mionnx.machine import memory
from mionnx.machine.arrays import to_array
from mionnx.machine.softmax import log_softmax, softmax
from mionnx.machine.typed import typed
from mionnx.spec.hook_spec import HookSpec

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """Choice of the next token; names and meanings are those of transformers' `generate`."""

    do_sample: bool = False  # otherwise the top token is taken, ties going to the lowest id
    temperature: float = 1.0
    top_k: int = 50  # 0 for all
    top_p: float = 1.0
    repetition_penalty: float = 1.0  # above 1 makes tokens of the text less likely (Keskar et al. 2019)

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

    def scores(self, logits: Floats, text: NDArray[np.int64]) -> Floats:
        """The processed logits of one row whose ids so far are `text`; read for a repetition penalty only."""
        scores = penalised(logits, text, self.repetition_penalty)
        if not self.do_sample:
            return scores
        return nucleus(top(scores / self.temperature, self.top_k), self.top_p)

    def choose(self, logits: Floats, text: NDArray[np.int64], random: np.random.Generator) -> int:
        scores = self.scores(logits, text)
        if not self.do_sample:
            return int(np.argmax(scores))
        return int(random.choice(len(scores), p=softmax(scores)))


def penalised(logits: Floats, text: NDArray[np.int64], penalty: float) -> Floats:
    """Penalise tokens of the text: divide positive logits, multiply negative ones."""
    if penalty == 1:
        return logits
    scores, seen = logits.copy(), np.unique(text)
    scores[seen] = np.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
    return scores


def top(scores: Floats, k: int) -> Floats:
    """Mask all but the k largest with -inf; values equal to the k-th stay."""
    if k == 0 or k >= len(scores):
        return scores
    return np.where(scores < np.partition(scores, -k)[-k], -np.inf, scores)


def nucleus(scores: Floats, p: float) -> Floats:
    """Mask all but the most likely tokens that reach probability p (Holtzman et al. 2019)."""
    if p >= 1:
        return scores
    order = np.argsort(scores, kind="stable")
    rest = order[np.cumsum(softmax(scores[order])) <= 1 - p]
    nucleus_scores = scores.copy()
    nucleus_scores[rest[rest != order[-1]]] = -np.inf
    return nucleus_scores


@dataclass(frozen=True)
class Stopping:
    """Conditions that end a row of a generation; the token that ends it is kept."""

    max_new_tokens: int
    min_new_tokens: int  # an end-of-text token cannot be chosen before so many
    eos_token_ids: tuple[int, ...]
    strings: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, value, least in (("max", self.max_new_tokens, 1), ("min", self.min_new_tokens, 0)):
            if not isinstance(value, int | np.integer) or value < least:
                raise InputError(f"{name}_new_tokens must be an integer of {least} or above, got {value!r}")
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError(f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}")

    def ends(self, new: Sequence[int], tokenizer: Decoder | None) -> bool:
        """Whether a row with these new tokens has ended."""
        if len(new) >= self.max_new_tokens or new[-1] in self.eos_token_ids:
            return True
        if not self.strings or tokenizer is None:
            return False
        text = decode(tokenizer, new, skip_special_tokens=False)
        return any(string in text for string in self.strings)

    def refuse_unreached(self, spec: HookSpec) -> None:
        """Refuse interventions in the phase "generated" where no generated token is read."""
        phases: list[Any] = [edit.positions for _, edit in spec.interventions]
        for state in (*spec.state_knockouts, *spec.state_steerings):
            phases += state.positions_
        if any(isinstance(phase, str) and phase == "generated" for phase in phases) and self.max_new_tokens == 1:
            raise InterventionError(
                "an intervention in the phase 'generated' would do nothing: with max_new_tokens=1 no new token is read"
            )


def refuse_too_long(name: str, new: int, batch: TokenBatch, metadata: Metadata) -> None:
    """Refuse a generation beyond the positions of the model or the memory of the machine; `name` asks for it."""
    sizes, length = metadata.sizes, int(batch.lengths.max())
    longest = length + int(new) - 1  # the last token is never read
    if sizes.max_positions is not None and longest > sizes.max_positions:
        raise InputError(
            f"{name}={new} after {length} tokens, but the model has positions for {sizes.max_positions} only"
        )
    heads = sum(prod(port.shape(1, 1)) for port in metadata.ports if port.positional)  # numbers of one token
    token = batch.batch * (heads * np.dtype(DTYPES[metadata.dtype]).itemsize + np.dtype(np.int64).itemsize)
    if longest * token > memory.total():
        raise InputError(
            f"{name}={new} after {length} tokens: their ids, keys and values would take "
            f"{memory.format_bytes(longest * token)}, and this machine has {memory.format_bytes(memory.total())}; "
            f"at most {max(memory.total() // token - length + 1, 0)} tokens fit"
        )


def stop_texts(stops: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    strings = (stops,) if isinstance(stops, str) else tuple(stops or ())
    if not all(isinstance(string, str) and string for string in strings):
        raise InputError(f"stop_strings must be texts of at least one character, got {stops!r}")
    return strings


@dataclass(frozen=True)
class Growth:
    """The way in which texts grow."""

    sampling: Sampling
    stopping: Stopping
    tokenizer: Decoder | None
    pad: int  # the token that rows which have ended are fed
    seed: int | None


class GrowingTexts:
    """The rows of text while they grow, from prompts on; their numbers tell them apart for a seed."""

    def __init__(self, batch: TokenBatch, growth: Growth, rows: Sequence[int]) -> None:
        self.growth = growth
        self.prompts = [row[real] for row, real in zip(batch.input_ids, batch.real, strict=True)]
        self.new: list[list[int]] = [[] for _ in self.prompts]
        self.ended = [False] * len(self.prompts)
        self.last = np.zeros(len(self.prompts), np.int64)
        seeds = [np.random.SeedSequence(growth.seed, spawn_key=(row,)) for row in rows]
        self.random = [np.random.default_rng(one) for one in seeds]

    @property
    def finished(self) -> bool:
        return all(self.ended)

    def take(self, logits: NDArray[Any]) -> NDArray[np.int64]:
        """Choose a token for every row that has not ended; the others get padding."""
        for row, (new, ended) in enumerate(zip(self.new, self.ended, strict=True)):
            if ended:
                self.last[row] = self.growth.pad
                continue
            token = self._choose(logits[row].astype(np.float64), row)
            new.append(token)
            self.last[row] = token
            self.ended[row] = self.growth.stopping.ends(new, self.growth.tokenizer)
        return self.last.copy()

    def _choose(self, logits: Floats, row: int) -> int:
        sampling, stopping = self.growth.sampling, self.growth.stopping
        if np.isnan(logits).any():
            raise InputError(f"the logits of row {row} have NaN after {len(self.new[row])} new tokens")
        if len(self.new[row]) < stopping.min_new_tokens:
            logits[list(stopping.eos_token_ids)] = -np.inf
        text = [*self.prompts[row].tolist(), *self.new[row]] if sampling.repetition_penalty != 1 else []
        return sampling.choose(logits, np.array(text, np.int64), self.random[row])


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


def logit_vector(logits: ArrayLike) -> Floats:
    """Check the logits of one position, [vocab], and give them in float64."""
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
