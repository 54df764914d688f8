"""`integrated_gradients` and `gradient_times_input`: what each token carries of a metric.

Integrated gradients (Sundararajan, Taly and Yan 2017, arXiv:1703.01365): of a value x and a baseline b at a hook point,

    score = (x - b) * mean over alpha of d metric / d value at b + alpha (x - b),   alpha = (i + 1/2) / steps

summed over all axes but the positions. The scores sum to metric(x) - metric(b) as the steps become many; the difference
is the completeness gap. Gradient x input is x * d metric / d value at x.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.gradients.gradients import copy_of, gradients, metric_name, vectors_of
from mionnx.analysis.sweep.metric import MetricRequest
from mionnx.bind.logit_selection import Logits
from mionnx.errors import GradientError, HookError, InputError
from mionnx.graph.axes import sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.prompt_list import read_prompts
from mionnx.inputs.token_batch import Place
from mionnx.inputs.token_rows import IDS, TYPES
from mionnx.machine.arrays import to_array
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.progress import shown
from mionnx.machine.ranges import at_least, at_most, index_within
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed
from mionnx.run.batching import AUTO, BatchSize, batches_of, check_batch_size
from mionnx.run.hook_cache import HookCache
from mionnx.run.metric_place import values_read
from mionnx.run.prompt import Ids, each_of, one_prompt, token_of, token_text, typed_prompts
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt, takes_encoding
from mionnx.spec.hook_choice import Hook
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.metric import OF_VECTORS, READS
from mionnx.view import Columns, Shown, Text, View, readable

MOST_STEPS = 10_000  # of a path; a few tens do
OF_SALIENCY = tuple(name for name in READS if name not in ("kl", "cotangent"))
Values = NDArray[np.float32]


@takes_encoding
@typed()
def integrated_gradients(
    model: Runner,
    tokens: Prompt,
    baseline: ArrayLike | str = "mean",
    hook: Hook = "hook_embed",
    metric: str | None = None,
    answer: Any = None,
    versus: Any = None,
    hooks: HookSpec | None = None,
    *,
    steps: int = 50,
    position: Place | None = None,
    batch_size: BatchSize = AUTO,
) -> Saliency:
    """Attribute a metric to the tokens of texts by gradients along a path from a baseline.

    Args:
        tokens: one text or several; the rows of a padded batch are texts of their own.
        baseline: the value at the hook point that counts as nothing: "mean", that over a text's own positions, "zero",
            another text of as many tokens, or an array of fractions that broadcasts to the value. A norm is singular at
            zero: of models that norm their embeddings, a path from "zero" needs many more steps.
        hook: the hook point whose values are attributed; it has positions.
        metric: "logit" (if nothing is said), "logit_diff", "log_probability", "probability" or "loss"; of an embedding
            model "cosine" (if nothing is said) or "dot" with `versus`; of a span head "span".
        answer, versus: tokens or labels, as numbers or texts, one for all texts or one a text; the answer is the most
            probable one if left out. Of a cosine, versus is a text or an embedding; of a span, answer is a part of the
            text, or (first, last) of its tokens.
        hooks: interventions; the metric and its gradients are those of the model so changed.
        steps: points of the path.
        position: of each text, at which the logits are read; if left out the last, or the one "mask". "loss" reads all.
        batch_size: points of a text's path in one pass; "auto": as many as run well; None: all. Texts never share a
            pass.

    Returns:
        scores of each token of each text; their sum is the change of the metric from baseline to text, up to `gap`.

    Raises:
        GradientError: a metric that has no gradient or needs an array.
        HookError: a hook point without positions.
        InputError: a baseline of another length or shape, or no steps.

    Example:
        result = model.integrated_gradients("The capital of France is", answer=" Paris", steps=20)
        result.scores(), result.gap
    """
    at_least("steps", steps, 1)
    at_most("steps", steps, MOST_STEPS)
    check_batch_size(batch_size)
    metric = _usual(model, metric)
    point, spec = _checked(hook, metric), copy_of(hooks)
    spec.captures = []
    texts, results = typed_prompts(model, tokens), []
    if metric in OF_VECTORS:
        versus = [*np.broadcast_to(vectors_of(model, versus), (len(texts), model.hooked.metadata.columns))]
    if metric == "span":
        answer = MetricRequest("span", answer).resolved(model, tokens, len(texts)).answer
    answers, others = each_of(answer, len(texts), "answer"), each_of(versus, len(texts), "versus")
    with shown() as show:
        for n, row in enumerate(texts):
            show("integrated gradients", n, len(texts))
            request = {"metric": metric, "position": position, "answer": answers[n], "versus": others[n]}
            results.append(_integrated(model, row, point, spec, request, baseline, steps, batch_size))
    return Saliency("integrated gradients", point.name, metric, tuple(results), steps)


@takes_encoding
@typed()
def gradient_times_input(
    model: Runner,
    tokens: Prompt,
    hook: Hook = "hook_embed",
    metric: str | None = None,
    answer: Any = None,
    versus: Any = None,
    hooks: HookSpec | None = None,
    *,
    position: Place | None = None,
    batch_size: BatchSize = AUTO,
) -> Saliency:
    """Attribute a metric to tokens by the gradient times the value, in one pass a text.

    Args:
        tokens, hook, metric, answer, versus, hooks, position: as for `integrated_gradients`.
        batch_size: as for `forward`.

    Raises:
        GradientError, HookError: as there.

    Example:
        model.gradient_times_input("The capital of France is", answer=" Paris").scores()  # [seq]
    """
    metric = _usual(model, metric)
    point, spec = _checked(hook, metric), copy_of(hooks)
    spec.captures = []
    prompts = read_prompts(model.ids(tokens), None, None, model.hooked)
    texts, rows = prompts.ids, [prompts.row(n) for n in range(len(prompts))]
    if metric in OF_VECTORS:
        versus = [*np.broadcast_to(vectors_of(model, versus), (len(texts), model.hooked.metadata.columns))]
    if metric == "span":
        answer = MetricRequest("span", answer).resolved(model, tokens, len(texts)).answer
    sides = ((answer, "answer"), (versus, "versus"))
    answers, others = (None if side is None else each_of(side, len(texts), name) for side, name in sides)
    spec.capture(point)
    other = np.stack(others) if metric in OF_VECTORS and others is not None else others
    cache = gradients(model, rows, point, metric, answers, other, spec, position=position, batch_size=batch_size)
    grad, numbers = _gradient(cache, point)
    scores = _by_position(grad * cache[point.name], point)
    each = zip(texts, scores, numbers, strict=True)
    # Rows are padded on one side, those of an encoder on the right.
    results = [
        SalientText(_words(model, ids), score[: len(ids)] if model.bidirectional else score[-len(ids) :], float(number))
        for ids, score, number in each
    ]
    return Saliency("gradient x input", point.name, metric, tuple(results))


def _usual(model: Runner, metric: str | None) -> str:
    """The metric that is meant where none is said."""
    return metric or ("cosine" if model.hooked.metadata.head == "embedding" else "logit")


def _checked(hook: Hook, metric: str) -> HookPoint:
    if metric != "span" and metric_name(metric) not in OF_SALIENCY:
        raise GradientError(f"metric {metric!r} needs an array; tokens are attributed by {', '.join(OF_SALIENCY)}")
    point = HookPoint.parse(hook)
    if "seq" not in (point.axes or ()):
        raise HookError(f"{point} has the axes {list(point.axes or ())}: there are no tokens to attribute to")
    return point


def _integrated(
    model: Runner,
    row: tuple[Ids, Ids | None],
    point: HookPoint,
    spec: HookSpec,
    request: dict[str, Any],
    baseline: ArrayLike | str,
    steps: int,
    batch_size: BatchSize,
) -> SalientText:
    (ids, types), capture = row, HookSpec().extend(spec).capture(point)
    first = gradients(model, _repeated(ids, types, 1), point, hooks=capture, **request)
    value = first[point.name]
    start = _baseline(model, baseline, value, ids, point, capture)
    if request["answer"] is None and "answer" in READS.get(request["metric"], ()):
        # The answer of the text itself all along the path: the top token may change on the way.
        request = {**request, "answer": int(values_read(model.hooked, first.output())[0].argmax())}
    if request["metric"] not in (*OF_VECTORS, "span") and not model.hooked.metadata.labels:
        # As ids: the first pass has looked at their spelling.
        request |= {name: token_of(model, request[name]) for name in ("answer", "versus") if request[name] is not None}

    def along(alphas: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        """Gradients [alphas, ...] and metrics [alphas] at points of the path, one a row."""
        shares = alphas.astype(np.float32).reshape(-1, *[1] * (value.ndim - 1))
        path = HookSpec().extend(spec).intervene(point, Intervention.Replace(start + shares * (value - start)))
        rows = _repeated(ids, types, len(alphas))
        return _gradient(gradients(model, rows, point, hooks=path, **request), point)

    # At the middles of the steps: the midpoint rule's error falls with the square of their number.
    total, middles = np.zeros(value.shape[1:], np.float64), (np.arange(steps) + 0.5) / steps
    for points in batches_of([len(ids)] * steps, steps if batch_size is None else batch_size):
        total += along(middles[points])[0].sum(axis=0)
    # At 0 of the path: the metric of the baseline, which the scores' sum is compared with.
    _, (from_, *_) = along(np.zeros(1))
    scores = _by_position(((value[0] - start[0]).astype(np.float64) * total / steps)[None], point)[0]
    return SalientText(_words(model, ids), scores, float(_gradient(first, point)[1][0]), float(from_))


def _repeated(ids: Ids, types: Ids | None, count: int) -> Any:
    """One text as several rows."""
    rows = np.repeat(ids[None], count, axis=0)
    return rows if types is None else {IDS: rows, TYPES: np.repeat(types[None], count, axis=0)}


def _gradient(cache: HookCache, point: HookPoint) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """The gradient by a hook point's value, and the metric [batch]."""
    return cast(HookCache, cache.grad)[point.name].astype(np.float64), cast(NDArray[np.float32], cache.metric)


