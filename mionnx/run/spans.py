"""`tag`: labels of words; and the parts of texts that it and `answer_span` find."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.inputs.tokens import Tokens
from mionnx.machine.brief import count, cut
from mionnx.machine.decimals import decimal
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.encoder_texts import listed_texts, map_texts, need_head, tokens_of
from mionnx.run.hook_cache import HookCache
from mionnx.run.predictions import probabilities_of
from mionnx.run.prompt import token_text
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import Columns, MarkedText, Shown, Table, Text, View

EVEN = 0.5  # the probability from which on a label is told that excludes no other
# Marks of labels at the first and at the last word of a span, and those besides B and I (BIOES, BILOU, BMES).
BEGINS, ENDS, OTHER_MARKS = {*"BSUW"}, {*"ESLUW"}, "ESLUMW"
WITHOUT_SPACES = ("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
JOINERS = "\u00ad\u200c\u200d"  # of one word: the soft hyphen, and what Persian and Hindi write between letters
PAGE_TEXTS, CHIPS, SLIGHT = 20, 3, 0.01  # texts of a page; labels told of a token, and the least probability of one
UNTAGGED = "O"  # the label of words that belong to nothing
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class TextSpan:
    """A part of a text.

    Attributes:
        row: number of the text.
        start, end: characters of the text, the end not included.
        positions: where its first and its last token stand in the text.
        probability: of the label, the mean over its words; of an answer, of its start and end together.
    """

    row: int
    label: str
    text: str
    start: int
    end: int
    positions: tuple[int, int]
    probability: float


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class Spans(Shown):
    """Parts of texts with their labels, in the order of the texts.

    Attributes:
        texts: [rows].
        labels, parts: [spans], the label and the words of each.
        rows, starts, ends: [spans]: number of its text; its characters there, the end not included.
        positions: [spans, 2]: its first and last token.
        probabilities: [spans]: of the label, the mean over its words; of an answer, of its start and its end together.
        token_labels: the labels as the model has them, [labels]; of an answer "start" and "end".
        tokens: [rows][seq], the tokens that the model reads of each text; of an answer, of question and context.
        token_probabilities: [rows], arrays [seq, labels]: those of each label at each token; of an answer, of each end
            over the context.
    """

    IN_JSON = ("texts", "labels", "parts", "rows", "starts", "ends", "positions", "probabilities")

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    parts: tuple[str, ...]
    rows: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    positions: NDArray[np.int64]
    probabilities: Numbers
    token_labels: tuple[str, ...] = ()
    tokens: tuple[tuple[str, ...], ...] = ()
    token_probabilities: tuple[Numbers, ...] = ()

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        spans: Sequence[TextSpan],
        token_labels: Sequence[str] = (),
        read: Sequence[tuple[Sequence[str], Numbers]] = (),
    ) -> Spans:
        """Spans as columns; `read` has the tokens of each text and their probabilities [seq, labels]."""
        return cls(
            tuple(texts),
            labels=tuple(one.label for one in spans),
            parts=tuple(one.text for one in spans),
            rows=tuple(one.row for one in spans),
            starts=tuple(one.start for one in spans),
            ends=tuple(one.end for one in spans),
            positions=np.array([one.positions for one in spans], np.int64).reshape(-1, 2),
            probabilities=np.array([one.probability for one in spans], np.float64),
            token_labels=tuple(token_labels),
            tokens=tuple(tuple(tokens) for tokens, _ in read),
            token_probabilities=tuple(numbers for _, numbers in read),
        )

    def of_text(self, row: int = 0) -> list[tuple[str, str]]:
        """The (label, words) of one text."""
        return [(self.labels[n], self.parts[n]) for n, own in enumerate(self.rows) if own == row]

    def _facts(self) -> Iterator[str]:
        yield f"{count(len(self.parts), 'span')} in {count(len(self.texts), 'text')}"

    def _lines(self) -> Iterator[str]:
        for n, part in enumerate(self.parts):
            yield f"{self.labels[n]} {decimal(float(self.probabilities[n]), 3)}: {cut(part, 60)!r}"

    def _columns(self) -> Columns:
        columns: dict[str, Any] = {"text": [*self.rows], "label": [*self.labels], "words": [*self.parts]}
        return {**columns, "start": [*self.starts], "end": [*self.ends], "probability": self.probabilities}

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: every span, or the first k."""
        table = Table("text", "label", "words", "characters", "probability", on_page={"heading": "Spans", "most": 50})
        for n in range(len(self.parts))[:k]:
            cells = (str(self.rows[n]), self.labels[n], self.parts[n], f"{self.starts[n]} to {self.ends[n]}")
            table.add_row(*cells, decimal(float(self.probabilities[n]), 3))
        return table

    def view(self) -> View:
        """The texts with their spans marked, the probabilities at each token, and a table of the spans."""
        left = [f"the first {PAGE_TEXTS} texts are shown, and the spans of all"] if len(self.texts) > PAGE_TEXTS else []
        marked = [
            MarkedText(self._pieces(row), sorted({*self.labels}), heading=self._heading(row))
            for row in range(min(len(self.texts), PAGE_TEXTS))
        ]
        return View(
            "Spans",
            [*marked, self.table(), *map(self._read, range(min(len(self.tokens), PAGE_TEXTS)))],
            facts="; ".join([*self._facts(), *left]),
            meaning="A span is a part of a text with its label; below, the probability of a label at each token.",
            choice="label" if self.token_labels else "",
            options=self.token_labels,
            chosen=self._foremost(),
        )

    def _heading(self, row: int) -> str:
        return f"Text {row}" if len(self.texts) > 1 else ""

    def _pieces(self, row: int) -> list[tuple[str, str, float]]:
        """A text in pieces (words, label, probability); of spans that overlap the first is marked."""
        pieces, end = list[tuple[str, str, float]](), 0
        text, chosen = self.texts[row], list[int]()
        for n in [n for n, own in enumerate(self.rows) if own == row]:
            if all(self.ends[n] <= self.starts[m] or self.ends[m] <= self.starts[n] for m in chosen):
                chosen.append(n)
        for n in sorted(chosen, key=lambda n: self.starts[n]):
            pieces += [(text[end : self.starts[n]], "", 0.0)] if self.starts[n] > end else []
            pieces.append((text[self.starts[n] : self.ends[n]], self.labels[n], float(self.probabilities[n])))
            end = self.ends[n]
        return pieces + ([(text[end:], "", 0.0)] if end < len(text) else [])

    def _read(self, row: int) -> Text:
        """The tokens of a text, coloured by the probability of the label that is chosen on the page."""
        shares = self.token_probabilities[row]
        leading = np.argsort(-shares, axis=1, kind="stable")[:, :CHIPS]
        chips = [
            [(n, float(one[n])) for n in own if one[n] >= SLIGHT]
            for own, one in zip(leading.tolist(), shares, strict=True)
        ]
        most = np.bincount(leading[:, 0], minlength=shares.shape[1]).tolist()
        return Text(
            self.tokens[row],
            [*shares.T],
            limit=1.0,
            diverging=False,
            least=SLIGHT,
            facts=[f"the most probable label at {count(n, 'token')}" for n in most],
            chips=chips,
            chooses=True,
            unit="probability",
            heading=f"Tokens of text {row}" if len(self.texts) > 1 else "Tokens",
        )

    def _foremost(self) -> int:
        """The label that is largest at some token, besides that of nothing."""
        if not self.token_probabilities:
            return 0
        most = np.max([shares.max(0) for shares in self.token_probabilities if len(shares)], axis=0)
        return int(np.where([choice == UNTAGGED for choice in self.token_labels], -1.0, most).argmax())


