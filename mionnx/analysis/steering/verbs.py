"""`Steering`: the verbs of a model that make directions and try them out."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax

from mionnx.analysis.ablation import AblationResult
from mionnx.analysis.steering.calibration import SteeringCalibration
from mionnx.analysis.steering.contrast import directions as directions_of
from mionnx.analysis.steering.contrast import separation
from mionnx.analysis.steering.directions import (
    STREAM,
    Direction,
    Directions,
    template_of,
)
from mionnx.analysis.steering.dose import (
    Answers,
    Bracket,
    DoseResponse,
    brackets,
)
from mionnx.bind.logit_selection import Logits
from mionnx.errors import InputError, InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.tokens import Tokens
from mionnx.machine.progress import Progress, silent
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.limits import Positions

ROWS = 32  # of one call
CUTS = 15  # strengths tried at once between two others
FINEST = 1e-6  # of the largest strength: below, neighbouring ones are the same in float32
Texts = str | Sequence[str]
Row = tuple[int, float]  # which prompt, and at which strength
Target = str | int | Sequence[str | int] | None


class Steering(Runner):
    """Directions from contrasting prompts, and what they do to answers."""

    def contrast(
        self,
        positive: Texts,
        negative: Texts,
        hook: str = STREAM,
        *,
        layers: Sequence[int] | None = None,
        positions: int | Sequence[int] = -1,
        method: str = "mean_difference",
        progress: Progress = silent,
    ) -> Directions:
        """The direction in which positive prompts differ from negative ones, in every layer.

        Args:
            positive, negative: prompts; the n-th of the one and of the other are a pair.
            hook: a kind of hook point with one vector a token: "resid_post", "hook_mlp_out", ...
            layers: all if left out.
            positions: the tokens that are compared, negative ones from the end; of several, their mean.
            method: "mean_difference", or "pca": the axis along which the pairs' differences are largest, as long as
                their mean along it.
            progress: called as (stage, done, total).

        Returns:
            one vector a layer; strength 1 is what the pairs differ by.

        Raises:
            InputError: no prompts, or not as many on both sides.
            HookError, InterventionError: no such hook point, layer or position; prompts that do not differ there.
        """
        sides = [_texts("positive", positive), _texts("negative", negative)]
        if len(sides[0]) != len(sides[1]):
            raise InputError(f"{len(sides[0])} positive and {len(sides[1])} negative prompts make no pairs")
        chosen = tuple(range(self.num_layers)) if layers is None else tuple(sorted({*layers}))
        short, template = template_of(hook)
        points = [template.format(i=layer) for layer in chosen]
        at = [positions] if isinstance(positions, int | np.integer) else [*positions]
        stacked = self._activations([*sides[0], *sides[1]], points, at, progress)
        plus, minus = np.split(stacked, 2, axis=1)
        vectors = directions_of(plus, minus, method, chosen)
        found = separation(plus, minus, vectors, method)
        return Directions(vectors, chosen, short, method, len(sides[0]), found)

    def _activations(
        self, texts: Sequence[str], points: Sequence[str], positions: list[int], progress: Progress
    ) -> NDArray[np.float64]:
        """[layers, texts, width]: the mean over the positions."""
        spec = HookSpec()
        for point in points:
            spec.capture(point, positions=positions)
        parts = []
        for first in range(0, len(texts), ROWS):
            progress("capturing", first, len(texts))
            cache = self.forward(texts[first : first + ROWS], spec, logits=False)
            parts.append(np.stack([cache[point].astype(np.float64).mean(axis=1) for point in points]))
        progress("capturing", len(texts), len(texts))
        return np.concatenate(parts, axis=1)

    def calibrate(
        self, directions: Directions, prompts: Texts, positions: int | str | Sequence[int] | None = None
    ) -> SteeringCalibration:
        """Measure how long the stream is where directions are added, over prompts.

        Args:
            directions: the directions.
            prompts: texts.
            positions: the tokens that are measured, negative ones from each text's end; all if left out, or "prompt".

        Raises:
            InputError: no prompts, or positions that are neither "prompt" nor integers.
            InterventionError: a position that a prompt does not have.
        """
        points = [directions.point(layer) for layer in directions.layers]
        texts = [self.tokenize(text) for text in _texts("prompts", prompts)]
        norms = self._vector_norms(texts, points, _integers(positions))
        return SteeringCalibration(directions.hook, directions.layers, norms, directions.norms.astype(np.float64))

    def _vector_norms(self, texts: Sequence[Tokens], points: Sequence[str], positions: Any) -> NDArray[np.float64]:
        """[points]: the mean length of the values at the chosen tokens."""
        found = []
        for row, tokens in enumerate(texts):
            here, spec = _of_row(positions, row, len(texts)), HookSpec()
            for point in points:
                spec.capture(point, positions=None if isinstance(here, str) else here)
            cache = self.forward(tokens, spec, logits=False)
            found.append([np.linalg.norm(cache[point][0].astype(np.float64), axis=-1) for point in points])
        return np.concatenate(found, axis=1).mean(axis=1)

    def dose_response(
        self,
        prompts: Texts,
        direction: Direction,
        strengths: ArrayLike,
        *,
        target: Target = None,
        positions: Positions | None = None,
        bisect: float | None = None,
        progress: Progress = silent,
    ) -> DoseResponse:
        """Add a direction at several strengths, and see what becomes of the answers.

        All strengths are rows of a few calls of one graph.

        Args:
            prompts: texts; the token after each is its answer.
            direction: what is added, `directions[layer]`.
            strengths: factors of it; 1 adds it as it is.
            target: the token whose probability is followed, as an id or as a text that is one token; one, or one for
                each prompt. If left out, what the strength farthest from 0 answers.
            positions: of the tokens that are steered; all if left out. A list for each prompt may be given.
            bisect: look for the strength at which the answer becomes the target more closely than at the strengths
                given, to within this, on both sides of 0.
            progress: called as (stage, done, total).

        Raises:
            InputError: no prompts or strengths, a target that is not one token, or logits that are no longer finite.
            HookError, InterventionError: a direction that does not fit the model.
        """
        texts, doses = _texts("prompts", prompts), _doses(strengths)
        finest: float = FINEST * float(np.abs(doses).max()) or FINEST
        if bisect is not None and not bisect >= finest:
            raise InputError(f"bisect={bisect!r}: strengths are float32, and tell {finest:.1g} apart at best")
        trial = _Trial(self, [self.tokenize(text) for text in texts], direction, positions, progress)
        strongest = max(doses.tolist(), key=lambda dose: (abs(dose), dose))
        targets = self._targets(target, len(texts))
        if targets is None:
            targets = np.array(
                [logits.argmax() for logits in trial.logits([(i, strongest) for i in range(len(texts))])]
            )
        answers = trial.answers(doses, targets)
        baseline = trial.baseline.argmax(axis=1)
        hit = (answers.top == targets[:, None]) & (baseline != targets)[:, None]
        flips = trial.flips([*brackets(doses, hit)], targets, bisect)
        tokens = sorted({*targets.tolist(), *baseline.tolist(), *answers.top.ravel().tolist()})
        names = {token: self.tokenizer.decode([token], skip_special_tokens=False) for token in tokens}
        share = direction.norm / float(self._vector_norms(trial.texts, [direction.hook], positions)[0])
        return DoseResponse(
            direction.hook, tuple(texts), doses, answers, targets, baseline, flips, bisect or 0.0, share, names
        )

    def _targets(self, target: Target, count: int) -> NDArray[np.int64] | None:
        if target is None:
            return None
        given = [target] * count if isinstance(target, str | int | np.integer) else [*target]
        if len(given) != count:
            raise InputError(f"{len(given)} targets for {count} prompts")
        return np.array([self.token_id(one) if isinstance(one, str) else self._known(int(one)) for one in given])


class _Trial:
    """One direction tried on prompts."""

    def __init__(
        self, model: Runner, texts: list[Tokens], direction: Direction, positions: Any, progress: Progress
    ) -> None:
        self.model, self.texts, self.direction = model, texts, direction
        self.positions, self.progress = positions, progress
        width = model.hooked.axes(HookPoint.parse(direction.hook))[-1]
        if direction.vector.shape != (width,):
            raise InterventionError(
                f"a direction of width {len(direction.vector)} at {direction.hook}, where the width is {width}"
            )
        self.baseline = np.stack([*self.logits([(i, 0.0) for i in range(len(texts))])])

    def logits(self, rows: Sequence[Row]) -> Iterator[NDArray[Any]]:
        """[vocab] for each row: the logits of the last position."""
        for first in range(0, len(rows), ROWS):
            self.progress("steering", first, len(rows))
            here = rows[first : first + ROWS]
            strengths = np.array([strength for _, strength in here], np.float32)
            value = strengths[:, None, None] * self.direction.vector
            at = self.positions
            if _nested(at):
                at = [_of_row(at, prompt, len(self.texts)) for prompt, _ in here]
            spec = HookSpec().intervene(self.direction.hook, Intervention.Add(value, positions=at))
            texts = [self.texts[prompt] for prompt, _ in here]
            found = self.model.forward(texts, spec, logits=Logits(positions=-1)).output()[:, 0]
            _refuse_unbounded(found, strengths)
            yield from found
        self.progress("steering", len(rows), len(rows))

    def answers(self, doses: NDArray[np.float64], targets: NDArray[np.int64]) -> Answers:
        """What every prompt is continued with at every strength."""
        rows = [(prompt, float(dose)) for prompt in range(len(self.texts)) for dose in doses]
        found = [
            self._measured(logits, prompt, int(targets[prompt]))
            for logits, (prompt, _) in zip(self.logits(rows), rows, strict=True)
        ]
        columns = [np.array(column).reshape(len(self.texts), len(doses)) for column in zip(*found, strict=True)]
        return Answers(*columns)

    def _measured(self, logits: NDArray[Any], prompt: int, target: int) -> tuple[float, float, int, float]:
        chances, top = log_softmax(logits.astype(np.float64)), int(logits.argmax())
        kl = AblationResult(self.baseline[prompt], logits).kl_divergence()
        return kl, float(np.exp(chances[target])), top, float(np.exp(chances[top]))

    def flips(self, found: list[Bracket], targets: NDArray[np.int64], bisect: float | None) -> NDArray[np.float64]:
        """[prompts]: the strength from which the answer is the target, of those in a prompt's brackets nearest 0."""
        while bisect is not None and any(abs(high - low) > bisect for _, low, high in found):
            found = self._narrower(found, targets, bisect)
        flips = np.full(len(self.texts), np.nan)
        for prompt, _, high in found:
            if not abs(flips[prompt]) <= abs(high):
                flips[prompt] = high
        return flips

    def _narrower(self, found: list[Bracket], targets: NDArray[np.int64], bisect: float) -> list[Bracket]:
        wide = [one for one in found if abs(one[2] - one[1]) > bisect]
        cuts = [np.linspace(low, high, CUTS + 2).tolist() for _, low, high in wide]
        rows = [(one[0], cut) for one, inner in zip(wide, cuts, strict=True) for cut in inner[1:-1]]
        hits = [logits.argmax() == targets[row[0]] for row, logits in zip(rows, self.logits(rows), strict=True)]
        narrow = [one for one in found if one not in wide]
        for n, (one, inner) in enumerate(zip(wide, cuts, strict=True)):
            first = [*hits[n * CUTS : (n + 1) * CUTS], True].index(True)
            narrow.append((one[0], inner[first], inner[first + 1]))
        return narrow


