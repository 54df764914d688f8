"""`LensResult`: the next token that each layer's residual stream predicts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.lens.readout import LensReader, Readout, SavedReader, source_of
from mionnx.errors import InputError
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import index_within
from mionnx.machine.typed import typed
from mionnx.run.runner import Runner
from mionnx.view import Columns, Each, HeatMap, Lines, Series, Shown, View, long_form

PRINTED_POINTS = 6  # points of a printed result
CURVES = 8  # tokens of a chart
LOGIT_LENS = "logit lens"  # and of streams that a lens has mapped its own name
RANK = "rank of the answer (0: top token)"
MEANING = (
    "Each cell is the token that the model would predict next if this point of the residual stream were its last: "
    "final norm, head and soft cap applied to it. Outlined: the first point from which on the answer stays the top "
    "token. Point at a cell for more; click one for the way through the layers."
)
MAPPED = "A linear map of each layer first takes the stream to where the last one would be."
CHART = (
    "The answer, the tokens asked for, and their likely rivals; rivals only where they are among a point's top tokens."
)


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
        token_id: the id of a token that is given by id or text.
        read: reads further tokens: [positions, tokens] ids -> `Readout`; see `mionnx.analysis.lens.readout`.
        title: the name of the lens: "logit lens", "jacobian lens" and the like.
    """

    points: list[str]
    positions: list[int]
    tokens: list[str]
    readout: Readout
    answers: NDArray[np.int64]
    tracked: list[int]
    spell: Callable[[int], str]
    token_id: Callable[[int | str], int]
    read: Callable[[NDArray[np.int64]], Readout]
    title: str = LOGIT_LENS
    INSIDE: ClassVar = (Readout,)

    @classmethod
    def load(cls, path: str | Path, *, model: Runner | None = None) -> Self:
        """Read a lens that `save` wrote as .safetensors: the same numbers, tables and pages.

        Args:
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
        return replace(lens, spell=reader.spell, token_id=reader.token_id, read=reader.read)

    def _contents(self) -> dict[str, Any]:
        contents, reader = super()._contents(), _reader(self)
        # These functions belong to an open model: a `SavedReader` takes their place.
        for name in ("spell", "token_id", "read"):
            del contents[name]
        tokens = sorted({*self.top_ids.ravel().tolist(), *self.answers.tolist(), *self.tracked})
        contents["words"] = {token: self.spell(token) for token in tokens}
        streams, source = (None, []) if reader is None else (reader.streams, reader.source)
        return {**contents, "streams": streams, "source": source}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        streams, source, words = (contents.pop(name) for name in ("streams", "source", "words"))
        reader = SavedReader(streams, source, words, contents["tracked"], contents["readout"])
        return cls(**contents, spell=reader.spell, token_id=reader.token_id, read=reader.read)

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
        """[points, positions]: KL divergence (last layer || this point) in nats, to within rounding."""
        return self.readout.divergence

    def probability_of(self, token: int | str) -> NDArray[np.float32]:
        """[points, positions]: the probability of a token, given by id or text."""
        return np.exp(self._of(token).log_probs[..., 0])

    def log_probability_of(self, token: int | str) -> NDArray[np.float32]:
        """[points, positions]: a token's log-probability in nats."""
        return self._of(token).log_probs[..., 0]

    def rank_of(self, token: int | str) -> NDArray[np.int64]:
        """[points, positions]: how many tokens are more likely; 0 for the top token."""
        return self._of(token).ranks[..., 0]

    def _facts(self) -> Iterator[str]:
        points, positions, k = self.top_ids.shape
        if self.title != LOGIT_LENS:
            yield self.title
        yield from (count(points, "point"), count(positions, "position"), f"top {count(k, 'token')}")

    def _lines(self) -> Iterator[str]:
        yield f"at position {self.positions[-1]}, after {self.tokens[-1]!r}:"
        # A model with fewer points would show one twice.
        for i in np.unique(np.linspace(0, len(self.points) - 1, PRINTED_POINTS).astype(int)):
            best = [f"{self.spell(token)!r} {decimal(probability, 3)}" for token, probability in self.best(i, -1)[:3]]
            yield f"{label_of(self.points[i]):>8}  {', '.join(best)}"

    def _of(self, token: int | str) -> Readout:
        return self.read(np.full((len(self.positions), 1), self.token_id(token), np.int64))

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
        """[positions]: the first point from which the answer stays the top token; None where it never does."""
        right = self.top_ids[:, :, 0] == self.answers
        # From the end: whether the answer is on top here and at every later point.
        settled = np.logical_and.accumulate(right[::-1])[::-1]
        return [self.points[int(column.argmax())] if column.any() else None for column in settled.T]

    def at(self, position: int) -> int:
        """The index of a prompt's position among those that were read; negative from the last one."""
        if -len(self.positions) <= position < 0:
            return len(self.positions) + position
        if position not in self.positions:
            raise InputError(f"position {position}; the positions {self.positions} were read")
        return self.positions.index(position)

    def best(self, point: int, position: int) -> list[tuple[int, float]]:
        """The most likely tokens at one point and position, by their indices, as (token id, probability)."""
        point = index_within("point", point, len(self.points))
        position = index_within("position", position, len(self.positions))
        return list(zip(self.top_ids[point, position].tolist(), self.top_probs[point, position].tolist(), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Everything, tokens as texts and ids."""
        top = [
            [
                [[token, self.spell(token), probability] for token, probability in self.best(i, j)]
                for j in range(len(self.positions))
            ]
            for i in range(len(self.points))
        ]
        numbers = ("answer_probability", "answer_rank", "entropy", "divergence")
        return {
            **{name: getattr(self, name) for name in ("points", "positions", "tokens", "converged", *numbers)},
            "answers": [[token, self.spell(token)] for token in self.answers.tolist()],
            "top": top,
            "tracked": self._tracks(),
        }

    def _tracks(self) -> list[dict[str, Any]]:
        shares, ranks = np.exp(self.readout.log_probs), self.readout.ranks
        return [
            {"id": token, "token": self.spell(token), "probability": shares[..., i], "rank": ranks[..., i]}
            # Column 0 is the answer, see `_lens_result`.
            for i, token in enumerate(self.tracked, 1)
        ]

    def view(self) -> View:
        """Map of the top tokens, coloured by a measure of choice, and a chart of each position."""
        # Ascending, for `searchsorted`: a cell has the index of its word, and the page each word once.
        words = sorted({*self.top_ids.ravel().tolist(), *self.answers.tolist()})
        colours: dict[str, Any] = {
            "probability of the top token": self.top_probs[..., 0],
            "probability of the answer": self.answer_probability,
            RANK: self.answer_rank,
            "entropy (nats)": self.entropy,
            "KL from the last layer (nats)": self.divergence,
        }
        colours |= {f"probability of {one['token']}": one["probability"] for one in self._tracks()}
        settled = [(self.points.index(point), column) for column, point in enumerate(self.converged) if point]
        cells = HeatMap(
            {"point": [label_of(point) for point in self.points], "token": self.tokens},
            colours,
            {name: 1.0 for name in colours if name.startswith("probability")},
            [RANK],
            # Probabilities have one scale in all maps, from 0 to 1.
            diverging=False,
            hover={"answer": [[self.spell(token) for token in self.answers.tolist()]] * len(self.points)},
            marked=settled,
            words=[self.spell(token) for token in words],
            ids=np.searchsorted(words, self.top_ids),
            shares=self.top_probs,
            numbers=self.positions,
            chooses=True,
        )
        charts = Each([self._chart(column) for column in range(len(self.positions))], note=CHART)
        meaning = MEANING if self.title == LOGIT_LENS else f"{MAPPED} {MEANING}"
        return View(self.title.capitalize(), [cells, charts], meaning=meaning, chosen=len(self.positions) - 1)

    def _chart(self, column: int) -> Lines:
        """Probabilities of the answer, tracked tokens and rivals at one position."""
        answer, ids = int(self.answers[column]), self.top_ids[:, column]
        series = [Series(f"{self.spell(answer)} (answer)", self.answer_probability[:, column])]
        series += [Series(one["token"], one["probability"][:, column]) for one in self._tracks()]
        peaks: dict[int, float] = {}
        for token, share in zip(ids.ravel().tolist(), self.top_probs[:, column].ravel().tolist(), strict=True):
            if token != answer and token not in self.tracked:
                peaks[token] = max(peaks.get(token, 0.0), share)
        for token in sorted(peaks, key=lambda token: -peaks[token])[: max(0, CURVES - len(series))]:
            # Outside the top tokens a rival's probability is not known: the curve has a gap there.
            shares = np.where(ids == token, self.top_probs[:, column], 0).sum(1)
            series.append(Series(self.spell(token), np.where((ids == token).any(1), shares, np.nan)))
        points = [label_of(point) for point in self.points]
        heading = f"Position {self.positions[column]}, after {self.tokens[column]!r}: along the stream"
        return Lines(points, series[:CURVES], "", "probability", 0, 1, heading=heading)

    def _by_hook(self) -> dict[str, float]:
        """The probability of the answer at the last position that was read."""
        return dict(zip(self.points, self.answer_probability[:, -1].tolist(), strict=True))

    def _columns(self) -> Columns:
        tokens = [*zip(self.positions, self.tokens, strict=True)]
        axes: dict[str, Sequence[Any]] = {"point": self.points, "position, token": tokens}
        top = [self.spell(token) for token in self.top_ids[..., 0].ravel().tolist()]
        numbers: dict[str, Any] = {"top_token": np.array(top, object), "top_probability": self.top_probs[..., 0]}
        numbers |= {"answer_probability": self.answer_probability, "answer_rank": self.answer_rank}
        numbers |= {"entropy": self.entropy, "divergence": self.divergence}
        numbers |= {f"probability of {one['token']}": one["probability"] for one in self._tracks()}
        return long_form(axes, numbers)


def label_of(point: str) -> str:
    """A residual hook point as a label: `2 post` for `blocks.2.hook_resid_post`."""
    return point.removeprefix("blocks.").replace(".hook_resid_", " ")


def _reader(lens: LensResult) -> LensReader | SavedReader | None:
    """The reader behind a lens; None if its functions are of another kind."""
    reader = getattr(lens.read, "__self__", None)
    return reader if isinstance(reader, LensReader | SavedReader) else None
