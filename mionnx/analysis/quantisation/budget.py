"""The cheapest bits of a model's matrices within a bound of KL, by what each costs alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.quantisation.candidates import of_blocks
from mionnx.analysis.quantisation.layer_chain import Importance, Stage
from mionnx.analysis.quantisation.matrix_loss import (
    Candidate,
    Divergence,
    FloatModel,
    MatrixLoss,
    log_probabilities,
    matrix_losses,
)
from mionnx.errors import InputError, ModelError
from mionnx.inputs.token_batch import TokenBatch
from mionnx.machine.progress import Progress
from mionnx.quantise.matrices import expert_of
from mionnx.quantise.quantised_graph import Matrix
from mionnx.quantise.settings import Quantisation
from mionnx.run.segments import Arrays

WIDE_BITS = 8  # bits of the matrices that cost too much in 4
IN_FLOATS = 0  # in place of a number of bits
GRAINS, TABLE = 2**18, 2**26  # parts that a sum of costs is counted in; of those, with all matrices, the most
MORE = 5  # measurements that make the model smaller
CLOSE = 0.97  # share of the bound at which it is small enough

Bits = Mapping[str, int]


@dataclass(frozen=True)
class MeasuredText:
    """The prompts of a measurement."""

    calls: Sequence[TokenBatch]
    first: Sequence[NDArray[np.float32]]  # the model's own log probabilities for each, mapped from a file


@contextmanager
def text_of(model: FloatModel, calls: Sequence[TokenBatch], progress: Progress) -> Iterator[MeasuredText]:
    """A text for the time of a `with` statement."""
    with TemporaryDirectory() as folder:
        first = list[NDArray[np.float32]]()
        for number, logits in enumerate(model.chain.logits_of([*map(Stage.first, calls)])):
            path = Path(folder) / f"{number}.npy"
            # Log probabilities of a whole vocabulary at every token: too much to hold for all prompts.
            np.save(path, log_probabilities(logits))
            first.append(np.load(path, mmap_mode="r"))
            progress("the model's own text", number + 1, len(calls))
        yield MeasuredText(calls, first)


def whole_stacks(matrices: Mapping[str, Matrix]) -> dict[str, Matrix]:
    """Matrices with those of a stack of experts as one: it moves as a whole."""
    stacks = dict[str, Matrix]()
    for name, matrix in matrices.items():
        stack, _ = expert_of(name) or (name, None)
        if stacks.setdefault(stack, matrix).bits != matrix.bits:
            raise InputError(f"a budget moves the experts of {stack!r} together: name it in in_8_bits, not {name!r}")
    return stacks


@dataclass(frozen=True)
class Moves:
    """The matrices of a model that may take more bits, and the sets of them that do.

    The costs of single matrices are added up: the sums tell the order of sets of matrices, not their KL.
    """

    # begin, end: bits of all matrices before and after all of them have moved.
    begin: Bits
    end: Bits
    losses: Sequence[MatrixLoss]  # costs of single matrices before they move, those that save most KL for a byte first
    more: Sequence[int]  # bytes that each takes more when it has moved, in that order

    @classmethod
    def of(cls, begin: Bits, end: Bits, losses: Sequence[MatrixLoss], more: Mapping[str, int]) -> "Moves":
        # Names break ties: the same order in every run.
        order = sorted(losses, key=lambda loss: (-loss.kl / more[loss.name], loss.name))
        return cls(begin, end, order, [more[loss.name] for loss in order])

    @cached_property
    def steps(self) -> list[dict[str, int]]:
        """Bits of all matrices after none, one, two .. have moved."""
        steps = [dict(self.begin)]
        for loss in self.losses:
            steps.append({**steps[-1], loss.name: self.end[loss.name]})
        return steps

    @cached_property
    def left(self) -> list[float]:
        """Sum of the single costs of the matrices left, after each step."""
        return [sum(loss.kl for loss in self.losses[at:]) for at in range(len(self.losses) + 1)]

    def bytes(self, bits: Bits) -> int:
        """Bytes more than before any has moved."""
        pairs = zip(self.losses, self.more, strict=True)
        return sum(more for loss, more in pairs if bits[loss.name] != self.begin[loss.name])

    def fewest(self, left: float) -> dict[str, int]:
        """Find the bits of fewest bytes for a sum of single costs."""
        # The matrices that stay save most bytes and cost at most `left` in sum.
        # a knapsack by dynamic programming, costs in grains; scipy's `milp` prints its solver's lines into a command's
        grains = min(GRAINS, TABLE // max(1, len(self.losses)))
        # Rounded up: the sum of grains never stands for less than the sum of costs.
        costs = [int(min(np.ceil(loss.kl / max(left, 1e-300) * grains), grains + 1)) for loss in self.losses]
        saved, stays = np.zeros(grains + 1, np.int64), np.zeros((len(costs), grains + 1), bool)
        for at, (cost, more) in enumerate(zip(costs, self.more, strict=True)):
            if cost <= grains:
                other = saved[: grains + 1 - cost] + more
                stays[at, cost:] = other > saved[cost:]
                saved[cost:] = np.maximum(saved[cost:], other)
        moved, free = set[str](), grains
        # From the last matrix back, what each choice left free tells which were made.
        for at in range(len(costs) - 1, -1, -1):
            if stays[at, free]:
                free -= costs[at]
            else:
                moved.add(self.losses[at].name)
        return {name: self.end[name] if name in moved else bits for name, bits in self.begin.items()}


@dataclass
class Search:
    """The search for bits within a bound of KL."""

    model: FloatModel
    text: MeasuredText
    matrices: Mapping[str, Matrix]  # weight, or stack of experts -> its form at the bits asked for
    settings: Quantisation
    bound: float  # KL in nats
    progress: Progress
    importance: Importance = field(default_factory=dict)
    # Bits of all matrices -> KL, of every measurement.
    measured: dict[tuple[int, ...], float] = field(default_factory=dict)

    def kl(self, bits: Bits) -> float:
        """KL with all matrices at these bits, over all of the text."""
        # exactly: in the model of floats, with the numbers that the blocks stand for
        key = tuple(bits.values())
        if key not in self.measured:
            candidates = [self._candidate(name, count) for name, count in bits.items() if count != IN_FLOATS]
            by_input = {name: one for one in candidates for name in one.inputs}
            stage, done = f"measuring all matrices together, {len(self.measured) + 1}", 0

            def others(names: Sequence[str]) -> Arrays:
                nonlocal done
                arrays: Arrays = {}
                # One matrix at a time, and for both of its inputs once.
                for one in {by_input[name].name: by_input[name] for name in names if name in by_input}.values():
                    array = self.model.in_graph(one.name, one.numbers())
                    arrays |= {name: array for name in one.inputs if name in names}
                    done += 1
                    self.progress(stage, done, len(candidates))
                return arrays

            logits = self.model.chain.logits_of([*map(Stage.first, self.text.calls)], others)
            self.measured[key] = Divergence.of(self.text.first, logits).mean
        return self.measured[key]

    def _candidate(self, name: str, bits: int) -> Candidate:
        matrix = replace(self.matrices[name], bits=bits)
        return of_blocks(self.model, name, matrix, self.settings, self.importance.get(name))

    def run(self) -> tuple[dict[str, int], list[dict[str, int]]]:
        """The bits of all matrices, and those to try next, in order, if KL of the written model is above the bound."""
        begin = {name: matrix.bits for name, matrix in self.matrices.items()}
        wide = dict.fromkeys(begin, WIDE_BITS)
        if self.kl(begin) <= self.bound:
            return begin, []
        if begin != wide and self.kl(wide) <= self.bound:
            # matrices take 8 bits one after another, those first that save most KL, each alone, for a byte
            return self._along(self._moves(begin, wide))
        # 8 bits for all do not do: those that cost most for a byte go back to floats
        moves = self._moves(wide, dict.fromkeys(begin, IN_FLOATS))
        fewest = moves.steps[-2]  # one of them is in blocks
        if self.kl(fewest) > self.bound:
            best = min(fewest.items(), key=lambda one: -one[1])[0]
            raise ModelError(
                f"budget={self.bound:g}: KL is {self.kl(begin):.3g} nats as asked, {self.kl(wide):.3g} with all "
                f"matrices in 8 bits, and {self.kl(fewest):.3g} with all but {best} in floats: nothing is left to "
                "quantise within the bound"
            )
        return self._along(moves, 1)

    def bytes(self, bits: Bits) -> int:
        """Bytes of all matrices at these bits."""
        return sum(self._bytes(name, count) for name, count in bits.items())

    def _moves(self, begin: Bits, end: Bits) -> Moves:
        """Measure the cost of each matrix at its first bits, beside the bytes that its last take."""
        moving = [name for name in begin if begin[name] != end[name]]
        candidates = [self._candidate(name, begin[name]) for name in moving]
        losses = matrix_losses(self.model, candidates, self.text.calls, self.progress)
        more = {name: self._bytes(name, end[name]) - self._bytes(name, begin[name]) for name in moving}
        return Moves.of(begin, end, losses, more)

    def _bytes(self, name: str, bits: int) -> int:
        own = self.model.own(name)
        return own.nbytes if bits == IN_FLOATS else self._candidate(name, bits).bytes

    def _along(self, moves: Moves, without: int = 0) -> tuple[dict[str, int], list[dict[str, int]]]:
        """Find the first step within the bound, then smaller sets; the last steps may be left out."""
        # KL falls with each step: interpolation, by halves every other time, as the sums are not KL
        low, high, turn = 0, len(moves.steps) - 1 - without, 0
        while high - low > 1:
            guess = self._between(low, high, moves) if turn % 2 == 0 else (low + high) // 2
            low, high = (low, guess) if self.kl(moves.steps[guess]) <= self.bound else (guess, high)
            turn += 1
        best, *others = [*self._smaller(moves, low, high), *moves.steps[high : len(moves.steps) - without]]
        return best, others

    def _between(self, low: int, high: int, moves: Moves) -> int:
        """Guess the step at which KL is the bound, from the sums of single matrices' KL."""
        within, above = ((moves.left[at], self.kl(moves.steps[at])) for at in (high, low))
        target = self._left(within, above)
        step = next((at for at in range(low, high) if moves.left[at] <= target), high)
        return min(max(step, low + 1), high - 1)

    def _left(self, within: tuple[float, float], above: tuple[float, float]) -> float:
        """The sum of single matrices' KL at which KL is the bound, between two pairs of both."""
        share = (self.bound - within[1]) / max(above[1] - within[1], 1e-30)
        return within[0] + share * (above[0] - within[0])

    def _smaller(self, moves: Moves, low: int, high: int) -> list[dict[str, int]]:
        """Bits within the bound that take fewer bytes than a step, the fewest first."""
        # the last move may have saved more than was needed; each set is the smallest for a sum of single costs, and a
        # few measurements bring that sum to the bound
        sets, best = list[dict[str, int]](), moves.steps[high]
        within, above = ((moves.left[at], self.kl(moves.steps[at])) for at in (high, low))
        last = len(self.measured) + MORE
        # Turns are limited too: a set that was measured before, or takes no fewer bytes, costs no measurement.
        for turn in range(4 * MORE):
            if self.kl(best) >= CLOSE * self.bound or len(self.measured) == last:
                break
            left = self._left(within, above) if turn % 2 == 0 else (within[0] + above[0]) / 2
            bits = moves.fewest(left)
            if moves.bytes(bits) >= moves.bytes(best):
                within = left, within[1]
            elif self.kl(bits) <= self.bound:
                best, within = bits, (left, self.kl(bits))
                sets.insert(0, bits)
            else:
                above = left, self.kl(bits)
        return sets
