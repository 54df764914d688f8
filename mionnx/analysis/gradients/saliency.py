"""`Saliency`: how much each token of some texts carries of a metric, as numbers, coloured text and a page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.ranges import index_within
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.view import Columns, Shown, Text, View, readable


@dataclass(frozen=True, repr=False)
class SalientText(Brief, Storable):
    """One text of a `Saliency`.

    Attributes:
        tokens: [seq], the text of each token.
        scores: [seq], float64: what each token carries of the metric.
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
            scores = (f"{token!r} [{at}] {score:+.3g}" for at, token, score in one.top())
            yield f"{self.metric} {one.metric:.4g}: {', '.join(scores)}"

    def to_dict(self) -> dict[str, Any]:
        """As lists, one entry a text."""
        names = ("tokens", "scores", "metric", "baseline", "gap")
        texts = [{name: getattr(one, name) for name in names} for one in self.texts]
        return {"method": self.method, "hook": self.hook, "metric": self.metric, "steps": self.steps, "texts": texts}

    def view(self) -> View:
        """The texts, each token coloured by its score."""
        limit = max(1e-12, *(float(np.abs(one.scores).max()) for one in self.texts))
        panels = [self._panel(number, one, limit) for number, one in enumerate(self.texts, 1)]
        meaning = (
            f"Each token is coloured by its share of {self.metric} at {self.hook}: red raises it, blue lowers it. "
        )
        meaning += (
            "The shares of a text sum to the change from the baseline, up to the gap that the path of "
            f"{self.steps} steps leaves."
            if self.steps
            else "A share is the gradient times the value: what the metric would lose, to first order, with that value "
            "at zero."
        )
        return View(f"{self.method} of {self.metric}", panels, about=self.hook, meaning=meaning)

    def _panel(self, number: int, one: SalientText, limit: float) -> Text:
        facts = f"{self.metric} {readable(one.metric)}"
        if one.baseline is not None:
            facts += f", baseline {readable(one.baseline)}, gap {readable(one.gap)}"
        heading = f"Text {number}" if len(self.texts) > 1 else "Text"
        unit, legend = f"share of {self.metric}", number == len(self.texts)
        return Text(one.tokens, [one.scores], limit, facts=[facts], unit=unit, legend=legend, heading=heading)

    def _columns(self) -> Columns:
        """One row for each text and token."""
        rows = [
            (number, position, token, score)
            for number, one in enumerate(self.texts)
            for position, (token, score) in enumerate(zip(one.tokens, one.scores.tolist(), strict=True))
        ]
        return dict(zip(("text", "position", "token", "score"), zip(*rows, strict=True), strict=True))
