"""`LensResult`: the next token that each layer's residual stream predicts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.lens.picture import draw_lens, label_of
from mionnx.analysis.lens.reader import LensReader, SavedReader, source_of
from mionnx.analysis.lens.readout import Readout
from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import index_within
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.view import Shown, render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLD = 6  # points of a printed result


@dataclass(frozen=True, repr=False)
@typed(InputError)
class LensResult(Shown):
    """The logit lens over one text: residual streams read by the model's final norm and head.

    nostalgebraist, "interpreting GPT: the logit lens", 2020.

    Attributes:
        points: names of the hook points that were read, in execution order.
        positions: the positions that were read, from 0.
        tokens: the text of the prompt's tokens at these positions.
        readout: the predictions: [points, positions, ...].
        answers: [positions] the top token after the last layer.
        tracked: further tokens that the page follows through the layers.
        spell: a token's text.
        known: the id of a token that is given by id or text.
        read: reads further tokens: [positions, tokens] ids -> `Readout`; see `mionnx.analysis.lens.reader`.
    """

    points: list[str]
    positions: list[int]
    tokens: list[str]
    readout: Readout
    answers: NDArray[np.int64]
    tracked: list[int]
    spell: Callable[[int], str]
    known: Callable[[int | str], int]
    read: Callable[[NDArray[np.int64]], Readout]
    INSIDE: ClassVar = (Readout,)

    @classmethod
    def load(cls, path: str | Path, *, model: Runner | None = None) -> Self:
        """Read a lens that `save` wrote as .safetensors: the same numbers, tables and pages.

        Args:
            path: the file.
            model: the model that the lens was made with. Without it only tokens that are in the lens can be asked for,
                by their ids: `probability_of` and the like those that were tracked.

        Raises:
            SpecFileError: the file is missing, damaged, or of another kind.
            InputError: another model, or a lens that was saved without its streams.
        """
        lens = super().load(path)
        if model is None:
            return lens
        saved = _reader(lens)
        if saved is None or saved.streams is None:
            raise InputError(f"{path} has no streams that a model could read further tokens from")
        if saved.source != source_of(model):
            ours, others = (" ".join(one) for one in (source_of(model), saved.source))
            raise InputError(f"{path} was made with another model than the one given: {others}, not {ours}")
        reader = LensReader(model, saved.streams)
        return replace(lens, spell=reader.spell, known=reader.known, read=reader.read)

    def _contents(self) -> dict[str, Any]:
        contents, reader = super()._contents(), _reader(self)
        for name in ("spell", "known", "read"):
            del contents[name]
        tokens = sorted({*self.top_ids.ravel().tolist(), *self.answers.tolist(), *self.tracked})
        contents["words"] = {token: self.spell(token) for token in tokens}
        streams, source = (None, []) if reader is None else (reader.streams, reader.source)
        return {**contents, "streams": streams, "source": source}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        streams, source, words = (contents.pop(name) for name in ("streams", "source", "words"))
        reader = SavedReader(streams, source, words, contents["tracked"], contents["readout"])
        return cls(**contents, spell=reader.spell, known=reader.known, read=reader.read)

    @property
    def top_ids(self) -> NDArray[np.int64]:
        """[points, positions, k]: the most likely tokens, in descending order."""
        return self.readout.top_ids

    @property
    def top_probs(self) -> NDArray[np.float32]:
        """[points, positions, k]: their probabilities."""
        return np.exp(self.readout.top)

    @property
    def entropy(self) -> NDArray[np.float32]:
        """[points, positions]: the entropy of the distribution, in nats."""
        return self.readout.entropy

    @property
    def divergence(self) -> NDArray[np.float32]:
        """[points, positions]: KL divergence (last layer || this point) in nats.

        Rounding can make it a little less than 0.
        """
        return self.readout.divergence

    def probability_of(self, token: int | str) -> NDArray[np.float32]:
        """[points, positions]: the probability of a token, given by id or text.

        Raises:
            InputError: there is no such token.
        """
        return np.exp(self._of(token).log_probs[..., 0])

    def log_probability_of(self, token: int | str) -> NDArray[np.float32]:
        """[points, positions]: a token's log-probability in nats."""
        return self._of(token).log_probs[..., 0]

    def rank_of(self, token: int | str) -> NDArray[np.int64]:
        """[points, positions]: how many tokens are more likely; 0 for the top token."""
        return self._of(token).ranks[..., 0]

    def _facts(self) -> Iterator[str]:
        points, positions, k = self.top_ids.shape
        yield from (count(points, "point"), count(positions, "position"), f"top {count(k, 'token')}")

    def _lines(self) -> Iterator[str]:
        yield f"at position {self.positions[-1]}, after {self.tokens[-1]!r}:"
        for i in np.unique(np.linspace(0, len(self.points) - 1, TOLD).astype(int)):
            best = [f"{self.spell(token)!r} {decimal(probability, 3)}" for token, probability in self.best(i, -1)[:3]]
            yield f"{label_of(self.points[i]):>8}  {', '.join(best)}"

    def _of(self, token: int | str) -> Readout:
        return self.read(np.full((len(self.positions), 1), self.known(token), np.int64))

    @property
    def answer_probability(self) -> NDArray[np.float32]:
        """[points, positions]: the probability of each position's own answer."""
        return np.exp(self.readout.log_probs[..., 0])

    @property
    def answer_rank(self) -> NDArray[np.int64]:
        """[points, positions]: the rank of each position's own answer, 0 for the top token."""
        return self.readout.ranks[..., 0]

    @property
    def converged(self) -> list[str | None]:
        """[positions]: the first point from which the answer stays the top token.

        None where it never does.
        """
        right = self.top_ids[:, :, 0] == self.answers
        settled = np.logical_and.accumulate(right[::-1])[::-1]
        return [self.points[int(column.argmax())] if column.any() else None for column in settled.T]

    def at(self, position: int) -> int:
        """The index of a prompt's position among those that were read; negative from the last one.

        Raises:
            InputError: it was not read.
        """
        if -len(self.positions) <= position < 0:
            return len(self.positions) + position
        if position not in self.positions:
            raise InputError(f"position {position}; the positions {self.positions} were read")
        return self.positions.index(position)

    def best(self, point: int, position: int) -> list[tuple[int, float]]:
        """The most likely tokens at one point and position, as (token id, probability).

        Args:
            point, position: indices among those that were read; negative ones count from the end.

        Raises:
            InputError: no such point or position.
        """
        point = index_within("point", point, len(self.points))
        position = index_within("position", position, len(self.positions))
        return list(zip(self.top_ids[point, position].tolist(), self.top_probs[point, position].tolist(), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Everything, tokens as texts and ids."""
        return {
            "points": self.points,
            "positions": self.positions,
            "tokens": self.tokens,
            "answers": self._named(self.answers.tolist()),
            "converged": self.converged,
            "top": [
                [
                    [[token, self.spell(token), probability] for token, probability in self.best(i, j)]
                    for j in self._columns
                ]
                for i in range(len(self.points))
            ],
            "answer_probability": self.answer_probability,
            "answer_rank": self.answer_rank,
            "entropy": self.entropy,
            "divergence": self.divergence,
            "tracked": self._tracks(),
        }

    @property
    def _columns(self) -> range:
        return range(len(self.positions))

    def _named(self, ids: Sequence[int]) -> list[list[Any]]:
        return [[token, self.spell(token)] for token in ids]

    def _tracks(self) -> list[dict[str, Any]]:
        return [
            {
                "id": token,
                "token": self.spell(token),
                "probability": np.exp(self.readout.log_probs[..., 1 + i]),
                "rank": self.readout.ranks[..., 1 + i],
            }
            for i, token in enumerate(self.tracked)
        ]

    def page(self) -> str:
        """A table of points and positions with the top tokens, coloured by a measure of choice."""
        words = sorted({*self.top_ids.ravel().tolist(), *self.answers.tolist()})
        data = {
            "points": [label_of(point) for point in self.points],
            "positions": self.positions,
            "tokens": self.tokens,
            "words": [self.spell(token) for token in words],
            "ids": words,
            "top": np.searchsorted(words, self.top_ids),
            "probabilities": self.top_probs,
            "answers": np.searchsorted(words, self.answers),
            "answer": {"probability": self.answer_probability, "rank": self.answer_rank},
            "converged": [None if point is None else self.points.index(point) for point in self.converged],
            "entropy": self.entropy,
            "divergence": self.divergence,
            "tracked": self._tracks(),
        }
        return render("lens.html", "Logit lens", data=data)

    def figure(self) -> "Figure":
        """The top tokens, coloured by their probability; a long text in several rows of panels."""
        return draw_lens(self)


def _reader(lens: LensResult) -> LensReader | SavedReader | None:
    """The reader behind a lens; None if its functions are of another kind."""
    reader = getattr(lens.read, "__self__", None)
    return reader if isinstance(reader, LensReader | SavedReader) else None