@typed(leave=["texts"])
def tag(
    model: Runner,
    texts: str | Iterable[str],
    hooks: HookSpec | None = None,
    *,
    batch_size: BatchSize = AUTO,
    progress: bool | None = None,
) -> Spans:
    """Label the words of texts, as named entities for one.

    A word has the label of its first token. Words are those of a tokenizer that marks the pieces inside them ("##"), as
    in transformers' pipeline; of others runs of letters and digits, each token by itself in scripts without spaces.
    Words that follow each other are one span where their labels agree behind "B-" and "I-" (BIOES, BILOU and BMES are
    read too) and the second does not begin anew.

    Args:
        texts: a text or a list of them.
        hooks: interventions in force; rows count in the whole list.
        batch_size, progress: see `embed`.

    Returns:
        the spans whose label is not "O"; of labels that do not exclude one another (ELECTRA's "replaced") those of a
        probability of 0.5 at least.

    Example:
        model.tag("Angela lives in Berlin.").of_text()  # [("PER", "Angela"), ("LOC", "Berlin")]
    """
    need_head(model, "tag", "token_classes")
    metadata = model.hooked.metadata
    entries = listed_texts(texts, pairs=False)
    tokens = tokens_of(model, entries)

    def read(row: int, cache: HookCache) -> Numbers:
        return probabilities_of(cache.output()[0].astype(np.float64), metadata.activation)

    shares = map_texts(model, tokens, read, "texts", hooks, batch_size, progress)
    least = 0 if metadata.exclusive else EVEN
    prefix = getattr(getattr(model.tokenizer, "model", None), "continuing_subword_prefix", None)
    groups = [_spans(row, tokens[row], own, metadata.labels, least, prefix) for row, own in enumerate(shares)]
    words = [[token_text(model, token) for token in one.ids.tolist()] for one in tokens]
    read_of = [*zip(words, shares, strict=True)]
    return Spans.of(entries, [span for spans in groups for span in spans], metadata.labels, read_of)


