"""`DoseResponse`: the answers to prompts at each strength of a direction."""

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

SHOWN = 8  # prompts that a picture tells apart


@dataclass(frozen=True, repr=False)
class Answers(Brief, Storable):
    """The answers to prompts at some strengths; arrays are [prompts, strengths].

    Attributes:
        kl: KL divergence (without || with), in nats.
        probabilities: of the target.
        top: the top token.
        top_probabilities: its probability.
    """

    kl: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    top: NDArray[np.int64]
    top_probabilities: NDArray[np.float64]


@dataclass(frozen=True, repr=False)
@typed(InputError)
class DoseResponse(Shown):
    """The answers to prompts, by the strength of one direction.

    Attributes:
        hook: where it was added.
        prompts: [prompts], texts.
        strengths: [strengths], ascending.
        answers: what came of each.
        targets: [prompts], the tokens whose probability is followed.
        baseline: [prompts], the top tokens without steering.
        flips: [prompts], the strength nearest 0, on either side, from which the top token is the target; NaN if it is
            at none, and where it is the target without steering. After a bisection it lies within `tolerance` beyond
            the true one.
        tolerance: how closely, 0 if at the strengths asked for only.
        share: the share of the stream's length that strength 1 adds: of the median over these prompts' steered tokens,
            the first token of each left out as in `calibrate`.
        names: token -> its text.
    """

    hook: str
    prompts: tuple[str, ...]
    strengths: NDArray[np.float64]
    answers: Answers
    targets: NDArray[np.int64]
    baseline: NDArray[np.int64]
    flips: NDArray[np.float64]
    tolerance: float
    share: float
    names: dict[int, str]
    INSIDE: ClassVar = (Answers,)

    @property
    def kl(self) -> NDArray[np.float64]:
        """[prompts, strengths]: KL divergence (without || with), in nats."""
        return self.answers.kl

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """[prompts, strengths]: the probability of the target."""
        return self.answers.probabilities

    def top(self, index: int = 0) -> list[str]:
        """The top token at each strength, for one prompt."""
        row = index_within("prompt", index, len(self.prompts))
        return [self.names[int(token)] for token in self.answers.top[row]]

    def _facts(self) -> Iterator[str]:
        yield from (self.hook, count(len(self.prompts), "prompt"))
        yield f"{count(len(self.strengths), 'strength')} from {self.strengths[0]:g} to {self.strengths[-1]:g}"

    def _lines(self) -> Iterator[str]:
        for i, prompt in enumerate(self.prompts):
            names = (self.names[int(token)] for token in (self.baseline[i], self.targets[i]))
            yield f"{prompt!r}: {' -> '.join(map(repr, names))} {self.turn(i)}"

    def turn(self, index: int = 0) -> str:
        """The strength that makes the target the top token, in words."""
        index = index_within("prompt", index, len(self.prompts))
        if self.baseline[index] == self.targets[index]:
            return "without steering already"
        flip = self.flips[index]
        return f"from strength {spelled(float(flip))}" if np.isfinite(flip) else "at none of these strengths"

    def to_dict(self) -> dict[str, Any]:
        """As lists, one entry a prompt."""
        rows = [
            {
                "prompt": prompt,
                "baseline": self.names[int(self.baseline[i])],
                "target": self.names[int(self.targets[i])],
                "flip": self.flips[i],
                "kl": self.kl[i],
                "probability": self.probabilities[i],
                "top": self.top(i),
                "top_probability": self.answers.top_probabilities[i],
            }
            for i, prompt in enumerate(self.prompts)
        ]
        return {
            "hook": self.hook,
            "strengths": self.strengths,
            "share": self.share,
            "tolerance": self.tolerance,
            "prompts": rows,
        }

    def figure(self) -> "Figure":
        """The target's probability and the KL divergence over the strengths, one line a prompt."""
        figure = empty_figure(9, 3.8)
        left, right = figure.subplots(1, 2)
        for i, prompt in enumerate(self.prompts[:SHOWN]):
            label = _short(f"{prompt} → {self.names[int(self.targets[i])].strip()}")
            (line,) = left.plot(
                self.strengths, self.probabilities[i], marker="o", markersize=3, label=token_label(label)
            )
            right.plot(self.strengths, self.kl[i], marker="o", markersize=3, color=line.get_color())
            if np.isfinite(self.flips[i]):
                left.axvline(self.flips[i], color=line.get_color(), linewidth=0.8, linestyle=":")
        left.set_ylim(-0.03, 1.03)
        left.set_ylabel("probability of the target")
        right.set_ylabel("KL from the baseline (nats)")
        for axes in (left, right):
            axes.set_xlabel(f"strength at {self.hook}")
            axes.spines[["top", "right"]].set_visible(False)
        more = len(self.prompts) - SHOWN
        title = f"and {more} more prompts, not shown" if more > 0 else None
        figure.legend(loc="outside lower center", fontsize=8, ncols=min(2, len(self.prompts)), title=title)
        return figure

    def page(self) -> str:
        """Both curves for every prompt, and a table of the answers."""
        return render("dose.html", f"Steering at {self.hook}", self.to_dict())


def _short(text: str, width: int = 64) -> str:
    return text if len(text) <= width else f"…{text[1 - width :]}"