def _baseline(
    model: Runner, baseline: ArrayLike | str, value: Values, ids: Ids, point: HookPoint, capture: HookSpec
) -> Values:
    """The value that counts as nothing, in the shape of the text's own."""
    if isinstance(baseline, str) and baseline == "zero":
        return np.zeros_like(value)
    if isinstance(baseline, str) and baseline == "mean":
        axis = sequence_axis(point.axes or ())
        return np.broadcast_to(value.mean(axis=axis, keepdims=True), value.shape)
    try:
        array = None if isinstance(baseline, str) else to_array(baseline)
    except ValueError as error:
        raise InputError(f"the baseline is no array: {error}") from error
    if array is not None and array.dtype.kind not in "fiub":
        raise InputError(f"the baseline holds {array.dtype}, it must hold numbers")
    # Integers are another text's ids, fractions are the value itself.
    if array is None or array.dtype.kind in "iu":
        other = one_prompt(model, baseline if array is None else array)
        if len(other) != len(ids):
            raise InputError(f"the baseline has {len(other)} tokens, the text {len(ids)}: positions must correspond")
        return model.forward(other[None], capture, logits=Logits(positions=-1))[point.name]
    try:
        return np.broadcast_to(array.astype(value.dtype), value.shape)
    except ValueError:
        raise InputError(
            f"baseline {list(array.shape)} does not broadcast to the value {list(value.shape)} at {point}"
        ) from None


