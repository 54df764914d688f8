"""Metrics of a sweep: a number a cell, from the logits at the position that is read."""

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, nearest
from mionnx.machine.softmax import log_softmax
from mionnx.run.prompt import each_of
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import warn_of_spelling

Numbers = NDArray[np.float64]
Token = int | str
Tokens = Token | Sequence[Token] | None
Measure = str | Callable[..., Any]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
METRICS = ("logit_diff", "probability", "log_probability", "kl", "rank")


@dataclass(frozen=True)
class Metric:
    """A metric on one prompt, or pair of prompts."""

    name: str
    # Ids of the tokens whose logits it reads, in this order; None for the whole vocabulary.
    needs: tuple[int, ...] | None
    of: Callable[[Numbers], Numbers]  # logits [rows, vocab or needs], float64 -> [rows]

    def __call__(self, logits: NDArray[Any]) -> Numbers:
        """Compute the metric of some rows, [rows, vocab or needs] -> [rows]."""
        # In float64: effects are differences between cells, often far smaller than the logits.
        values = np.asarray(self.of(logits.astype(np.float64)))
        if values.shape != (len(logits),) or values.dtype.kind not in "fiub":
            raise InputError(
                f"metric {self.name} gave {values.dtype} {list(values.shape)} for logits {list(logits.shape)}; it must "
                f"give one number a row, [{len(logits)}]"
            )
        return values.astype(np.float64)

    def measure(self, logits: NDArray[Any]) -> Numbers:
        """Compute the metric of logits of the whole vocabulary, [rows, vocab] -> [rows]."""
        return self(logits if self.needs is None else logits[:, list(self.needs)])


@dataclass(frozen=True)
class MetricRequest:
    """A metric as requested, before the prompts are known; its fields are those of a `Comparison`."""

    measure: Measure
    answer: Tokens = None
    versus: Tokens = None

    def __post_init__(self) -> None:
        if isinstance(self.measure, str) and self.measure not in METRICS:
            raise InputError(
                f"no metric {self.measure!r}; there are {', '.join(METRICS)}, or give a function of the logits"
                + nearest(self.measure, METRICS)
            )
        if self.answer is not None and (callable(self.measure) or self.measure == "kl"):
            raise InputError(f"metric {self.name} reads no answer")
        if self.versus is not None and self.measure != "logit_diff":
            raise InputError(f"metric {self.name} reads no `versus`, only logit_diff does")

    @property
    def name(self) -> str:
        """Name for tables and messages."""
        return self.measure if isinstance(self.measure, str) else getattr(self.measure, "__name__", "function")

    def identity(self, resume_key: str | None) -> list[Any]:
        """Name, `resume_key` and tokens, as JSON holds them."""
        if callable(self.measure) and resume_key is None:
            raise InputError(
                f"a sweep with the function {self.name} as its metric is resumed by a name that you give it: "
                'resume_key="..."; without one, resume=False'
            )
        return [self.name, resume_key, _plain(self.answer), _plain(self.versus)]

    def bind(self, model: Runner, pair: int, count: int, clean: NDArray[Any], other: NDArray[Any] | None) -> Metric:
        """Make the metric of one of `count` pairs, by the logits [vocab] of its clean and its corrupted prompt."""
        if callable(self.measure):
            return Metric(self.name, None, _function(self.measure, pair))
        if self.measure == "kl":
            reference = log_softmax(clean.astype(np.float64))
            return Metric(self.name, None, lambda logits: _divergence(reference, logits))
        answer, *versus = self._tokens(model, pair, count, clean, other)
        for what, tokens, logits in (("answer", self.answer, clean), ("versus", self.versus, other)):
            warn_of_spelling(model, what, each_of(tokens, count, what)[pair], clean if logits is None else logits)
        if not versus:
            return Metric(self.name, None, partial(_OF_ANSWER[self.measure], answer))
        return Metric(self.name, (answer, *versus), lambda logits: logits[:, 0] - logits[:, 1])

    def for_repeats(self, repeats: int) -> "MetricRequest":
        """The same metric where each prompt has several pairs, one after the other."""

        def each(tokens: Tokens) -> Tokens:
            return [token for token in tokens for _ in range(repeats)] if _several(tokens) else tokens

        return self if repeats == 1 else replace(self, answer=each(self.answer), versus=each(self.versus))

    @property
    def needs_logits(self) -> bool:
        """Whether only logits of the prompts tell the tokens or the distribution that it reads."""
        if callable(self.measure) or self.measure == "kl":
            return self.measure == "kl"
        return self.answer is None or (self.measure == "logit_diff" and self.versus is None)

    def reads(
        self, model: Runner, pair: int, count: int, clean: NDArray[Any] | None, other: NDArray[Any] | None
    ) -> dict[str, Any]:
        """The tokens, or the reference, that the metric's gradient reads; without logits unless `needs_logits`."""
        if callable(self.measure):
            return {}
        if self.measure == "kl":
            return {"reference": clean}
        return dict(zip(("answer", "versus"), self._tokens(model, pair, count, clean, other), strict=False))

    def _tokens(
        self, model: Runner, pair: int, count: int, clean: NDArray[Any] | None, other: NDArray[Any] | None
    ) -> tuple[int, ...]:
        answer = _token(model, self.answer, pair, count, "answer", clean)
        if self.measure != "logit_diff":
            return (answer,)
        if other is None and self.versus is None:
            raise InputError("logit_diff needs `versus=`, the token that the answer's logit is compared with")
        versus = _token(model, self.versus, pair, count, "versus", clean if other is None else other)
        if answer == versus:
            raise InputError(
                f"pair {pair}: logit_diff between token {answer} and itself; the clean and the corrupted prompt are "
                "both answered by it: give answer= and versus="
            )
        return answer, versus


