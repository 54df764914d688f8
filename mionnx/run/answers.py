"""`answer_span`: the part of a context that answers a question."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mionnx.errors import InputError
from mionnx.machine.brief import cut
from mionnx.machine.ranges import at_least
from mionnx.machine.softmax import log_softmax
from mionnx.machine.typed import typed
from mionnx.run.encoder_texts import map_texts, need_head, windows_of
from mionnx.run.hook_cache import HookCache
from mionnx.run.prompt import token_text
from mionnx.run.runner import Runner
from mionnx.run.spans import Numbers, Spans, TextSpan
from mionnx.spec.hook_spec import HookSpec

ANSWER = "answer"  # the label of such a span


@typed()
def answer_span(
    model: Runner,
    question: str,
    context: str,
    k: int = 1,
    hooks: HookSpec | None = None,
    *,
    max_answer_length: int = 30,
    stride: int | None = None,
    no_answer: bool = False,
) -> Spans:
    """The parts of a context that answer a question, by a span head.

    A context that is too long is read in windows, and an answer is as probable as in the window where it is most so.

    Args:
        question, context: the two texts that the model reads.
        k: answers that are told, the best first.
        hooks: interventions in force; `rows=` and `positions=` of them count windows and the tokens of each.
        max_answer_length: tokens of an answer.
        stride: tokens of the context that windows share; if left out half of them, 128 at most.
        no_answer: let the answer "" stand among the others, as probable as in the window where it is least so: that of
            the model's first token, which models of SQuAD 2 give to questions without an answer.

    Returns:
        the best answers, no two the same; start <= end, both within the context. The probability is that of the start
        times that of the end, each among the context's tokens and the first one, as in transformers' pipeline.
        Positions count in question and context uncut.

    Example:
        model.answer_span("Where does Angela live?", "Angela lives in Berlin.").parts[0]
    """
    need_head(model, "answer_span", "span")
    at_least("k", k, 1)
    at_least("max_answer_length", max_answer_length, 1)
    if stride is not None:
        at_least("stride", stride, 0)
    all_tokens, windows, step = windows_of(model, question, context, stride)
    begin = len(question) + 1
    inside = [np.array([start >= begin and end > start for start, end in one.offsets]) for one in windows]
    if not any(one.any() for one in inside):
        raise InputError(f"the context {cut(context, 40)!r} has no tokens")
    special = all_tokens.offsets[0] == (0, 0)
    if no_answer and not special:
        raise InputError(f"no_answer=True: {model.hooked.name} reads no special token first, which would stand for it")

    def read(row: int, cache: HookCache) -> Numbers:
        return cache.output()[0].astype(np.float64)

    candidates, shares, none = list[TextSpan](), np.zeros((len(all_tokens), 2)), np.zeros(2)
    for number, logits in enumerate(map_texts(model, windows, read, "texts", hooks)):
        counted = inside[number] | (special & (np.arange(len(logits)) == 0))
        ends = log_softmax(np.where(counted[:, None], logits, -np.inf).T, axis=-1)
        none = min(none, ends[:, 0], key=sum)
        own = np.flatnonzero(inside[number])
        shares[own + number * step] = np.maximum(shares[own + number * step], np.exp(ends.T[own]))
        answers = dict[str, TextSpan]()
        for first, last, score in _best(np.where(inside[number], ends, -np.inf), max_answer_length):
            start, end = windows[number].offsets[first][0] - begin, windows[number].offsets[last][1] - begin
            start += len(context[start:end]) - len(context[start:end].lstrip())
            at = (first + number * step, last + number * step)
            answers.setdefault(
                context[start:end], TextSpan(0, ANSWER, context[start:end], start, end, at, float(np.exp(score)))
            )
            if len(answers) == k:
                break
        candidates += answers.values()
    if special:
        shares[0] = np.exp(none)
    if no_answer:
        candidates.append(TextSpan(0, ANSWER, "", 0, 0, (0, 0), float(np.exp(none.sum()))))
    spans = dict[str, TextSpan]()
    for one in sorted(candidates, key=lambda one: -one.probability):
        spans.setdefault(one.text, one)
    words = [token_text(model, token) for token in all_tokens.ids.tolist()]
    return Spans.of([context], [*spans.values()][:k], model.hooked.metadata.labels, [(words, shares)])


def _best(ends: Numbers, max_answer_length: int) -> Iterator[tuple[int, int, float]]:
    """The first and the last token of spans with their scores, the best first, by log-probabilities [2, seq]."""
    scores = ends[0][:, None] + ends[1][None]
    places = np.arange(len(scores))
    length = places[None] - places[:, None]
    scores = np.where((length >= 0) & (length < max_answer_length), scores, -np.inf)
    order = np.argsort(-scores, axis=None, kind="stable")
    for place in order[: int(np.isfinite(scores).sum())].tolist():
        first, last = divmod(place, len(scores))
        yield first, last, float(scores[first, last])
