"""Metrics of a sweep: a number a cell, from the logits at the position that is read."""

import hashlib
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, nearest
from mionnx.inputs.tokens import Tokens as Text
from mionnx.machine.softmax import log_softmax
from mionnx.run.embedding import vector_of
from mionnx.run.prompt import each_of
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import answer_id, warn_of_spelling
from mionnx.spec.metric import NO_CHOICE, OF_CHOICES, OF_VECTORS

Numbers = NDArray[np.float64]
Token = int | str
Tokens = Token | Sequence[Token] | None
Measure = str | Callable[..., Any]
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
METRICS = ("logit_diff", "logit", "probability", "log_probability", "kl", "rank", "cosine", "dot", "span")


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
    answer: Any = None
    versus: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.measure, str) and self.measure not in METRICS:
            raise InputError(
                f"no metric {self.measure!r}; there are {', '.join(METRICS)}, or give a function of the logits"
                + nearest(self.measure, METRICS)
            )
        if self.answer is not None and (callable(self.measure) or self.measure in ("kl", *OF_VECTORS)):
            raise InputError(f"metric {self.name} reads no answer")
        if self.versus is not None and self.measure not in ("logit_diff", *OF_VECTORS):
            raise InputError(f"metric {self.name} reads no `versus`, only logit_diff, cosine and dot do")
        for name, part in (("versus", OF_VECTORS), ("answer", ("span",))):
            if self.measure in part and getattr(self, name) is None:
                raise InputError(f"metric {self.name} needs {name}=")

    @property
    def name(self) -> str:
        """Name for tables and messages."""
        return self.measure if isinstance(self.measure, str) else getattr(self.measure, "__name__", "function")

    def resolved(self, model: Runner, clean: Any, count: int) -> "MetricRequest":
        """The same metric with the vectors of texts, and the tokens of spans, of a model that has such a head."""
        self._refuse_head(model)
        if self.measure in OF_VECTORS:
            return replace(self, versus=_vectors(model, self.versus, count))
        if self.measure == "span":
            return replace(self, answer=_ends(model, self.answer, clean, count))
        return self

    def _refuse_head(self, model: Runner) -> None:
        head = model.hooked.metadata.head
        if callable(self.measure):
            return
        if self.measure in OF_CHOICES and not model.hooked.metadata.exclusive:
            raise InputError(f"metric {self.name} {NO_CHOICE}")
        of = "embedding" if self.measure in OF_VECTORS else "span" if self.measure == "span" else None
        if of is not None and head != of:
            raise InputError(f"metric {self.name} reads the head {of!r}, and {model.hooked.name} has {head!r}")
        if of is None and head in ("embedding", "none", "span"):
            has = {"embedding": "cosine and dot", "span": "span"}.get(head, "none of its own")
            raise InputError(
                f"metric {self.name} reads logits, and a model with the head {head!r} has {has}, or functions"
            )

    def identity(self, resume_key: str | None) -> list[Any]:
        """Name, `resume_key` and tokens, as JSON holds them."""
        if callable(self.measure) and resume_key is None:
            raise InputError(
                f"a sweep with the function {self.name} as its metric is resumed by a name that you give it: "
                'resume_key="..."; without one, resume=False'
            )
        if self.measure in OF_VECTORS:
            return [self.name, resume_key, hashlib.sha256(np.asarray(self.versus, np.float64).tobytes()).hexdigest()]
        return [self.name, resume_key, _plain(self.answer), _plain(self.versus)]

    def bind(self, model: Runner, pair: int, count: int, clean: NDArray[Any], other: NDArray[Any] | None) -> Metric:
        """Make the metric of one of `count` pairs, by the logits [vocab] of its clean and its corrupted prompt."""
        if callable(self.measure):
            return Metric(self.name, None, _function(self.measure, pair))
        if self.measure == "kl":
            reference = log_softmax(clean.astype(np.float64))
            return Metric(self.name, None, lambda logits: _divergence(reference, logits))
        if self.measure in OF_VECTORS:
            return Metric(self.name, None, partial(_alike, self.measure == "cosine", self.versus[pair]))
        if self.measure == "span":
            first, last = self.answer[pair]  # the main output has start and end of each token in turn
            return Metric(self.name, (2 * first, 2 * last + 1), lambda logits: logits[:, 0] + logits[:, 1])
        answer, *versus = self._tokens(model, pair, count, clean, other)
        for what, tokens, logits in (("answer", self.answer, clean), ("versus", self.versus, other)):
            warn_of_spelling(model, what, each_of(tokens, count, what)[pair], clean if logits is None else logits)
        if self.measure == "logit":
            return Metric(self.name, (answer,), lambda logits: logits[:, 0])
        if not versus:
            return Metric(self.name, None, partial(_OF_ANSWER[self.measure], answer))
        return Metric(self.name, (answer, *versus), lambda logits: logits[:, 0] - logits[:, 1])

    def for_repeats(self, repeats: int) -> "MetricRequest":
        """The same metric where each prompt has several pairs, one after the other."""

        def each(tokens: Any) -> Any:
            return [token for token in tokens for _ in range(repeats)] if _several(tokens) else tokens

        return self if repeats == 1 else replace(self, answer=each(self.answer), versus=each(self.versus))

    @property
    def needs_logits(self) -> bool:
        """Whether only logits of the prompts tell the tokens or the distribution that it reads."""
        if callable(self.measure) or self.measure in ("kl", "span", *OF_VECTORS):
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
        if self.measure in OF_VECTORS:
            return {"reference": self.versus[pair]}
        if self.measure == "span":
            return {"answer": self.answer[pair]}
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
        token = answer_id(model, one) if isinstance(one, str) else operator.index(one)
    except TypeError:
        raise InputError(f"{what} {one!r}: a token is a text, or an integer") from None
    columns = model.hooked.metadata.columns
    if not 0 <= token < columns:
        raise InputError(f"{what} {token}; the vocabulary is 0 to {columns - 1}")
    return token


