"""`GrowingTexts`: the rows of text of a generation while they grow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.inputs.token_batch import TokenBatch
from mionnx.inputs.tokens import Decoder
from mionnx.run.sampling import Sampling
from mionnx.run.stopping import Stopping


@dataclass(frozen=True)
class Growth:
    """The way in which texts grow.

    Attributes:
        sampling: chooses tokens.
        stopping: ends rows.
        tokenizer: of the model, if it has one.
        pad: the token that rows which have ended are fed.
        seed: of the sampling; None for another one at every call.
    """

    sampling: Sampling
    stopping: Stopping
    tokenizer: Decoder | None
    pad: int
    seed: int | None


class GrowingTexts:
    """The rows of text while they grow."""

    def __init__(self, batch: TokenBatch, growth: Growth, rows: Sequence[int]) -> None:
        """Begin with prompts; `rows` are their numbers, by which a seed tells them apart."""
        self.sampling, self.stopping, self.tokenizer = growth.sampling, growth.stopping, growth.tokenizer
        self.pad = growth.pad
        self.prompts = [row[real] for row, real in zip(batch.input_ids, batch.real, strict=True)]
        self.new: list[list[int]] = [[] for _ in self.prompts]
        self.ended = [False] * len(self.prompts)
        self.last = np.zeros(len(self.prompts), np.int64)
        seeds = [np.random.SeedSequence(growth.seed, spawn_key=(row,)) for row in rows]
        self.random = [np.random.default_rng(one) for one in seeds]

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return all(self.ended)

    def take(self, logits: NDArray[Any]) -> NDArray[np.int64]:
        """Choose a token for every row that has not ended; the others get padding."""
        for row, (new, ended) in enumerate(zip(self.new, self.ended, strict=True)):
            if ended:
                self.last[row] = self.pad
                continue
            token = self._choose(logits[row].astype(np.float64), row)
            new.append(token)
            self.last[row] = token
            self.ended[row] = self.stopping.ends(new, self.tokenizer)
        return self.last.copy()

    def _choose(self, logits: NDArray[np.float64], row: int) -> int:
        if np.isnan(logits).any():
            raise InputError(f"the logits of row {row} have NaN after {len(self.new[row])} new tokens")
        if len(self.new[row]) < self.stopping.min_new_tokens:
            logits[list(self.stopping.eos_token_ids)] = -np.inf
        penalised = self.sampling.repetition_penalty != 1
        text = [*self.prompts[row].tolist(), *self.new[row]] if penalised else []
        return self.sampling.choose(logits, np.array(text, np.int64), self.random[row])
