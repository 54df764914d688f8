"""`fill_mask` and `classify`: the most probable tokens of hidden places, and the labels of texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.metadata import Metadata
from mionnx.inputs.tokens import Tokens
from mionnx.machine.brief import count, cut
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least, index_within
from mionnx.machine.softmax import log_softmax
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.encoder_texts import listed_texts, map_texts, need_head, tokens_of
from mionnx.run.hook_cache import HookCache
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.view import Bars, Columns, Shown, Table, View

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class Predictions(Shown):
    """The leading choices at some places of texts: tokens at masks, or labels of whole texts.

    Attributes:
        of: "tokens" or "labels".
        texts: [places], the text of each place.
        rows: [places], its number.
        positions: [places], the position of each mask; None of whole texts.
        choices: [places][k], texts of the leading choices.
        ids: [places][k], tokens or numbers of labels.
        logits, probabilities: [places][k], float64.
    """

    of: str
    texts: tuple[str, ...]
    rows: tuple[int, ...]
    positions: tuple[int | None, ...]
    choices: tuple[tuple[str, ...], ...]
    ids: NDArray[np.int64]
    logits: Numbers
    probabilities: Numbers

    @property
    def top(self) -> list[str]:
        """[places]: the leading choice of each."""
        return [choices[0] for choices in self.choices]

    def probability(self, choice: str, place: int = 0) -> float:
        """The probability of one of the choices that are told at a place."""
        place = index_within("place", place, len(self.choices))
        choices = self.choices[place]
        if choice not in choices:
            raise InputError(f"{choice!r} is not among the choices told: {', '.join(choices)}; k= tells more")
        return float(self.probabilities[place][choices.index(choice)])

    def _facts(self) -> Iterator[str]:
        yield f"{count(len(self.texts), 'place')}, {self.of}"

    def _lines(self) -> Iterator[str]:
        for place, text in enumerate(self.texts):
            pairs = zip(self.choices[place], self.probabilities[place], strict=True)
            named = ", ".join(f"{choice} {decimal(float(share), 3)}" for choice, share in pairs)
            at = "" if self.positions[place] is None else f" [{self.positions[place]}]"
            yield f"{cut(text, 40)!r}{at}: {named}"

    def _columns(self) -> Columns:
        k = len(self.choices[0])
        places = np.repeat(np.arange(len(self.texts)), k).tolist()
        columns: dict[str, Any] = {"text": [self.rows[n] for n in places]}
        if self.positions[0] is not None:
            columns["position"] = [self.positions[n] for n in places]
        flat = [choice for choices in self.choices for choice in choices]
        columns |= {"choice": flat, "id": self.ids.ravel(), "logit": self.logits.ravel()}
        return columns | {"probability": self.probabilities.ravel()}

    def view(self) -> View:
        """The probabilities of the choices at each place."""
        panels = [
            Bars(
                self.choices[place],
                self.probabilities[place],
                "probability",
                heading=cut(text, 90),
                order="the most probable first",
            )
            for place, text in enumerate(self.texts[:20])
        ]
        return View(f"Most probable {self.of}", panels, meaning="A bar is the probability of a choice there.")

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: every place, or the first k."""
        table = Table("text", "position", self.of, on_page={"heading": "Places", "most": 25})
        for place, text in list(enumerate(self.texts))[:k]:
            pairs = zip(self.choices[place], self.probabilities[place], strict=True)
            at = self.positions[place]
            named = ", ".join(f"{choice} {decimal(float(share), 3)}" for choice, share in pairs)
            table.add_row(cut(text, 60), "" if at is None else str(at), named)
        return table