def _alike(cosine: bool, vector: Numbers, values: Numbers) -> Numbers:
    """[rows]: the product of embeddings with a vector, or the cosine."""
    products = values @ vector
    return products / (np.linalg.norm(values, axis=-1) * np.linalg.norm(vector)) if cosine else products


def _vectors(model: Runner, versus: Any, count: int) -> list[Numbers]:
    """[d] of each pair: embeddings of texts, or vectors as they are."""
    if isinstance(versus, str):
        return [vector_of(model, versus).astype(np.float64)] * count
    if isinstance(versus, Sequence) and all(isinstance(text, str) for text in versus):
        return [vector_of(model, text).astype(np.float64) for text in each_of(versus, count, "versus")]
    width = model.hooked.metadata.columns
    try:
        vectors = np.asarray(versus, np.float64)
    except (TypeError, ValueError):
        raise InputError("versus= of a cosine is a text or an embedding, or one of these for each pair") from None
    if vectors.shape not in ((width,), (count, width)) or not np.isfinite(vectors).all():
        raise InputError(
            f"versus= is {list(vectors.shape)}; an embedding is [{width}], of each pair [{count}, {width}]"
        )
    return [*np.broadcast_to(vectors, (count, width))]


def _ends(model: Runner, answer: Any, clean: Any, count: int) -> list[tuple[int, int]]:
    """First and last token of the answer in each clean prompt."""
    one = isinstance(answer, str) or (isinstance(answer, tuple) and all(isinstance(end, int) for end in answer))
    answers = [answer] * count if one else each_of(answer, count, "answer")
    texts = model.ids(clean)
    texts = texts if isinstance(texts, list) and len(texts) == count else [texts] * count
    ends = []
    for text, part in zip(texts, answers, strict=True):
        if isinstance(part, str):
            if not isinstance(text, Text):
                raise InputError(f"answer={part!r} is found in a text, and the prompt came as ids: give (first, last)")
            places = text.positions_of(part, -1)
            ends.append((places[0], places[-1]))
        else:
            first, last = part
            ends.append((operator.index(first), operator.index(last)))
    return ends
