"""`subspace_interchange`: a subspace of one prompt's activations put into another's run, beside random moves as large.

Geiger et al. 2023 (arXiv:2303.02536): h <- h + (h' - h) P V within the span of a basis. What a move of that length in a
random direction does besides is owed to its length alone: norm-matched placebos.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.gradients.first_order import part_of, rows_of
from mionnx.analysis.sweep.comparison import Comparison, Pair, compares
from mionnx.analysis.sweep.metric import Measure, Tokens
from mionnx.errors import InputError, InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import Place
from mionnx.machine.brief import count
from mionnx.machine.decimals import decimal
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.resampling import TIE, bootstrap_interval
from mionnx.machine.typed import typed
from mionnx.run.metric_place import values_read
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.subspace import Subspace
from mionnx.view import Bars, Columns, Shown, Table, View

MOST_PLACEBOS = 1000
Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
@typed(InputError)
class SubspaceEffect(Shown):
    """What a subspace carries: the change of a metric by its interchange, and by random moves of equal length.

    Attributes:
        hook, positions: where it was interchanged; positions count from each text's start, or end if negative.
        dimensions: the number of directions that span the subspace.
        by_pair: change of the metric, float64 [pairs].
        placebos: change of the metric by moves in random subspaces, [placebos, pairs].
        clean, corrupted: the metric of both runs, [pairs].
        shares: share of the squared distance between both activations that the subspace has, [pairs].
    """

    hook: str
    positions: tuple[int, ...]
    dimensions: int
    metric: str
    about: str
    by_pair: Numbers
    placebos: Numbers
    clean: Numbers
    corrupted: Numbers
    shares: Numbers

    @property
    def effect(self) -> float:
        """The mean change of the metric."""
        return float(self.by_pair.mean())

    @property
    def normalized(self) -> float:
        """The effect as a share of the difference between both runs."""
        difference = float((self.corrupted - self.clean).mean())
        if not difference:
            raise InputError(f"clean and corrupted both have {self.metric} {self.clean.mean():.6g}: nothing to share")
        return self.effect / difference

    @property
    def p_value(self) -> float:
        """Share of placebos whose mean effect is as large to either side; the subspace itself counts as one."""
        sizes = np.abs(self.placebos.mean(axis=1))
        return float(((sizes >= abs(self.effect) * (1 - TIE)).sum() + 1) / (len(sizes) + 1))

    def interval(self, confidence: float = 0.95, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """The ends of a bootstrap interval of the effect over pairs.

        Raises:
            InputError: one pair.
        """
        low, high = bootstrap_interval(self.by_pair, confidence, resamples, seed)
        return float(low), float(high)

    def _facts(self) -> Iterator[str]:
        yield from (self.hook, count(self.dimensions, "dimension"), count(len(self.by_pair), "pair"))
        yield f"effect {decimal(self.effect, 3)}"

    def _lines(self) -> Iterator[str]:
        yield self.facts()

    def facts(self) -> str:
        """One line with the effect beside those of placebos."""
        means = self.placebos.mean(axis=1)
        random = f"{len(means)} random moves of equal length {decimal(float(means.mean()), 3)}"
        spread = f"±{decimal(float(means.std()), 3)}, p {decimal(self.p_value, 3)}" if len(means) else ""
        between = decimal(float((self.corrupted - self.clean).mean()), 3)
        return (
            f"change of {self.metric} {decimal(self.effect, 3)} of {between}; "
            f"{random if len(means) else 'no placebos'} {spread}; "
            f"{decimal(float(100 * self.shares.mean()), 0)} % of the squared distance"
        )

    def view(self) -> View:
        """The effect and those of placebos, the largest first, and the pairs."""
        means = self.placebos.mean(axis=1)
        values = np.concatenate([[self.effect], means])
        labels = ["the subspace", *(f"random {i}" for i in range(len(means)))]
        order = np.argsort(-np.abs(values), kind="stable")
        bars = Bars([labels[i] for i in order], values[order], f"change of {self.metric}")
        meaning = (
            "A random move is as long as the subspace's, in a random subspace of as many dimensions: what it changes "
            "is owed to its length alone."
        )
        return View("Subspace interchange", [bars, self.table()], self.about, self.facts(), meaning)

    def table(self, k: int | None = None) -> Table:
        """Table for a terminal: every pair, or the first k."""
        table = Table("pair", "clean", "corrupted", "change", "placebos", "share of the distance", title=self.facts())
        for i in range(len(self.by_pair))[:k]:
            random = decimal(float(self.placebos[:, i].mean()), 3) if len(self.placebos) else "-"
            cells = (self.clean[i], self.corrupted[i], self.by_pair[i])
            table.add_row(str(i), *(decimal(float(one), 3) for one in cells), random, decimal(float(self.shares[i]), 3))
        return table

    def _columns(self) -> Columns:
        columns: dict[str, Any] = {"pair": np.arange(len(self.by_pair)), "change": self.by_pair}
        columns |= {"clean": self.clean, "corrupted": self.corrupted, "share": self.shares}
        return columns | ({"placebos": self.placebos.mean(axis=0)} if len(self.placebos) else {})


@compares
@typed(leave=["corrupted", "answer", "versus"])
def subspace_interchange(
    model: Runner,
    clean: Prompt | Comparison,
    corrupted: Prompt | None = None,
    subspace: Subspace | None = None,
    hook: str | HookPoint = "",
    metric: Measure = "logit_diff",
    *,
    answer: Tokens = None,
    versus: Tokens = None,
    positions: int | Sequence[int] = -1,
    strength: float = 1.0,
    placebos: int = 20,
    seed: int = 0,
    position: Place | None = None,
) -> SubspaceEffect:
    """Put the corrupted prompts' part of a subspace into the clean runs, beside random moves of equal length.

    All moves of a pair are rows of one batch.

    Args:
        subspace: directions at the hook point, [k, width].
        hook: one with a value a token: a residual stream, an output of attention or an MLP.
        positions: of the tokens whose activations are interchanged; negative ones from each text's end.
        strength: factor of the move.
        placebos: number of random subspaces.
        seed: a number that determines these.

    Raises:
        HookError: no such hook point.
        InterventionError: another width, or prompts whose activations are equal within the subspace.
        InputError: prompts or tokens that do not fit.

    Example:
        pair = Subspace([model.unembedding_for("Paris"), model.unembedding_for("Rome")])
        model.subspace_interchange(clean, corrupted, pair, "blocks.3.hook_resid_post").p_value
    """
    if subspace is None or not str(hook):
        raise InputError("subspace= and hook= say what is interchanged, and where")
    at_least("placebos", placebos, 0)
    at_most("placebos", placebos, MOST_PLACEBOS)
    at_least("seed", seed, 0)
    point = HookPoint.parse(str(hook))
    axes = model.hooked.axes(point)
    if len(axes) != 3 or point.derived:
        raise InputError(
            f"{point} is [{', '.join(point.axes or ())}]: a subspace is interchanged in one vector a token"
        )
    if subspace.width != axes[-1]:
        raise InterventionError(f"a subspace of width {subspace.width} at {point}, where the width is {axes[-1]}")
    comparison = Comparison(cast(Prompt, clean), corrupted, metric, answer, versus, "noising", position)
    compared = comparison.on(model).of_texts("an interchange")
    places = tuple(int(one) for one in np.atleast_1d(np.asarray(positions)))
    bases = [Subspace.random(len(subspace), subspace.width, seed + i) for i in range(placebos)]
    changes, ends, shares = [], [], []
    for number, pair in enumerate(compared.pairs):
        rows = rows_of(pair, [one for one in (pair.base, pair.other) if one is not None])
        at = [_place(one, number, len(compared.bases[number]), len(pair.base)) for one in places]
        spec = HookSpec().capture(point, positions=at)
        cache = model.forward(rows, spec, logits=part_of(pair, model))
        logits = values_read(model.hooked, cache.output())
        measured = compared.bind(model, number, *logits)
        own, other = cache[str(point)].astype(np.float64)
        moves, share = _moves(subspace, bases, other - own, strength)
        ends.append(measured.measure(logits))
        changes.append(measured.measure(_moved(model, pair, point, at, moves)) - ends[-1][0])
        shares.append(share)
    model.give_back(later=True)
    by_pair, (before, after) = np.array(changes), np.array(ends).T
    facts = (str(point), places, len(subspace), compared.metric.name, compared.about)
    return SubspaceEffect(*facts, by_pair[:, 0], by_pair[:, 1:].T, before, after, np.array(shares))


def _place(position: int, pair: int, length: int, read: int) -> int:
    """A position of a text, counted from its start; one behind the last that is read is refused."""
    place = position + length if -length <= position < 0 else position
    if read <= place < length:
        raise InputError(
            f"pair {pair}: position {position} is token {place}, behind token {read - 1}, whose logits are read: an "
            "interchange there changes nothing"
        )
    return place


def _moves(subspace: Subspace, bases: Sequence[Subspace], distance: Numbers, strength: float) -> tuple[Numbers, float]:
    """The moves [1 + placebos, positions, width] of an interchange and of placebos; its share of the distance."""
    move = subspace.coordinates(distance) @ subspace.vectors
    lengths = np.linalg.norm(move, axis=-1, keepdims=True)
    if not lengths.any():
        raise InterventionError("both prompts are equal within the subspace at these positions: nothing to interchange")
    moves = [move]
    for base in bases:
        random = base.coordinates(distance) @ base.vectors
        sizes = np.linalg.norm(random, axis=-1, keepdims=True)
        moves.append(random * np.divide(lengths, sizes, out=np.zeros_like(sizes), where=sizes > 0))
    return strength * np.stack(moves), float((move**2).sum() / (distance**2).sum())


def _moved(model: Runner, pair: Pair, point: HookPoint, positions: list[int], moves: Numbers) -> NDArray[Any]:
    """The logits where the metric reads, a row a move."""
    rows = rows_of(pair, [pair.base] * len(moves))
    spec = HookSpec().intervene(point, Intervention.Add(moves.astype(np.float32), positions=positions))
    return np.asarray(values_read(model.hooked, model.forward(rows, spec, logits=part_of(pair, model)).output()))
