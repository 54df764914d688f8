"""`dose_response`: the answers to prompts under a direction of several strengths, and the strength that flips them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.markup import escape

from mionnx.analysis.ablation import AblationResult
from mionnx.analysis.steering.calibration import Texts, one_list_each, positions_of, texts_of, vector_norms
from mionnx.analysis.steering.damage import Damage, check_guard, largest_within, losses_of, random_direction
from mionnx.analysis.steering.directions import Direction
from mionnx.bind.logit_selection import Logits
from mionnx.errors import InputError, InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.tokens import Tokens
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.decimals import decimal
from mionnx.machine.progress import shown
from mionnx.machine.ranges import index_within
from mionnx.machine.softmax import log_softmax
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.hook_cache import HookCache
from mionnx.run.prompt import each_of, token_of, token_text
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import warn_of_spellings
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.limits import Positions
from mionnx.view import Columns, Each, Lines, Series, Shown, Table, View, long_form, readable

STRENGTHS_BETWEEN = 15  # strengths tried at once between two others
FINEST = 1e-6  # of the largest strength: below, neighbouring ones are the same in float32
LETTERS = 64  # of a prompt in a legend
ROUNDING_KL = 1e-9  # nats of rounding
Row = tuple[int, float]  # a prompt's number and a strength
Bracket = tuple[int, float, float]  # a prompt's number, a strength before its answer flips, and one after
Target = str | int | Sequence[str | int] | None


@typed()
def dose_response(
    model: Runner,
    prompts: Texts,
    direction: Direction,
    strengths: ArrayLike,
    *,
    target: Target = None,
    positions: Positions | None = None,
    bisect: float | None = None,
    damage_texts: Texts | None = None,
    within: float = 0.1,
    progress: bool | None = None,
    batch_size: BatchSize = AUTO,
) -> DoseResponse:
    """Add a direction at several strengths and measure the answers.

    All strengths are rows of a few calls of one graph.

    Args:
        prompts: texts; the token after each is its answer.
        direction: the vector to add, `directions[layer]`.
        strengths: factors of it; 1 adds it as it is.
        target: the token whose probability is followed, as an id or as a text that is one token; one, or one for
            each prompt. If left out, the answer at the strength farthest from 0.
        positions: of the tokens that are steered; all if left out. A list for each prompt may be given.
        bisect: search for the strength at which the answer becomes the target, to within this, on both sides of 0,
            between the given strengths.
        damage_texts: neutral texts, whose mean loss is measured at each strength besides, and the same of a random
            direction of equal length: `DoseResponse.damage`.
        within: how much that loss may grow, nats a token, at the largest strength that counts as harmless.
        progress: see `patch_sweep`.
        batch_size: rows of one pass, a prompt at a strength each; "auto": as run well and fit into memory.

    Raises:
        InputError: no prompts or strengths, a target that is not one token, or logits that are no longer finite.
        HookError, InterventionError: a direction that does not fit the model.

    Example:
        directions = model.contrast("Germany is governed from", "France is governed from")
        dose = model.dose_response("The capital of France is", directions[2], [0, 0.5, 1, 2], target="Berlin")
        dose.probabilities[0], dose.flips[0]
    """
    texts, doses = texts_of("prompts", prompts), _doses(strengths)
    check_guard(model, damage_texts, within, positions)
    # All strengths are 0: any tolerance above 0 will do.
    finest: float = FINEST * float(np.abs(doses).max()) or FINEST
    if bisect is not None and not bisect >= finest:
        raise InputError(f"bisect={bisect!r}: strengths are float32, and tell {finest:.1g} apart at best")
    with shown(progress):
        trial = DoseTrial(model, [model.tokenize(text) for text in texts], direction, positions, batch_size)
        # Of two as far from 0 the positive one: targets are the answers in its direction.
        strongest = max(doses.tolist(), key=lambda dose: (abs(dose), dose))
        if target is None:
            targets = np.array(
                [logits.argmax() for logits in trial.logits([(i, strongest) for i in range(len(texts))])]
            )
        else:
            targets = np.array([token_of(model, one) for one in each_of(target, len(texts), "target")])
        warn_of_spellings(model, {"target": target}, trial.baseline)
        answers = trial.answers(doses, targets)
        baseline = trial.baseline.argmax(axis=1)
        # A prompt that the target answers without steering has nothing to flip.
        hit = (answers.top == targets[:, None]) & (baseline != targets)[:, None]
        flips = trial.flips([*brackets(doses, hit)], targets, bisect)
        tokens = sorted({*targets.tolist(), *baseline.tolist(), *answers.top.ravel().tolist()})
        names = {token: token_text(model, token) for token in tokens}
        damage = None if damage_texts is None else trial.damage(damage_texts, doses, targets, within)
        share = direction.norm / float(vector_norms(model, trial.texts, [direction.hook], positions, batch_size)[0])
    model.give_back(later=True)
    return DoseResponse(
        direction.hook, tuple(texts), doses, answers, targets, baseline, flips, bisect or 0.0, share, names, damage
    )


class DoseTrial:
    """One direction tried on prompts."""

    def __init__(
        self, model: Runner, texts: list[Tokens], direction: Direction, positions: Any, batch_size: BatchSize
    ) -> None:
        self.model, self.texts, self.direction = model, texts, direction
        self.positions, self.batch_size = positions, batch_size
        width = model.hooked.axes(HookPoint.parse(direction.hook))[-1]
        if direction.vector.shape != (width,):
            raise InterventionError(
                f"a direction of width {len(direction.vector)} at {direction.hook}, where the width is {width}"
            )
        self.baseline = np.stack([*self.logits([(i, 0.0) for i in range(len(texts))])])

    def logits(self, rows: Sequence[Row]) -> list[NDArray[Any]]:
        """[vocab] for each row: the logits of the last position."""
        strengths = np.array([strength for _, strength in rows], np.float32)
        at = self.positions
        if one_list_each(at):
            at = [positions_of(at, prompt, len(self.texts)) for prompt, _ in rows]
        value = strengths[:, None, None] * self.direction.vector
        spec = HookSpec().intervene(self.direction.hook, Intervention.Add(value, positions=at))
        texts = [self.texts[prompt] for prompt, _ in rows]

        def read(row: int, cache: HookCache) -> NDArray[Any]:
            logits = cache.output()[0, 0]
            if not np.isfinite(logits.astype(np.float64)).all():
                raise InputError(f"at strength {strengths[row]:g} the logits are no longer finite: steer less")
            return logits

        request = ListRequest(texts, spec, self.batch_size, logits=Logits(positions=-1))
        return map_rows(self.model, request, read, "steering")

    def answers(self, doses: NDArray[np.float64], targets: NDArray[np.int64]) -> Answers:
        """The answer of every prompt at every strength."""
        rows = [(prompt, float(dose)) for prompt in range(len(self.texts)) for dose in doses]
        measures = []
        for logits, (prompt, _) in zip(self.logits(rows), rows, strict=True):
            log_probs, top = log_softmax(logits.astype(np.float64)), int(logits.argmax())
            kl = AblationResult(self.baseline[prompt], logits).kl_divergence()
            measures.append((kl, np.exp(log_probs[targets[prompt]]), top, np.exp(log_probs[top])))
        columns = [np.array(column).reshape(len(self.texts), len(doses)) for column in zip(*measures, strict=True)]
        return Answers(*columns)

    def damage(self, texts: Texts, doses: NDArray[np.float64], targets: NDArray[np.int64], within: float) -> Damage:
        """The loss of neutral texts by strength, beside a random direction of equal length."""
        random = random_direction(self.direction)
        losses, others = (
            losses_of(self.model, texts, one, doses, self.positions, self.batch_size)
            for one in (self.direction, random)
        )
        trial = DoseTrial(self.model, self.texts, random, self.positions, self.batch_size)
        answers = trial.answers(doses, targets)
        return Damage(losses, within, largest_within(doses, losses, within), answers.probabilities, others)

    def flips(self, flipping: list[Bracket], targets: NDArray[np.int64], bisect: float | None) -> NDArray[np.float64]:
        """[prompts]: the strength nearest 0 at which the answer becomes the target."""
        while bisect is not None and any(abs(high - low) > bisect for _, low, high in flipping):
            flipping = self._narrower(flipping, targets, bisect)
        flips = np.full(len(self.texts), np.nan)
        for prompt, _, high in flipping:
            # `not <=`, since flips are NaN at first.
            if not abs(flips[prompt]) <= abs(high):
                flips[prompt] = high
        return flips

    def _narrower(self, flipping: list[Bracket], targets: NDArray[np.int64], bisect: float) -> list[Bracket]:
        # Sixteen parts at once rather than two: rows of one call cost less than calls.
        wide = [one for one in flipping if abs(one[2] - one[1]) > bisect]
        cuts = [np.linspace(low, high, STRENGTHS_BETWEEN + 2).tolist() for _, low, high in wide]
        rows = [(one[0], cut) for one, inner in zip(wide, cuts, strict=True) for cut in inner[1:-1]]
        hits = [logits.argmax() == targets[row[0]] for row, logits in zip(rows, self.logits(rows), strict=True)]
        narrow = [one for one in flipping if one not in wide]
        for n, (one, inner) in enumerate(zip(wide, cuts, strict=True)):
            # The upper end of a bracket is a hit already, so it needs no run.
            first = [*hits[n * STRENGTHS_BETWEEN : (n + 1) * STRENGTHS_BETWEEN], True].index(True)
            narrow.append((one[0], inner[first], inner[first + 1]))
        return narrow


def brackets(strengths: NDArray[np.float64], hit: NDArray[np.bool_]) -> Iterator[Bracket]:
    """Each prompt's first strength with a `hit`, [prompts, strengths], on either side of 0, and the one before it."""
    for sign in (1, -1):
        side = np.flatnonzero(strengths * sign > 0)
        outward = side[np.argsort(strengths[side] * sign)]
        for prompt, hits in enumerate(hit[:, outward]):
            if hits.any():
                first = int(hits.argmax())
                # On each side the search begins at 0, where the answer is the baseline.
                yield prompt, float(strengths[outward[first - 1]]) if first else 0.0, float(strengths[outward[first]])


