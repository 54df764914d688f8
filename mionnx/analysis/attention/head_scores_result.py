"""`HeadScores`: scores of all heads by kind, with table, figure and page."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape

from mionnx.errors import InputError, nearest
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.typed import typed
from mionnx.view import Columns, HeatMap, Shown, Table, View, long_form, readable

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

    `mionnx.analysis.attention.head_scores` defines the kinds.

    Attributes:
        values: [kind, layer, head], float64: mean attention, from 0 to 1, of the second half's tokens to the targets
            of the kind.
        chance: score of uniform attention to all positions.
        period: tokens of a sequence.
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

    def view(self) -> View:
        """One heat map a kind: a row a layer, a column a head; and the heads that score highest."""
        _, layers, heads = self.values.shape
        axes = {"layer": [*map(str, range(layers))], "head": [*map(str, range(heads))]}
        maps = [
            HeatMap(
                axes,
                {"mean attention": scores},
                {"mean attention": 1.0},
                diverging=False,
                hover={"attends to": TARGETS[kind]},
                marked=[place[:2] for place in self.top(kind, min(3, scores.size))],
                heading=TITLES[kind],
                note=f"attends to {TARGETS[kind]}",
            )
            for kind, scores in zip(self.kinds, self.values, strict=True)
        ]
        about = (
            f"{count(self.batch, 'random sequence')} of {self.period} tokens, each repeated once. A head that attends "
            f"to all positions alike scores {readable(self.chance)}."
        )
        return View(f"Heads of {self.model}", [maps, self.table(8)], meaning=about)

    def table(self, k: int = 5) -> Table:
        """Table of the highest scores of each kind."""
        most = min(k, self.values[0].size)
        titles = (TITLES[kind] for kind in self.kinds)
        caption = f"mean attention; chance is {decimal(self.chance, 3)}"
        styles = {TITLES[kind]: "token" for kind in self.kinds}
        page = {
            "heading": "The heads that score highest",
            "note": "layer.head, and its mean attention",
            "styles": styles,
        }
        table = Table(*titles, title=f"{escape(self.model)}: layer.head", caption=caption, on_page=page)
        for heads in zip(*(self.top(kind, most) for kind in self.kinds), strict=True):
            table.add_row(*(f"{layer}.{head}  {decimal(score, 3)}" for layer, head, score in heads))
        return table

    def _columns(self) -> Columns:
        _, layers, heads = self.values.shape
        axes = {"kind": self.kinds, "layer": range(layers), "head": range(heads)}
        return long_form(axes, {"score": self.values})
