"""`DoseResponse`: the answers to prompts at each strength of a direction."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape

from mionnx.errors import InputError
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import index_within
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.view import Columns, Each, Lines, Series, Shown, Table, View, long_form, readable

LETTERS = 64  # of a prompt in a legend
ROUNDING_KL = 1e-9  # nats of rounding


@dataclass(frozen=True, repr=False)
class Answers(Brief, Storable):
    """The answers to prompts at some strengths; arrays are [prompts, strengths].

    Attributes:
        kl: KL divergence (without || with), in nats.
        probabilities: the target's.
        top, top_probabilities: the most probable token, and its probability.
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
        strengths: [strengths], ascending.
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
        facts = {name: getattr(self, name) for name in ("hook", "strengths", "share", "tolerance")}
        return {**facts, "prompts": rows}

    def view(self) -> View:
        """Target probability and KL divergence over the strengths, and the answers to a prompt."""
        curves: list[Lines] = []
        for title, values, high in (
            ("probability of the target", self.probabilities, 1),
            ("KL from the baseline (nats)", self.kl, None),
        ):
            first = not curves
            series = [self._series(row, values[row], marked=first) for row in range(len(self.prompts))]
            axes = (self.strengths, series, "strength", title, 0, high)
            curves.append(Lines(*axes, chooses="series", legend=first))
        meaning = (
            f"A direction is added at {self.hook} at {len(self.strengths)} strengths. Strength 1 is "
            f"{readable(100 * self.share)} % of the stream's median length there. A dotted line marks the strength "
            "from which the top token is the target. Click a prompt to see its answers."
        )
        each = Each([self._answers(row) for row in range(len(self.prompts))])
        return View(f"Steering at {self.hook}", [curves, self.table(), each], meaning=meaning)

    def _series(self, row: int, values: NDArray[np.float64], marked: bool) -> Series:
        prompt, target = self.prompts[row], self.names[int(self.targets[row])]
        notes = [
            f"{prompt} {top}\nP({target}) = {readable(probability)}\nKL = {readable(kl)} nats"
            for top, probability, kl in zip(self.top(row), self.probabilities[row], self.kl[row], strict=True)
        ]
        name = f"{prompt} → {target.strip()}"
        name = name if len(name) <= LETTERS else f"…{name[1 - LETTERS :]}"
        flip = self.flips[row]
        return Series(name, values, notes=notes, marks=[flip] if marked and np.isfinite(flip) else ())

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: the strength that flips each prompt, or each of the first k."""
        page = {"heading": "Prompts", "chooses": "series", "styles": {"answer": "token", "target": "token"}}
        title = f"Steering at {self.hook}"
        table = Table("prompt", "answer", "target", "strength that flips it", title=title, on_page=page)
        for row, prompt in enumerate(self.prompts[:k]):
            tokens = (self.names[int(token)] for token in (self.baseline[row], self.targets[row]))
            table.add_row(escape(prompt), *map(escape, tokens), self.turn(row).removeprefix("from strength "))
        return table

    def _answers(self, row: int) -> Table:
        target = f"P({self.names[int(self.targets[row])]})"
        styles = {"top token": "token", "its probability": "share", target: "share"}
        page = {"heading": f"Answers to “{self.prompts[row]}”", "styles": styles}
        table = Table("strength", "top token", "its probability", escape(target), "KL (nats)", on_page=page)
        shares = self.answers.top_probabilities[row], self.probabilities[row]
        for strength, top, *probabilities, kl in zip(self.strengths, self.top(row), *shares, self.kl[row], strict=True):
            numbers = (decimal(one, 4) for one in probabilities)
            table.add_row(readable(strength), escape(top), *numbers, "0" if kl < ROUNDING_KL else readable(kl))
        return table

    def _columns(self) -> Columns:
        prompts = [*zip(self.prompts, (self.names[int(token)] for token in self.targets), strict=True)]
        top = np.array([self.names[int(token)] for token in self.answers.top.ravel()], object)
        numbers = {"top_token": top, "top_probability": self.answers.top_probabilities}
        numbers |= {"probability": self.probabilities, "kl": self.kl}
        return long_form({"prompt, target": prompts, "strength": self.strengths.tolist()}, numbers)
