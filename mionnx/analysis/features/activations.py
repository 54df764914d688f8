"""`FeatureActivations`: the features that are active at each token of a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, InterventionError
from mionnx.machine.brief import count, spelled
from mionnx.machine.ranges import index_within
from mionnx.machine.typed import typed
from mionnx.view import Columns, HeatMap, Shown, Text, View, readable

PRINTED_TOKENS = 6  # tokens of a printed result, the last ones
MAP_FEATURES = 20  # features in the picture
MAP_TOKENS = 60  # tokens in the picture


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class FeatureActivations(Shown):
    """The features of a text's tokens.

    Attributes:
        hook: the hook point that was encoded.
        tokens: [seq], as texts.
        ids: [seq, k], the features with the largest activations, the largest first.
        values: [seq, k], these activations.
        followed: [n], features whose activations are known at every token.
        activations: [seq, n], these.
    """

    hook: str
    tokens: tuple[str, ...]
    ids: NDArray[np.int64]
    values: NDArray[np.float32]
    followed: NDArray[np.int64]
    activations: NDArray[np.float32]

    def of(self, feature: int) -> NDArray[np.float32]:
        """[seq]: one followed feature's activation at every token.

        Raises:
            InterventionError: it was not followed.
        """
        at = np.flatnonzero(self.followed == feature)
        if not len(at):
            raise InterventionError(f"feature {feature} was not followed: features(..., follow=[{feature}])")
        return self.activations[:, at[0]]

    def top(self, position: int) -> list[tuple[int, float]]:
        """The features active at one token, the most active first."""
        position = index_within("position", position, len(self.tokens))
        pairs = zip(self.ids[position], self.values[position], strict=True)
        return [(int(feature), float(value)) for feature, value in pairs if value > 0]

    def _facts(self) -> Iterator[str]:
        yield from (self.hook, count(len(self.tokens), "token"), f"top {count(self.ids.shape[1], 'feature')}")
        yield f"{len(self.followed)} followed"

    def _lines(self) -> Iterator[str]:
        for position, token in list(enumerate(self.tokens))[-PRINTED_TOKENS:]:
            best = [f"{feature} ({spelled(value)})" for feature, value in self.top(position)[:5]]
            yield f"{position} {token!r}: {', '.join(best) or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """All attributes; the followed features' activations as [n, seq]."""
        return {**super().to_dict(), "activations": self.activations.T}

    def view(self) -> View:
        """Text coloured by a feature of choice, features of each token, and the strongest as a map."""
        scores: dict[int, Any] = dict(zip(self.followed.tolist(), self.activations.T, strict=True))
        followed = {*scores}
        for position in range(len(self.tokens)):
            for feature, value in self.top(position):
                if feature not in followed:
                    scores.setdefault(feature, {})[position] = value
        numbers = {feature: number for number, feature in enumerate(scores)}
        chips = [[(numbers[feature], value) for feature, value in self.top(at)] for at in range(len(self.tokens))]
        text = Text(
            self.tokens,
            [*scores.values()],
            diverging=False,
            facts=[self._fact(feature, of) for feature, of in scores.items()],
            chips=chips,
            chooses=True,
        )
        about = (
            f"{len(self.tokens)} tokens at {self.hook}. The text is coloured by one feature's activation; choose it "
            "here, or click it below. Of a feature that was not followed, only where it is among the largest is known."
        )
        options = [str(feature) for feature in scores]
        panels = [text, *self._maps()]
        return View(f"Features at {self.hook}", panels, meaning=about, choice="feature", options=options)

    def _fact(self, feature: int, scores: Any) -> str:
        values = [*scores.values()] if isinstance(scores, dict) else scores.tolist()
        active = [value for value in values if value > 0]
        most = readable(max(active, default=0))
        return f"feature {feature} is active at {len(active)} of {len(self.tokens)} tokens, at most {most}"

    def _maps(self) -> list[HeatMap]:
        """The strongest followed features over the first tokens."""
        order = np.argsort(-self.activations.max(axis=0, initial=0), kind="stable")[:MAP_FEATURES]
        if not len(order):
            return []
        axes = {"feature": [str(self.followed[at]) for at in order], "token": self.tokens[:MAP_TOKENS]}
        more = len(self.tokens) - MAP_TOKENS
        note = f"and {more} more tokens" if more > 0 else ""
        numbers = {"activation": np.maximum(self.activations[:MAP_TOKENS, order].T, 0)}
        return [HeatMap(axes, numbers, diverging=False, heading="The strongest followed features", note=note)]

    def _columns(self) -> Columns:
        rows = [
            (position, self.tokens[position], feature, value)
            for position in range(len(self.tokens))
            for feature, value in self.top(position)
        ]
        return dict(zip(("position", "token", "feature", "activation"), zip(*rows, strict=True), strict=True))
