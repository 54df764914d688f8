"""`TokenPairs`: the similarity of two texts as a sum over pairs of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.brief import spelled
from mionnx.machine.decimals import decimal
from mionnx.machine.typed import typed
from mionnx.view import Bars, Columns, HeatMap, Shown, Table, Text, View

Numbers = NDArray[np.float64]
LATE, INTEGRATED = "late interaction", "integrated Jacobians"


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class TokenPairs(Shown):
    """How much each pair of tokens, one of each text, gives to the similarity of the texts.

    Attributes:
        method: "late interaction" or "integrated Jacobians".
        texts: the two texts.
        tokens_a, tokens_b: their tokens.
        pairs: [tokens of a, tokens of b], float64.
        similarity: f(a, b).
        reference_b, a_reference, references: f(r, b), f(a, r) and f(r, r), r being the references of integrated
            Jacobians; 0 for late interaction, which has none.
        layer: the layer in front of which texts and references are compared; None for the last stream.
        steps: points of the paths from the references.
    """

    method: str
    texts: tuple[str, str]
    tokens_a: tuple[str, ...]
    tokens_b: tuple[str, ...]
    pairs: Numbers
    similarity: float
    reference_b: float = 0.0
    a_reference: float = 0.0
    references: float = 0.0
    layer: int | None = None
    steps: int = 0

    @property
    def explained(self) -> float:
        """What the pairs have to sum to: f(a, b) - f(r, b) - f(a, r) + f(r, r)."""
        return self.similarity - self.reference_b - self.a_reference + self.references

    @property
    def gap(self) -> float:
        """The sum of the pairs minus what it has to be."""
        return float(self.pairs.sum()) - self.explained

    def top(self, k: int = 5) -> list[tuple[str, str, float]]:
        """The pairs with the largest shares by size: (token of a, token of b, share)."""
        order = np.argsort(-np.abs(self.pairs), axis=None, kind="stable")[:k].tolist()
        places = [divmod(place, len(self.tokens_b)) for place in order]
        return [(self.tokens_a[i], self.tokens_b[j], float(self.pairs[i, j])) for i, j in places]

    def of_tokens(self) -> tuple[Numbers, Numbers]:
        """[tokens of a] and [tokens of b]: the sums of each token's pairs."""
        return self.pairs.sum(axis=1), self.pairs.sum(axis=0)

    def _facts(self) -> Iterator[str]:
        yield from (self.method, f"similarity {spelled(self.similarity)}", f"gap {spelled(self.gap)}")

    def _lines(self) -> Iterator[str]:
        if self.steps:
            yield (
                f"f(a, b) {decimal(self.similarity, 4)}, f(r, b) {decimal(self.reference_b, 4)}, f(a, r) "
                f"{decimal(self.a_reference, 4)}, f(r, r) {decimal(self.references, 4)}"
            )
        for one, other, share in self.top(6):
            yield f"{decimal(share, 4, sign=True):>9}  {one} ~ {other}"

    def _columns(self) -> Columns:
        i, j = (index.ravel().tolist() for index in np.indices(self.pairs.shape))
        columns: dict[str, Any] = {"a": i, "token_a": [self.tokens_a[n] for n in i], "b": j}
        return {**columns, "token_b": [self.tokens_b[n] for n in j], "share": self.pairs.ravel()}

    def table(self, k: int = 10) -> Table:
        """Table for a terminal: the k leading pairs."""
        table = Table("token of a", "token of b", "share", title=f"similarity {decimal(self.similarity, 4)}")
        for one, other, share in self.top(k):
            table.add_row(one, other, decimal(share, 4, sign=True))
        return table

    def view(self) -> View:
        """The pairs as a map, each text coloured by its tokens' sums, and the leading pairs."""
        axes = {"token of the first text": _named(self.tokens_a), "token of the second text": _named(self.tokens_b)}
        heat = HeatMap(axes, {"share of the similarity": self.pairs}, heading="Pairs of tokens")
        sums = self.of_tokens()
        limit = max(1e-12, *(float(np.abs(one).max()) for one in sums))
        texts = [
            Text(tokens, [own], limit, heading=f"{name} text", unit="sum of a token's pairs", legend=name == "Second")
            for name, tokens, own in zip(("First", "Second"), (self.tokens_a, self.tokens_b), sums, strict=True)
        ]
        leading = self.top(12)
        labels = [f"{one} ~ {other}" for one, other, _ in leading]
        bars = Bars(
            labels, np.array([share for *_, share in leading]), "share", heading="Leading pairs", order="largest"
        )
        return View(
            "Why two texts are similar", [texts[0], texts[1], heat, bars], self._about(), meaning=self._meaning()
        )

    def _about(self) -> str:
        return f"{self.texts[0]!r} and {self.texts[1]!r}: similarity {decimal(self.similarity, 4)}, by {self.method}"

    def _meaning(self) -> str:
        total = f"The pairs sum to {decimal(float(self.pairs.sum()), 4)}."
        if self.method == LATE:
            return f"A share is the product of two tokens' last streams, which pooling averages. {total}"
        return (
            f"A share is what a token of one text and one of the other give together, along the way from texts of "
            f"padding alone. {total} It has to be f(a, b) - f(r, b) - f(a, r) + f(r, r) = "
            f"{decimal(self.similarity, 4)} - {decimal(self.reference_b, 4)} - {decimal(self.a_reference, 4)} + "
            f"{decimal(self.references, 4)} = {decimal(self.explained, 4)}: texts of padding are similar to each "
            "other, so that the pairs sum to more than the similarity."
        )


def _named(tokens: tuple[str, ...]) -> list[str]:
    """Labels of tokens, each of its own."""
    return [f"{token} {place}" if tokens.count(token) > 1 else token for place, token in enumerate(tokens)]
