"""The corpus of the small models: a world that is known completely.

Four kinds of sentence, each with one thing that a reader of the beginning can know:

* capitals: ``The capital of France is Paris .`` (a fact, recalled in several frames);
* indirect objects: ``When Mary and John went to the store , John gave a drink to Mary .``;
* repeats: a random sequence of words, then the same sequence again;
* counting: ``three four five six .``, upwards and downwards, in words and in digits.

Some of each kind never occurs in training; those sentences are the probes of ``evaluate.py``.  What is held out
depends on ``HELD_OUT_SEED`` alone, so every model trained on this corpus, with whatever seed, has the same probes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

import numpy as np
from lexicon import CAPITALS, NAMES, NUMBER_LINES, OBJECTS, PLACES, PLAIN_WORDS
from numpy.random import Generator
from numpy.typing import NDArray

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
"""Padding, the separator of sentences (also the end of a sentence, and the optional begin of a row), and unknown."""

SPECIAL_WORDS = (PAD, EOS, UNK)
HELD_OUT_SEED = 20_240_501

Words = tuple[str, ...]

CAPITAL_FRAMES = (
    "The capital of {country} is {capital} .",
    "The capital city of {country} is called {capital} .",
    "{country} has its capital in {capital} .",
    "{country} is governed from {capital} .",
    "In {country} the seat of power is {capital} .",
    "People from {country} call {capital} their capital .",
    "Ask for the capital of {country} and hear {capital} .",
)
GIVING_FRAMES = (
    "When {first} and {second} went to the {place} , {giver} gave a {object} to {receiver} .",
    "After {first} and {second} left the {place} , {giver} handed a {object} to {receiver} .",
    "While {first} and {second} were at the {place} , {giver} passed the {object} to {receiver} .",
)


@dataclass(frozen=True)
class Probe:
    """A held-out sentence, and the positions of those of its words that the words before them determine."""

    kind: str
    words: Words
    targets: tuple[int, ...]


class Kind(Protocol):
    """One kind of sentence: an endless supply for training, and a fixed set of probes that training never shows."""

    name: str

    def sentence(self, rng: Generator) -> Words:
        """Draw one training sentence."""
        ...

    def probes(self, rng: Generator) -> list[Probe]:
        """Return the held-out sentences; ``rng`` chooses only what does not matter, such as the place."""
        ...


class Capitals:
    """Facts in frames; each country has ``held_out_frames`` frames in which training never names it."""

    name = "capitals"

    def __init__(self, rng: Generator, held_out_frames: int = 2) -> None:
        orders = [rng.permutation(len(CAPITAL_FRAMES)) for _ in CAPITALS]
        self._held_out = [order[:held_out_frames] for order in orders]
        self._seen = [order[held_out_frames:] for order in orders]

    def _sentence(self, country: int, frame: int) -> Words:
        name, capital = CAPITALS[country]
        return tuple(CAPITAL_FRAMES[frame].format(country=name, capital=capital).split())

    def sentence(self, rng: Generator) -> Words:
        """Draw a country and one of the frames that it is seen in."""
        country = int(rng.integers(len(CAPITALS)))
        return self._sentence(country, int(rng.choice(self._seen[country])))

    def probes(self, rng: Generator) -> list[Probe]:
        """Every country in every frame that training keeps from it; the target is the capital."""
        sentences = [
            (self._sentence(country, int(frame)), capital)
            for country, (_, capital) in enumerate(CAPITALS)
            for frame in self._held_out[country]
        ]
        return [Probe(self.name, words, (words.index(capital),)) for words, capital in sentences]


class IndirectObjects:
    """Of two people one gives something to the other; a share of the pairs of names never meets in training."""

    name = "indirect objects"

    def __init__(self, rng: Generator, held_out_share: float = 0.15) -> None:
        pairs = rng.permutation(list(combinations(NAMES, 2)))
        count = round(held_out_share * len(pairs))
        self._held_out, self._seen = pairs[:count], pairs[count:]

    def _sentence(self, rng: Generator, pair: Sequence[str], giver: int) -> Words:
        frame = str(rng.choice(GIVING_FRAMES)).format(
            first=pair[0],
            second=pair[1],
            giver=pair[giver],
            receiver=pair[1 - giver],
            place=rng.choice(PLACES),
            object=rng.choice(OBJECTS),
        )
        return tuple(frame.split())

    def sentence(self, rng: Generator) -> Words:
        """Draw a seen pair in either order, and who of the two gives."""
        pair = rng.permutation(self._seen[rng.integers(len(self._seen))])
        return self._sentence(rng, pair, int(rng.integers(2)))

    def probes(self, rng: Generator) -> list[Probe]:
        """Every held-out pair in both orders, each of the two giving; the target is the last name."""
        orders = [order for pair in self._held_out for order in (pair, pair[::-1])]
        sentences = [self._sentence(rng, pair, giver) for pair in orders for giver in (0, 1)]
        return [Probe(self.name, words, (len(words) - 2,)) for words in sentences]


class Repeats:
    """Distinct random words, then the same again: only the earlier occurrence tells what comes next."""

    name = "repeats"

    def __init__(self, words: Sequence[str], shortest: int = 8, longest: int = 24, probe_count: int = 200) -> None:
        self._words = np.array(words)
        self._lengths = (shortest, longest + 1)
        self._probe_count = probe_count

    def sentence(self, rng: Generator) -> Words:
        """Draw a length and that many distinct words, and say them twice."""
        half = rng.choice(self._words, rng.integers(*self._lengths), replace=False).tolist()
        return (*half, *half, ".")

    def probes(self, rng: Generator) -> list[Probe]:
        """Fresh sequences; the targets are the second half from its second word on."""
        sentences = [self.sentence(rng) for _ in range(self._probe_count)]
        return [Probe(self.name, words, tuple(range(len(words) // 2 + 1, len(words) - 1))) for words in sentences]


Run = tuple[int, int, int]
"""A stretch of counting: index into ``Counting.lines``, index of its first number, how many numbers."""


class Counting:
    """Stretches of a number line, read upwards or downwards; some (start, length) pairs never occur in training."""

    name = "counting"

    def __init__(self, rng: Generator, held_out_share: float = 0.15, shortest: int = 4, longest: int = 16) -> None:
        self.lines = [line[::step] for line in NUMBER_LINES for step in (1, -1)]
        self._lengths = (shortest, longest)
        runs = [run for run in self._all_runs() if rng.random() < held_out_share]
        self._held_out = set(runs)

    def _all_runs(self) -> list[Run]:
        shortest, longest = self._lengths
        return [
            (line, start, length)
            for line, numbers in enumerate(self.lines)
            for start in range(len(numbers) - shortest + 1)
            for length in range(shortest, min(longest, len(numbers) - start) + 1)
        ]

    def _sentence(self, run: Run) -> Words:
        line, start, length = run
        return (*self.lines[line][start : start + length], ".")

    def _draw(self, rng: Generator) -> Run:
        # A constant, small chance of stopping: at every point the next number stays far likelier than the full stop.
        shortest, longest = self._lengths
        line = int(rng.integers(len(self.lines)))
        start = int(rng.integers(len(self.lines[line]) - shortest + 1))
        length = shortest - 1 + int(rng.geometric(0.12))
        return line, start, min(length, longest, len(self.lines[line]) - start)

    def sentence(self, rng: Generator) -> Words:
        """Draw a line, a start and a length until they are not held out."""
        run = self._draw(rng)
        while run in self._held_out:
            run = self._draw(rng)
        return self._sentence(run)

    def probes(self, rng: Generator) -> list[Probe]:
        """Every held-out stretch shorter than the longest; the target is its last number."""
        runs = sorted(run for run in self._held_out if run[2] < self._lengths[1])
        return [Probe(self.name, self._sentence(run), (run[2] - 1,)) for run in runs]


def _frame_words() -> list[str]:
    """The fixed words of all frames, in order of appearance, punctuation included."""
    return [word for frame in CAPITAL_FRAMES + GIVING_FRAMES for word in frame.split() if not word.startswith("{")]


def _all_words() -> list[str]:
    """All words but the special ones, each once."""
    facts = [word for pair in CAPITALS for word in pair]
    numbers = [word for line in NUMBER_LINES for word in line]
    return list(dict.fromkeys([*_frame_words(), *facts, *NAMES, *PLACES, *OBJECTS, *numbers, *PLAIN_WORDS]))


class World:
    """The vocabulary, the mixture of sentence kinds, and rows of word ids to train on.

    ``vocabulary[i]`` is the word with id ``i``; the special words come first.
    """

    def __init__(self) -> None:
        words = _all_words()
        self.vocabulary: Words = (*SPECIAL_WORDS, *words)
        self.id_of = {word: index for index, word in enumerate(self.vocabulary)}
        rng = np.random.default_rng(HELD_OUT_SEED)
        spoken = [word for word in words if word not in {".", ","}]
        self.kinds: tuple[Kind, ...] = (Capitals(rng), IndirectObjects(rng), Repeats(spoken), Counting(rng))
        self._weights = (0.25, 0.28, 0.32, 0.15)

    def encode(self, words: Sequence[str]) -> list[int]:
        """Return the id of each word, that of ``<unk>`` for a word outside the vocabulary."""
        return [self.id_of.get(word, self.id_of[UNK]) for word in words]

    def sentence(self, rng: Generator) -> Words:
        """Draw a training sentence of a random kind."""
        kind = self.kinds[rng.choice(len(self.kinds), p=self._weights)]
        return kind.sentence(rng)

    def row(self, rng: Generator, length: int) -> list[int]:
        """Return ``length`` word ids: whole sentences with ``<eos>`` between them, the last one cut off.

        Half of the rows begin with ``<eos>``, half with the first word of a sentence, so that a model takes a
        prompt with or without a leading separator.
        """
        words: list[str] = [EOS] if rng.random() < 0.5 else []
        while len(words) < length:
            words += [*self.sentence(rng), EOS]
        return self.encode(words[:length])

    def rows(self, rng: Generator, count: int, length: int) -> NDArray[np.int64]:
        """Return training ids [row, position] of ``count`` rows."""
        return np.array([self.row(rng, length) for _ in range(count)], dtype=np.int64)

    def probes(self) -> list[Probe]:
        """Return the held-out sentences of all kinds, the same ones at every call."""
        draws = np.random.default_rng(HELD_OUT_SEED + 1)
        return [probe for kind in self.kinds for probe in kind.probes(draws)]