@typed(leave=["texts"])
def fill_mask(
    model: Runner,
    texts: str | Iterable[str],
    k: int = 5,
    hooks: HookSpec | None = None,
    *,
    batch_size: BatchSize = AUTO,
    progress: bool | None = None,
) -> Predictions:
    """The most probable tokens at each mask of texts, by a masked language model.

    Args:
        texts: a text with the tokenizer's mask token ("[MASK]", "<mask>"), or a list of such texts.
        k: tokens that are told of each mask, the most probable first.
        hooks: interventions in force; rows count in the whole list.
        batch_size, progress: see `embed`.

    Raises:
        InputError: a model of another kind, or a text without a mask.

    Example:
        model.fill_mask("The capital of [MASK] is Paris.").top  # ["France"]
    """
    need_head(model, "fill_mask", "masked_lm")
    mask = mask_of(model.hooked)
    at_least("k", k, 1)
    entries = listed_texts(texts, pairs=False)
    tokens = tokens_of(model, entries)
    name, most = model.tokenizer.id_to_token(mask), model.hooked.longest_text
    for text, one in zip(entries, tokens, strict=True):
        masks = np.count_nonzero(one.ids == mask)
        if text.count(name) > masks and len(one) == most:
            raise InputError(
                f"a mask of {cut(text, 60)!r} was cut off: the model reads {most} tokens of a text, special ones "
                f"included, and {name} stands outside them"
            )
        if not masks:
            raise InputError(f"{cut(text, 60)!r} has no mask: write {name} where it is")
    k = min(k, model.vocab_size)

    def read(row: int, cache: HookCache) -> list[tuple[int, int, Numbers]]:
        places = np.flatnonzero(tokens[row].ids == mask).tolist()
        return [(row, at, cache.output()[0, at].astype(np.float64)) for at in places]

    readings = [one for row in map_texts(model, tokens, read, "texts", hooks, batch_size, progress) for one in row]
    return _predictions("tokens", model, tokens, readings, k, "softmax")


def mask_of(model: HookedModel) -> int:
    """The id of a model's mask token."""
    if model.mask_token is None:
        raise InputError(f"the tokenizer of {model.name} names no mask token")
    return model.mask_token


@typed(leave=["texts"])
def classify(
    model: Runner,
    texts: str | tuple[str, str] | Iterable[Any],
    hooks: HookSpec | None = None,
    *,
    k: int | None = None,
    batch_size: BatchSize = AUTO,
    progress: bool | None = None,
) -> Predictions:
    """The labels of texts with their probabilities, by a classifier or a cross-encoder.

    Args:
        texts: a text or a pair (text, text), as a cross-encoder or an entailment model reads; or a list of these.
        hooks: interventions in force; rows count in the whole list.
        k: how many labels; all if left out.
        batch_size, progress: see `embed`.

    Returns:
        each text's labels, the most probable first; probabilities by softmax, or by sigmoid where labels do not exclude
        one another (`activation` in the model's metadata). A regression's one number is its own "probability".

    Example:
        model.classify(["What a day!", "Not again."]).top
    """
    need_head(model, "classify", "classes")
    labels = model.hooked.metadata.labels
    k = len(labels) if k is None else k
    at_least("k", k, 1)
    entries = listed_texts(texts, pairs=True)
    tokens = tokens_of(model, entries)

    def read(row: int, cache: HookCache) -> tuple[int, None, Numbers]:
        return row, None, cache.output()[0].astype(np.float64)

    readings = map_texts(model, tokens, read, "texts", hooks, batch_size, progress)
    return _predictions("labels", model, tokens, readings, min(k, len(labels)), model.hooked.metadata.activation)


def probabilities_of(logits: Numbers, activation: str) -> Numbers:
    """Probabilities of logits along the last axis, by the activation that the model's metadata name."""
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        return np.asarray(np.exp(-np.logaddexp(0, -logits)))
    return np.asarray(np.exp(log_softmax(logits, axis=-1)))


def distributions(output: NDArray[Any], metadata: Metadata) -> NDArray[Any]:
    """The main output as logits [..., choices], whose softmax along the last axis is each distribution of the head."""
    if metadata.head == "span":
        return output.swapaxes(-1, -2)  # the start, and the end, over the tokens of a text
    if metadata.activation == "sigmoid":
        return np.stack([output, np.zeros_like(output)], axis=-1)  # each label by itself: yes or no
    return output


def _predictions(
    of: str, model: Runner, tokens: list[Tokens], readings: list[Any], k: int, activation: str
) -> Predictions:
    """The leading choices of logits at some places (row, position, [columns])."""
    rows, positions, logits = zip(*readings, strict=True)
    numbers = np.stack(logits)
    shares = probabilities_of(numbers, activation)
    ids = np.argsort(-numbers, axis=-1, kind="stable")[:, :k]
    labels = model.hooked.metadata.labels

    def name(column: int) -> str:
        return labels[column] if of == "labels" else model.tokenizer.decode([column], skip_special_tokens=False).strip()

    return Predictions(
        of,
        tuple(tokens[row].text for row in rows),
        tuple(rows),
        tuple(positions),
        tuple(tuple(name(column) for column in row) for row in ids.tolist()),
        ids,
        np.take_along_axis(numbers, ids, axis=-1),
        np.take_along_axis(shares, ids, axis=-1),
    )
