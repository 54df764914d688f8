"""`FeatureActivations`: the features that are active at each token of a text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, InterventionError
from mionnx.machine.brief import count, spelled
from mionnx.machine.ranges import index_within
from mionnx.machine.typed import typed
from mionnx.view import Shown, new_figure, render
from mionnx.view.figure import token_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLD = 6  # tokens of a printed result, the last ones
ROWS = 20  # features in the picture
COLUMNS = 60  # tokens in the picture


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
        for position, token in list(enumerate(self.tokens))[-TOLD:]:
            best = [f"{feature} ({spelled(value)})" for feature, value in self.top(position)[:5]]
            yield f"{position} {token!r}: {', '.join(best) or 'none'}"

    def to_dict(self) -> dict[str, Any]:
        """As lists."""
        return {
            "hook": self.hook,
            "tokens": [*self.tokens],
            "ids": self.ids,
            "values": self.values,
            "followed": self.followed,
            "activations": self.activations.T,
        }

    def figure(self) -> "Figure":
        """The strongest followed features over the tokens."""
        order = np.argsort(-self.activations.max(axis=0, initial=0), kind="stable")[:ROWS]
        shown = self.activations[:COLUMNS, order].T
        tokens = self.tokens[:COLUMNS]
        figure, axes = new_figure(max(4.0, 1.6 + 0.42 * len(tokens)), max(2.4, 1.2 + 0.24 * len(order)))
        if len(order):
            image = axes.imshow(shown, cmap="Blues", vmin=0, aspect="auto")
            figure.colorbar(image, ax=axes, label="activation")
        axes.set_xticks(
            range(len(tokens)), [token_label(token) for token in tokens], rotation=60, ha="right", fontsize=8
        )
        axes.set_yticks(range(len(order)), [str(self.followed[at]) for at in order], fontsize=8)
        axes.set_ylabel("feature")
        more = len(self.tokens) - len(tokens)
        axes.set_title(self.hook + (f" (and {more} more tokens)" if more else ""), fontsize=10)
        return figure

    def page(self) -> str:
        """The text coloured by a feature that can be chosen, and each token's features."""
        return render("features.html", f"Features at {self.hook}", self.to_dict())
