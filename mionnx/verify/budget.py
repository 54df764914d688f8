"""The cheapest bits of a model's matrices within a bound of KL, by what each costs alone.

1. KL over all of the text is measured with every matrix at its bits, exactly, in the model of floats with the numbers
   that the blocks stand for.
2. Where it is too large and 8 bits for all would do, matrices take 8 bits one after another: those first that save most
   KL, each alone, for a byte. Else all take 8 bits, and those that cost most for a byte go back to floats.
3. The smallest number of them for which KL over all of the text is within the bound is found by interpolation.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress
from mionnx.quantise.quantised_graph import Matrix
from mionnx.quantise.settings import Quantisation
from mionnx.verify.candidates import of_blocks
from mionnx.verify.importance import Importance
from mionnx.verify.matrix_loss import Candidate, FloatModel, MatrixLoss, matrix_losses
from mionnx.verify.next_token import Divergence, log_probabilities

WIDE = 8  # bits of the matrices that cost too much in 4
FLOATS = 0  # in the place of a number of bits

Bits = Mapping[str, int]


class Text:
    """The prompts of a measurement, with the model's own distributions in a file.

    Attributes:
        calls: the prompts.
        first: the logarithms of the probabilities of each, mapped.
    """

    def __init__(self, model: FloatModel, calls: Sequence[TokenBatch], folder: Path, progress: Progress) -> None:
        self.calls, self.first = list(calls), list[NDArray[np.float32]]()
        logits = model.chain.run([model.chain.feeds(call) for call in calls])
        for number, one in enumerate(logits):
            np.save(folder / f"{number}.npy", log_probabilities(one))
            self.first.append(np.load(folder / f"{number}.npy", mmap_mode="r"))
            progress("the model's own text", number + 1, len(calls))

    def divergence(self, logits: Iterator[NDArray[np.float32]]) -> Divergence:
        """KL of logits, prompt by prompt."""
        found = Divergence()
        for one, first in zip(logits, self.first, strict=True):
            found.add(first, one)
        return found


@contextmanager
def text_of(model: FloatModel, calls: Sequence[TokenBatch], progress: Progress) -> Iterator[Text]:
    """A text for the time of a `with` statement."""
    with TemporaryDirectory() as folder:
        yield Text(model, calls, Path(folder), progress)


@dataclass
class Search:
    """The matrices of a model and what is known of them.

    Attributes:
        model: of floats.
        text: to measure on.
        matrices: weight -> how it is held, at the bits asked for.
        settings: of the blocks.
        bound: KL in nats.
        progress: called as (stage, done, total).
        importance: of the inputs of matrices.
        measured: bits of all matrices -> KL, of every measurement.
        left: after each step, the sum of what the matrices that have not moved cost alone.
    """

    model: FloatModel
    text: Text
    matrices: Mapping[str, Matrix]
    settings: Quantisation
    bound: float
    progress: Progress
    importance: Importance = field(default_factory=dict)
    measured: dict[tuple[int, ...], float] = field(default_factory=dict)
    left: list[float] = field(default_factory=list)

    def kl(self, bits: Bits) -> float:
        """KL with all matrices at these bits, over all of the text."""
        key = tuple(bits.values())
        if key not in self.measured:
            made = [self._candidate(name, count) for name, count in bits.items() if count != FLOATS]
            stage, done = f"measuring all matrices together, {len(self.measured) + 1}", 0

            def told(more: int) -> None:
                nonlocal done
                done += more
                self.progress(stage, done, len(made))

            by_input = {name: one for one in made for name in one.inputs}
            self.measured[key] = self.text.divergence(self.model.with_all(by_input, self.text.calls, told)).mean
        return self.measured[key]

    def _candidate(self, name: str, bits: int) -> Candidate:
        matrix = replace(self.matrices[name], bits=bits)
        return of_blocks(self.model, name, matrix, self.settings, self.importance.get(name))

    def run(self) -> tuple[dict[str, int], list[dict[str, int]]]:
        """Choose the bits of all matrices.

        Returns:
            the bits, and those to try next, in order, if KL of the written model is above the bound after all.

        Raises:
            ModelError: the bound cannot be met; the message says what can.
        """
        asked = {name: matrix.bits for name, matrix in self.matrices.items()}
        wide = dict.fromkeys(asked, WIDE)
        if self.kl(asked) <= self.bound:
            return asked, []
        if asked != wide and self.kl(wide) <= self.bound:
            return self._along(self._steps(asked, wide))
        steps = self._steps(wide, dict.fromkeys(asked, FLOATS))[:-1]  # one of them is in blocks
        if self.kl(steps[-1]) > self.bound:
            best = min(steps[-1].items(), key=lambda one: -one[1])[0]
            raise ModelError(
                f"budget={self.bound:g}: KL is {self.kl(asked):.3g} nats as asked, {self.kl(wide):.3g} with all "
                f"matrices in 8 bits, and {self.kl(steps[-1]):.3g} with all but {best} in floats: nothing is left to "
                "quantise within the bound"
            )
        return self._along(steps)

    def _steps(self, begin: Bits, end: Bits) -> list[dict[str, int]]:
        """The bits after each matrix has gone from its first to its last, those that pay most first."""
        moving = [name for name in begin if begin[name] != end[name]]
        losses = matrix_losses(
            self.model, [self._candidate(name, begin[name]) for name in moving], self.text.calls, self.progress
        )
        more = {name: self._bytes(name, end[name]) - self._bytes(name, begin[name]) for name in moving}
        order = sorted(losses, key=lambda loss: (-loss.kl / more[loss.name], loss.name))
        steps = [dict(begin)]
        for loss in order:
            steps.append({**steps[-1], loss.name: end[loss.name]})
        self.left = _left(order)
        return steps

    def _bytes(self, name: str, bits: int) -> int:
        own = self.model.own(name)
        return own.nbytes if bits == FLOATS else self._candidate(name, bits).bytes

    def _along(self, steps: Sequence[dict[str, int]]) -> tuple[dict[str, int], list[dict[str, int]]]:
        """Find the first step within the bound; the last one of them is."""
        low, high, turn = 0, len(steps) - 1, 0
        while high - low > 1:
            guess = self._between(low, high, steps) if turn % 2 == 0 else (low + high) // 2
            low, high = (low, guess) if self.kl(steps[guess]) <= self.bound else (guess, high)
            turn += 1
        return steps[high], list(steps[high + 1 :])

    def _between(self, low: int, high: int, steps: Sequence[dict[str, int]]) -> int:
        """Guess the step at which KL is the bound, from the sums of single matrices' KL."""
        top, bottom = self.kl(steps[low]), self.kl(steps[high])
        share = (self.bound - bottom) / max(top - bottom, 1e-30)
        wanted = self.left[high] + share * (self.left[low] - self.left[high])
        found = next((at for at in range(low, high) if self.left[at] <= wanted), high)
        return min(max(found, low + 1), high - 1)


def _left(order: Sequence[MatrixLoss]) -> list[float]:
    """The sum of what is left after each step."""
    return [sum(loss.kl for loss in order[at:]) for at in range(len(order) + 1)]
