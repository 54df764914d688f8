"""`Saliency`: how much each token of some texts carries of a metric, as numbers, coloured text and a page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.ranges import index_within
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.view import Shown, empty_figure, render
from mionnx.view.figure import token_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 6  # texts of a figure
LABEL = 12  # characters of a token


@dataclass(frozen=True, repr=False)
class SalientText(Brief, Storable):
    """One text of a `Saliency`.

    Attributes:
        tokens: [seq], the text of each token.
        scores: [seq], float64: what each token carries of the metric.
        metric: of the text.
        baseline: the metric of the baseline; None where there is none.
    """

    tokens: tuple[str, ...]
    scores: NDArray[np.float64]
    metric: float
    baseline: float | None = None

    @property
    def gap(self) -> float | None:
        """The sum of the scores minus the change of the metric from the baseline."""
        return None if self.baseline is None else float(self.scores.sum() - (self.metric - self.baseline))

    def top(self, k: int = 5) -> list[tuple[int, str, float]]:
        """The tokens with the largest scores by size: (position, text, score)."""
        order = np.argsort(-np.abs(self.scores), kind="stable")[:k]
        return [(int(at), self.tokens[at], float(self.scores[at])) for at in order]


@dataclass(frozen=True, repr=False)
@typed(InputError)
class Saliency(Shown):
    """Scores of the tokens of some texts: what each carries of a metric, by its gradients.

    Attributes:
        method: "integrated gradients", or "gradient x input".
        hook: the hook point whose values are attributed, summed over all but the positions.
        metric: its name and tokens.
        texts: one for each text.
        steps: points of the path from the baseline; 0 without a path.
    """

    method: str
    hook: str
    metric: str
    texts: tuple[SalientText, ...]
    steps: int = 0
    INSIDE: ClassVar = (SalientText,)

    def scores(self, text: int = 0) -> NDArray[np.float64]:
        """[seq]: the scores of one text."""
        return self.texts[index_within("text", text, len(self.texts))].scores

    @property
    def gap(self) -> float | None:
        """The largest completeness gap of the texts, in size; None without a baseline."""
        gaps = [abs(one.gap) for one in self.texts if one.gap is not None]
        return max(gaps, default=None)

    def _facts(self) -> Iterator[str]:
        yield from (self.method, self.hook, self.metric, count(len(self.texts), "text"))
        if self.gap is not None:
            yield f"{count(self.steps, 'step')}, gap at most {spelled(self.gap)}"

    def _lines(self) -> Iterator[str]:
        for one in self.texts:
            told = (f"{token!r} [{at}] {score:+.3g}" for at, token, score in one.top())
            yield f"{self.metric} {one.metric:.4g}: {', '.join(told)}"

    def to_dict(self) -> dict[str, Any]:
        """As lists, one entry a text."""
        texts = [
            {
                "tokens": list(one.tokens),
                "scores": one.scores,
                "metric": one.metric,
                "baseline": one.baseline,
                "gap": one.gap,
            }
            for one in self.texts
        ]
        return {"method": self.method, "hook": self.hook, "metric": self.metric, "steps": self.steps, "texts": texts}

    def page(self) -> str:
        """The texts, each token coloured by its score, as one HTML page that works offline."""
        return render("saliency.html", f"{self.method} of {self.metric}", self.to_dict())

    def figure(self) -> "Figure":
        """Bars of the tokens' scores, the first texts below one another."""
        shown = self.texts[:SHOWN]
        widest = max(len(one.tokens) for one in shown)
        figure = empty_figure(min(1.2 + 0.5 * max(widest, 8), 30), 0.4 + 2.2 * len(shown))
        for one, panel in zip(shown, figure.subplots(len(shown), 1, squeeze=False)[:, 0], strict=True):
            colours = ["#b2182b" if score > 0 else "#2166ac" for score in one.scores]
            panel.bar(range(len(one.tokens)), one.scores, color=colours)
            labels = [token_label(token, LABEL) for token in one.tokens]
            panel.set_xticks(range(len(labels)), labels, rotation=60, ha="right", fontsize=8)
            panel.axhline(0, color="black", linewidth=0.6)
            panel.set_ylabel(f"share of {self.metric}", fontsize=8)
        left = len(self.texts) - len(shown)
        figure.suptitle(f"{self.method}, {self.hook}" + f" ({left} texts more)" * bool(left), fontsize=10)
        return figure
