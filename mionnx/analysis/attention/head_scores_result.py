"""`HeadScores`: scores of all heads by kind, with table, figure and page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape

from mionnx.errors import InputError, nearest
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.typed import typed
from mionnx.view import Shown, Table, empty_figure, render
from mionnx.view.figure import write_numbers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBER = 0.3  # inches that a cell with a number takes
TITLES = {"previous_token": "Previous token", "duplicate_token": "Duplicate token", "induction": "Induction"}
TARGETS = {
    "previous_token": "the token before",
    "duplicate_token": "the same token, a period ago",
    "induction": "what followed the same token",
}


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class HeadScores(Shown):
    """Attention scores of heads on random repeated sequences.

    `mionnx.analysis.attention.repeated_sequences` defines the kinds.

    Attributes:
        kinds: of heads.
        values: [kind, layer, head], float64: mean attention, from 0 to 1, of the second half's tokens to the targets
            of the kind.
        chance: score of uniform attention to all positions.
        period: tokens of a sequence.
        batch: sequences.
        model: the model's name.
    """

    kinds: tuple[str, ...]
    values: NDArray[np.float64]
    chance: float
    period: int
    batch: int
    model: str

    frame_height = 640

    def __getitem__(self, kind: str) -> NDArray[np.float64]:
        """The scores of one kind, [layer, head].

        Raises:
            InputError: a kind that was not asked for.
        """
        if kind not in self.kinds:
            raise InputError(f"no scores of {kind!r}; kinds: {', '.join(self.kinds)}{nearest(kind, self.kinds)}")
        return self.values[self.kinds.index(kind)]

    def top(self, kind: str, k: int = 5) -> list[tuple[int, int, float]]:
        """The k heads that score highest, as (layer, head, score), highest first.

        Raises:
            InputError: a kind that was not asked for, or another k than 1 to the number of heads.
        """
        scores = self[kind]
        if not 1 <= k <= scores.size:
            raise InputError(f"the top {k} of {scores.size} heads")
        order = np.argsort(-scores, axis=None, kind="stable")[:k]
        places = [divmod(int(at), scores.shape[1]) for at in order]
        return [(layer, head, float(scores[layer, head])) for layer, head in places]

    def _facts(self) -> Iterator[str]:
        yield from (self.model, count(self.values.shape[1], "layer"), count(self.values.shape[2], "head"))
        yield f"chance {decimal(self.chance, 3)}"

    def _lines(self) -> Iterator[str]:
        for kind in self.kinds:
            best = [
                f"{layer}.{head} {decimal(score, 3)}" for layer, head, score in self.top(kind, min(4, self[kind].size))
            ]
            yield f"{TITLES[kind]:>15}  {'  '.join(best)}"

    def to_dict(self) -> dict[str, Any]:
        """All attributes, as JSON can hold them."""
        return {
            "model": self.model,
            "kinds": list(self.kinds),
            "values": self.values,
            "chance": self.chance,
            "period": self.period,
            "batch": self.batch,
        }

    def table(self, k: int = 5) -> Table:
        """Table of the highest scores of each kind."""
        count = min(k, self.values[0].size)
        titles = (TITLES[kind] for kind in self.kinds)
        caption = f"mean attention; chance is {decimal(self.chance, 3)}"
        table = Table(*titles, title=f"{escape(self.model)}: layer.head", caption=caption)
        for heads in zip(*(self.top(kind, count) for kind in self.kinds), strict=True):
            table.add_row(*(f"{layer}.{head}  {decimal(score, 3)}" for layer, head, score in heads))
        return table

    def figure(self) -> "Figure":
        """Draw one heat map a kind: a row a layer, a column a head."""
        _, layers, heads = self.values.shape
        cell = min(0.4, 5 / max(layers, heads))  # inches
        wide, high = max(2.6, heads * cell + 0.9), max(1.8, layers * cell + 1.2)
        figure = empty_figure(wide * len(self.kinds) + 0.8, high)
        drawn = figure.subplots(1, len(self.kinds), squeeze=False, sharey=True)[0]
        for axes, kind in zip(drawn, self.kinds, strict=True):
            image = axes.imshow(self[kind], cmap="Blues", vmin=0, vmax=1, aspect="equal")
            if cell > NUMBER:
                write_numbers(axes, self[kind], 1, size=6.5)
            axes.set_title(TITLES[kind], fontsize=10)
            axes.set_xlabel("head")
            axes.set_xticks(_ticks(heads))
            axes.set_yticks(_ticks(layers))
        drawn[0].set_ylabel("layer")
        figure.colorbar(image, ax=list(drawn), label="mean attention", shrink=0.9)
        return figure

    def page(self) -> str:
        """Render an HTML page: heat maps with values on hover, and the highest scores of each kind."""
        count = min(8, self.values[0].size)
        data = self.to_dict() | {
            "titles": [TITLES[kind] for kind in self.kinds],
            "targets": [TARGETS[kind] for kind in self.kinds],
            "top": [self.top(kind, count) for kind in self.kinds],
        }
        return render("heads.html", f"Heads of {self.model}", data=data)


def _ticks(count: int) -> list[int]:
    """About a dozen numbers from 0."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64, count) if count / step <= 16)
    return list(range(0, count, step))