def _refuse_unbounded(logits: NDArray[Any], strengths: NDArray[Any]) -> None:
    bad = ~np.isfinite(logits.astype(np.float64)).all(axis=1)
    if bad.any():
        raise InputError(f"at strength {strengths[bad][0]:g} the logits are no longer finite: steer less")


def _nested(positions: Any) -> bool:
    plain = isinstance(positions, str | int | np.integer) or positions is None
    return not plain and not all(isinstance(one, int | np.integer) for one in positions)


def _integers(positions: Any) -> list[int] | None:
    """The positions of every text; None for all of them."""
    if positions is None or (isinstance(positions, str) and positions == "prompt"):
        return None
    given = [positions] if isinstance(positions, int | np.integer) else positions
    if not isinstance(given, Sequence | np.ndarray) or not all(isinstance(one, int | np.integer) for one in given):
        raise InputError(f'positions are integers, or "prompt" or None for all tokens, got {positions!r}')
    return [int(one) for one in given]


def _of_row(positions: Any, row: int, count: int) -> Any:
    """The positions of one of the prompts."""
    if not _nested(positions):
        return positions
    if len(positions) != count:
        raise InputError(f"positions for {len(positions)} prompts, and there are {count}")
    return list(positions[row])


def _texts(what: str, given: Texts) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{what} must be one or more texts, got {given!r}")
    return texts


def _doses(strengths: ArrayLike) -> NDArray[np.float64]:
    try:
        doses = np.unique(np.asarray(strengths, np.float64))
    except (TypeError, ValueError) as error:
        raise InputError(f"strengths must be numbers: {error}") from error
    if doses.size == 0 or not np.isfinite(doses).all():
        raise InputError(f"strengths must be one or more finite numbers, got {strengths!r}")
    return doses
