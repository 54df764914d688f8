"""`get_logit_diff`: the lead of one token's logit over another's, on a prompt or over many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.inputs.token_batch import Place
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.resampling import bootstrap_interval, sign_flip_p_value, success_interval
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.metric_place import part_read, values_read
from mionnx.run.prompt import each_of, is_list, prompt_text, texts_of, token_of, token_text
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt, answer_id, warn_of_spelling
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import Tokens
from mionnx.view import Bars, Columns, Shown, Table, View

Numbers = NDArray[np.float64]
TWO = 2  # prompts from which on there is a spread


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class LogitDiffs(Shown):
    """The lead of an answer's logit over another token's, prompt by prompt.

    Attributes:
        prompts: [prompts], texts up to the position that is read.
        answers, versus: [prompts], texts of the tokens.
        logits: [prompts, 2], of the answer and of the other token.
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    versus: tuple[str, ...]
    logits: Numbers

    @property
    def by_pair(self) -> Numbers:
        """[prompts]: the differences."""
        return np.asarray(self.logits[:, 0] - self.logits[:, 1])

    @property
    def n(self) -> int:
        return len(self.logits)

    @property
    def mean(self) -> float:
        return float(self.by_pair.mean())

    @property
    def std(self) -> float:
        """The standard deviation over prompts (n - 1 in the denominator); NaN for one."""
        return float("nan") if self.n < TWO else float(self.by_pair.std(ddof=1))

    @property
    def sem(self) -> float:
        """The standard error of the mean."""
        return self.std / float(np.sqrt(self.n))

    @property
    def accuracy(self) -> float:
        """The share of prompts at which the answer has the larger logit."""
        return float((self.by_pair > 0).mean())

    def interval(self, confidence: float = 0.95, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """The ends of a bootstrap interval of the mean: percentiles over prompts drawn anew.

        Raises:
            InputError: one prompt, or a confidence that is no share.
        """
        low, high = bootstrap_interval(self.by_pair, confidence, resamples, seed)
        return float(low), float(high)

    def accuracy_interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The interval of Clopper and Pearson of the accuracy: exact, for few prompts too."""
        return success_interval(int((self.by_pair > 0).sum()), self.n, confidence)

    def p_value(self, resamples: int = 1000, seed: int = 0) -> float:
        """The p-value of the mean, two-sided, by flipping signs; exact of 12 prompts or fewer."""
        return float(sign_flip_p_value(self.by_pair, resamples, seed))

    def _facts(self) -> Iterator[str]:
        yield f"mean {decimal(self.mean)}±{decimal(self.sem)}"
        yield f"right {int((self.by_pair > 0).sum())} of {count(self.n, 'prompt')}"

    def _lines(self) -> Iterator[str]:
        yield f"standard deviation {decimal(self.std)}, ± is the standard error; the smallest differences:"
        for row in np.argsort(self.by_pair, kind="stable").tolist():
            answer, versus = self.answers[row], self.versus[row]
            yield f"{decimal(self.by_pair[row], sign=True):>8}  {answer!r} over {versus!r} after {self.prompts[row]!r}"

    def facts(self) -> str:
        """One line with accuracy, mean and spread."""
        return (
            f"accuracy {decimal(100 * self.accuracy, 1)} % of {count(self.n, 'prompt')}, mean difference of the logits "
            f"{decimal(self.mean, 3)} ± {decimal(self.sem, 3)} (standard error; standard deviation "
            f"{decimal(self.std, 3)})"
        )

    IN_JSON = ("n", "accuracy", "mean", "std", "sem", "by_pair", "prompts", "answers", "versus", "logits")

    def _columns(self) -> Columns:
        columns: dict[str, Any] = {"pair": np.arange(self.n), "prompt": self.prompts, "answer": self.answers}
        return {**columns, "versus": self.versus, "difference": self.by_pair}

    def view(self) -> View:
        """The differences in ascending order with their mean, and a table of every prompt."""
        order = np.argsort(self.by_pair, kind="stable")
        labels = [f"{self.prompts[row]} …{self.answers[row]} over{self.versus[row]}" for row in order.tolist()]
        meaning = "A number is the answer's logit minus the other token's; above 0 the answer is right."
        unit, words = "difference of the logits", "prompts, the smallest difference first"
        bars = Bars(labels, self.by_pair[order], unit, upright=True, level=self.mean, order=words)
        return View("Differences of logits", [bars, self.table()], about=self.facts(), meaning=meaning)

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: every prompt, or the first k."""
        page = {"heading": "Prompts", "most": 25, "styles": {"answer": "token", "versus": "token"}}
        table = Table("prompt", "answer", "versus", "difference", title=self.facts(), on_page=page)
        for row in range(self.n)[:k]:
            cells = (self.prompts[row], repr(self.answers[row]), repr(self.versus[row]))
            table.add_row(*cells, decimal(self.by_pair[row], 3, sign=True))
        return table


@typed(leave=["answer", "versus"])
def get_logit_diff(
    model: Runner,
    prompt: Prompt,
    answer: Tokens,
    versus: Tokens,
    *,
    position: Place | None = None,
    hooks: HookSpec | None = None,
    batch_size: BatchSize = AUTO,
) -> Any:
    """The lead of a token's logit over another's, on a prompt or each of a list.

    Args:
        prompt: a text, or ids; or a list of them.
        answer, versus: tokens, as ids or texts, one for all prompts or one a prompt.
        position: at which the next token is predicted, negative from the end; the last if left out, and of a masked
            language model that of the one "mask". Of an encoder's labels `answer` and `versus` are names.
        hooks: interventions to run the prompts with.
        batch_size: prompts of one pass; "auto": as many as run well and fit into memory.

    Returns:
        a number; of a list the number of each prompt, with accuracy, mean and spread.

    Raises:
        InputError: no such position or token, or another number of tokens than prompts.

    Example:
        model.get_logit_diff("The capital of France is", "Paris", "Berlin")
        both = model.get_logit_diff(["The capital of France is", "The capital of Peru is"], ["Paris", "Lima"], "Berlin")
        both.mean, both.sem, both.accuracy
    """
    texts = texts_of(model, prompt)
    sides = [each_of(answer, len(texts), "answer"), each_of(versus, len(texts), "versus")]
    labels, part = model.hooked.metadata.labels, part_read(model.hooked, position)
    column = answer_id if labels else token_of
    pairs = np.array([[column(model, token) for token in tokens] for tokens in sides]).T

    def read(row: int, cache: HookCache) -> NDArray[np.float64]:
        logits = values_read(model.hooked, cache.output())[0]
        for what, tokens in zip(("answer", "versus"), sides, strict=True):
            warn_of_spelling(model, what, tokens[row], logits)
        return np.asarray(logits[pairs[row]].astype(np.float64))

    at = part.positions
    places = [text.place(at) if isinstance(at, int) else len(text) - 1 for text in texts]
    request = ListRequest([text.ids for text in texts], hooks or HookSpec(), batch_size, logits=part)
    logits = np.stack(map_rows(model, request, read, "logits"))
    if not is_list(model, prompt):
        return float(logits[0, 0] - logits[0, 1])
    name = labels.__getitem__ if labels else partial(token_text, model)
    answers, others = (tuple(name(token) for token in side) for side in pairs.T.tolist())
    shown = tuple(prompt_text(model, text.ids[: place + 1]) for text, place in zip(texts, places, strict=True))
    return LogitDiffs(shown, answers, others, logits)