def _doses(strengths: ArrayLike) -> NDArray[np.float64]:
    try:
        doses = np.unique(np.asarray(to_array(strengths), np.float64))  # sorted, each once
    except (TypeError, ValueError) as error:
        raise InputError(f"strengths must be numbers: {error}") from error
    if doses.size == 0 or not np.isfinite(doses).all():
        raise InputError(f"strengths must be one or more finite numbers, got {strengths!r}")
    return doses


@dataclass(frozen=True, repr=False)
class Answers(Brief, Storable):
    """The answers to prompts at some strengths; arrays are [prompts, strengths]."""

    kl: NDArray[np.float64]  # KL divergence (without || with), in nats
    probabilities: NDArray[np.float64]  # the target's
    # top, top_probabilities: the most probable token, and its probability.
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
        damage: what it does to neutral texts, where there were some.
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
    damage: Damage | None = None
    INSIDE: ClassVar = (Answers, Damage)

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
        if self.damage is not None:
            yield f"harmless to {self.damage.within:g} nats up to strength {spelled(self.damage.largest)}"

    def turn(self, index: int = 0) -> str:
        """The strength that makes the target the top token, in words."""
        index = index_within("prompt", index, len(self.prompts))
        if self.baseline[index] == self.targets[index]:
            return "without steering already"
        flip = self.flips[index]
        return f"from strength {spelled(float(flip))}" if np.isfinite(flip) else "at none of these strengths"

    def to_dict(self) -> dict[str, Any]:
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
        damage = {} if self.damage is None else {"damage": vars(self.damage)}
        return {**facts, "prompts": rows, **damage}

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
        if self.damage is not None:
            both = {"this direction": self.damage.losses, "a random one of its length": self.damage.random_losses}
            series = [Series(name, values) for name, values in both.items()]
            title = "growth of the loss of neutral texts (nats)"
            curves.append(Lines(self.strengths, series, "strength", title, levels={"bound": self.damage.within}))
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
        # The end of a long prompt stays, since the answer follows it.
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