def _plain(tokens: Tokens) -> Any:
    if _several(tokens):
        return [_plain(token) for token in tokens]
    return tokens if tokens is None else [isinstance(tokens, str), str(tokens)]


def _function(function: Callable[..., Any], pair: int) -> Callable[[Numbers], Any]:
    try:
        entries = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return function
    # A parameter with a default is the function's own.
    count = sum(entry.kind in POSITIONAL and entry.default is entry.empty for entry in entries)
    if count > 2:
        raise InputError(f"a metric takes the logits, and the index of the pair if it wants it, not {count} values")
    return (lambda logits: function(logits, pair)) if count == 2 else function


def _divergence(reference: Numbers, logits: Numbers) -> Numbers:
    """KL divergence KL(reference || row) of each row, in nats."""
    others = log_softmax(logits, axis=-1)
    probabilities = np.exp(reference)
    # A logit of -inf has probability 0, and 0 * inf would be NaN; the sum is clipped, since rounding can take it below
    # 0.
    terms = np.where(probabilities > 0, probabilities * (reference - others), 0.0)
    return np.maximum(terms.sum(axis=-1), 0.0)


_OF_ANSWER: dict[str, Callable[[int, Numbers], Numbers]] = {
    "probability": lambda answer, logits: np.exp(log_softmax(logits, axis=-1)[:, answer]),
    "log_probability": lambda answer, logits: log_softmax(logits, axis=-1)[:, answer],
    "rank": lambda answer, logits: (logits > logits[:, answer, None]).sum(axis=-1),
}


def _several(tokens: Tokens) -> TypeGuard[Sequence[Token]]:
    return isinstance(tokens, Sequence | np.ndarray) and not isinstance(tokens, str)


def _token(model: Runner, tokens: Tokens, pair: int, count: int, what: str, logits: NDArray[Any] | None) -> int:
    if tokens is None:
        if logits is None:
            raise InputError(f"{what}= is left out, and no logits tell the top token")
        return int(logits.argmax())
    one = each_of(tokens, count, what)[pair]
    try:
        token = model.token_id(one) if isinstance(one, str) else operator.index(one)
    except TypeError:
        raise InputError(f"{what} {one!r}: a token is a text, or an integer") from None
    if not 0 <= token < model.vocab_size:
        raise InputError(f"{what} {token}; the vocabulary is 0 to {model.vocab_size - 1}")
    return token