def _words(tokens: Tokens, prefix: str | None = None) -> list[list[int]]:
    """The positions of each word's tokens; `prefix` stands before the pieces that go on with a word, "##" of BERT's."""
    words: list[list[int]] = []
    end = -1
    for position, (first, last) in enumerate(tokens.offsets):
        if not tokens.text[first:last].strip():  # a special token, or a space
            end = -1
            continue
        goes_on = first < end  # bytes of one character are tokens of their own
        if not goes_on and end > 0:
            goes_on = tokens.pieces[position].startswith(prefix) if prefix else _goes_on(tokens.text, end, first)
        if goes_on:
            words[-1].append(position)
        else:
            words.append([position])
        end = max(end, last)
    return words


def _goes_on(text: str, end: int, first: int) -> bool:
    """Whether a word that has reached the character `end` goes on at `first`."""
    between = text[end - 1 : first + 1]
    if not all(unicodedata.category(one)[0] in "LMN" or one in JOINERS for one in between):
        return False
    apart = any(unicodedata.name(one, "").startswith(WITHOUT_SPACES) for one in between)
    return not apart or unicodedata.category(between[-1])[0] == "M"


def _spans(
    row: int, tokens: Tokens, shares: Numbers, labels: Sequence[str], least: float, prefix: str | None
) -> list[TextSpan]:
    """The spans of a text by [tokens, labels] probabilities, those of `least` at least."""
    spans: list[TextSpan] = []
    counts: list[int] = []
    before: tuple[str, int] | None = None
    marks = _marks(labels)
    for number, word in enumerate(_words(tokens, prefix)):
        column = int(shares[word[0]].argmax())
        label, share = labels[column], float(shares[word[0], column])
        mark, name = (label[:1], label[2:]) if label[:2] in marks else ("", label)
        start, end = tokens.offsets[word[0]][0], tokens.offsets[word[-1]][1]
        start += len(tokens.text[start:end]) - len(tokens.text[start:end].lstrip())
        if label == UNTAGGED or share < least:
            before = None
        elif before == (name, number - 1) and mark not in BEGINS:
            last, n = spans[-1], counts[-1]
            mean = (last.probability * n + share) / (n + 1)
            spans[-1] = TextSpan(
                row, name, tokens.text[last.start : end], last.start, end, (last.positions[0], word[-1]), mean
            )
            counts[-1], before = n + 1, (name, number) if mark not in ENDS else None
        else:
            spans.append(TextSpan(row, name, tokens.text[start:end], start, end, (word[0], word[-1]), share))
            counts.append(1)
            before = (name, number) if mark not in ENDS else None
    return spans


def _marks(labels: Sequence[str]) -> tuple[str, ...]:
    """What stands before the names of labels: B- and I-, and others of those that have one of these too."""
    names = {label[2:] for label in labels if label[:2] in ("B-", "I-")}
    return ("B-", "I-", *(f"{mark}-" for mark in OTHER_MARKS if any(f"{mark}-{name}" in labels for name in names)))