def _by_position(products: NDArray[Any], point: HookPoint) -> NDArray[np.float64]:
    """[batch, seq]: a value's products, summed over all axes but batch and positions."""
    axis = sequence_axis(point.axes or ())
    return products.astype(np.float64).sum(axis=tuple(i for i in range(products.ndim) if i not in (0, axis)))


def _words(model: Runner, ids: Ids) -> tuple[str, ...]:
    return tuple(token_text(model, int(token)) for token in ids)


@dataclass(frozen=True, repr=False)
class SalientText(Brief, Storable):
    """One text of a `Saliency`.

    Attributes:
        tokens, scores: [seq], the text of each token, and what it carries of the metric, float64.
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
        names = ("tokens", "scores", "metric", "baseline", "gap")
        texts = [{name: getattr(one, name) for name in names} for one in self.texts]
        return {"method": self.method, "hook": self.hook, "metric": self.metric, "steps": self.steps, "texts": texts}

    def view(self) -> View:
        """The texts, each token coloured by its score."""
        # A scale of colours has a length, also where all scores are 0.
        limit = max(1e-12, *(float(np.abs(one.scores).max()) for one in self.texts))
        panels = [self._panel(number, one, limit) for number, one in enumerate(self.texts, 1)]
        meaning = f"Each token is coloured by its share of {self.metric} at {self.hook}: red raises it, blue lowers it."
        path = (
            "The shares of a text sum to the change from the baseline, up to the gap that the path of "
            f"{self.steps} steps leaves."
        )
        plain = (
            "A share is the gradient times the value: what the metric would lose, to first order, with that value at "
            "zero."
        )
        meaning = f"{meaning} {path if self.steps else plain}"
        return View(f"{self.method} of {self.metric}", panels, about=self.hook, meaning=meaning)

    def _panel(self, number: int, one: SalientText, limit: float) -> Text:
        facts = f"{self.metric} {readable(one.metric)}"
        if one.baseline is not None:
            facts += f", baseline {readable(one.baseline)}, gap {readable(one.gap)}"
        heading = f"Text {number}" if len(self.texts) > 1 else "Text"
        unit, legend = f"share of {self.metric}", number == len(self.texts)
        return Text(one.tokens, [one.scores], limit, facts=[facts], unit=unit, legend=legend, heading=heading)

    def _columns(self) -> Columns:
        rows = [
            (number, position, token, score)
            for number, one in enumerate(self.texts)
            for position, (token, score) in enumerate(zip(one.tokens, one.scores.tolist(), strict=True))
        ]
        return dict(zip(("text", "position", "token", "score"), zip(*rows, strict=True), strict=True))
