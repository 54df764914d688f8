"""`gradients`: the gradients of a metric at hook points, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.sweep.metric import MetricRequest
from mionnx.bind.logit_selection import Logits
from mionnx.errors import GradientError
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import Place, make_token_batch
from mionnx.machine.arrays import to_array
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import Outputs
from mionnx.run.batching import AUTO, BatchSize
from mionnx.run.embedding import vector_of
from mionnx.run.hook_cache import HookCache
from mionnx.run.metric_place import part_read, values_read
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt, takes_encoding
from mionnx.spec.hook_choice import Hook, Hooks
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import OF_VECTORS, READS, READS_ALL, Answers, check_metric

Seed = Callable[[NDArray[Any]], ArrayLike]


@takes_encoding
@typed()
def gradients(
    model: Runner,
    tokens: Prompt,
    points: Hooks,
    metric: str | Callable[..., Any] | None = None,
    answer: Answers = None,
    versus: Any = None,
    hooks: HookSpec | None = None,
    *,
    position: Place | None = None,
    reference: ArrayLike | None = None,
    cotangent: ArrayLike | Seed | None = None,
    of: Hook | None = None,
    attention_mask: ArrayLike | None = None,
    rules: str = "gradient",
    batch_size: BatchSize = AUTO,
) -> HookCache:
    """Compute the gradients of a metric with respect to the values at hook points, in one pass.

    Args:
        tokens: as for `forward`; the metric is computed for each row of a batch, and padding counts for nothing.
        points: hook points, their names, globs, functions of the name, or a list of these. A glob or function means the
            hook points that can have a gradient.
        metric: "logit", "logit_diff", "log_probability" and "probability" of the answer, "kl" from a reference, "loss",
            the mean of the negative log-probabilities of a row's own next tokens; of an embedding model "cosine" and
            "dot" with a reference; or a function of those logits that gives [batch], for which `cotangent` has to be
            given. "logit" (of an embedding model "cosine") if nothing else is.
        answer: the token, as an id or a text, or the label of a class or tag; one for all rows or one a row; the most
            probable one if left out. Of "loss", which a masked language model has too, the tokens that masks hide: one
            for all, or of each row one, or a list with one for each of its masks.
        versus: the token or label that "logit_diff" compares the answer with; of "cosine" and "dot" a text, whose
            embedding is meant, or an embedding [d] or [batch, d].
        hooks: captures and interventions of the pass; gradients are those of the model so changed.
        position: of each row's own text, at which the logits are read; the last if left out, of a masked language model
            the one "mask". "loss", and a cotangent for every logit, read all.
        reference: of "kl", the logits of the distribution that is compared with, [vocab] or [batch, vocab].
        cotangent: the derivative of a metric of one's own by the logits, [vocab], [batch, vocab], or [batch, seq,
            vocab] for all of them, or a function of the logits [batch, vocab] that gives it. With `of`, of the value
            there.
        of: a hook point whose value, times `cotangent`, is differentiated in the place of the logits: a recurrent
            state, or the input of one head. The cache has the value.
        attention_mask: as for `forward`.
        rules: "gradient", the derivatives, or propagation rules in their place, see `HookSpec.set_metric`.
        batch_size: as for `forward`; batches do not take a cotangent for every position.

    Returns:
        a cache: `grad` with the gradients, in the shapes of the values; `metric`, [batch]; `output()`, the logits that
        the metric reads, [batch, 1, vocab], of every position for "loss" and a cotangent for all; the captures of
        `hooks`.

    Raises:
        GradientError: a metric without a gradient (a rank, a function without `cotangent`), one that does not depend on
            a hook point, an argument that nothing would read, or an operator without a rule between them.
        InputError, HookError, InterventionError: as for `forward`.

    Example:
        cache = model.gradients("The capital of France is", "blocks.*.attn.hook_z", answer=" Paris")
        cache.grad["z", 3].shape  # (1, seq, n_heads, head_dim)
    """
    spec, hooked = copy_of(hooks), model.hooked
    if hooked.metadata.head == "embedding" and metric is None and cotangent is None:
        metric = "cosine"
    if metric in OF_VECTORS and versus is not None:
        reference, versus = vectors_of(model, versus), None

    def run(spec: HookSpec | None, logits: bool | Logits) -> HookCache:
        return model.forward(tokens, spec, logits=logits, attention_mask=attention_mask, batch_size=batch_size)

    read: dict[str, Any] = {"answer": answer, "versus": versus, "reference": reference}
    if metric == "span":
        cotangent, metric, read["answer"] = one_hot_ends(model, tokens, answer), None, None
    if of is not None:
        _refuse_unread(f"of={of}", metric=metric, position=position, **read)
        return _of_value(model, run, spec, points, HookPoint.parse(of), cotangent, rules)
    if cotangent is not None:
        _refuse_unread("cotangent=", metric=None if callable(metric) else metric, **read)
    name = "cotangent" if cotangent is not None else metric_name("logit" if metric is None else metric)
    reads_all = name in READS_ALL or np.ndim(0 if cotangent is None or callable(cotangent) else cotangent) == 3
    last, spec = Logits() if reads_all else part_read(hooked, position), spec.gradient(points)
    position = position if reads_all or last.positions is None else last.positions_[0]
    top = read["answer"] is None and "answer" in READS[name]
    if callable(cotangent) or top:
        # A first pass tells the top token, or the logits that the cotangent is made of. Before it the request is bound
        # with a number in the place of what is not known, so that a wrong one is refused at once.
        trial = {
            **read,
            "answer": 0 if top else read["answer"],
            "cotangent": np.ones(1) if callable(cotangent) else cotangent,
        }
        model.binder.bind(spec.set_metric(name, position=position, rules=rules, **trial), differentiated=True)
        logits = values_read(hooked, run(hooks, logits=last).output())
        cotangent = cast(Seed, cotangent)(logits) if callable(cotangent) else cotangent
        read["answer"] = logits.argmax(axis=-1).tolist() if top else read["answer"]
    read["cotangent"] = None if cotangent is None else np.asarray(cotangent)
    spec.set_metric(name, position=position, rules=rules, **read)
    cache = run(spec, logits=last)
    if callable(metric):  # the graph's own number is that of the cotangent
        own = cache.output() if reads_all else values_read(hooked, cache.output())
        cache.metric = MetricRequest(metric).bind(model, 0, 1, own, None)(own).astype(np.float32)
    return cache


def vectors_of(model: Runner, versus: Any) -> NDArray[Any]:
    """An embedding [d] or [batch, d], or those of texts."""
    if isinstance(versus, str):
        return vector_of(model, versus)
    if isinstance(versus, list | tuple) and versus and all(isinstance(text, str) for text in versus):
        return np.stack([vector_of(model, text) for text in versus])
    return to_array(versus)


def one_hot_ends(model: Runner, tokens: Prompt, answer: Any) -> NDArray[np.float32]:
    """[batch, seq, 2]: 1 at the start and the end of a span, which add up its two logits."""
    if model.hooked.metadata.head != "span":
        raise GradientError(f"metric 'span' reads a span head, and {model.hooked.name} has another")
    batch = make_token_batch(model.ids(tokens), None, None, model.hooked)
    request = MetricRequest("span", answer).resolved(model, tokens, batch.batch)
    seed = np.zeros((batch.batch, batch.seq, 2), np.float32)
    for row, (first, last) in enumerate(request.answer):
        for end, place in enumerate((first, last)):
            try:
                seed[row, batch.column_of[row][batch.absolute(place, row)], end] = 1
            except LookupError as error:
                raise GradientError(str(error)) from None
    return seed


def copy_of(hooks: HookSpec | None) -> HookSpec:
    """A copy of a spec; one that has a metric or gradients is refused."""
    # A copy, to which the verb adds: the caller's spec stays as it is.
    spec = HookSpec().extend(deepcopy(hooks) if hooks is not None else HookSpec())
    if spec.metric is not None or spec.gradients:
        raise GradientError("the spec has a metric or gradients of its own: `forward` computes these")
    return spec


def _refuse_unread(what: str, **arguments: Any) -> None:
    unread = [f"{name}=" for name, value in arguments.items() if value is not None]
    if unread:
        raise GradientError(f"{what} takes the place of a metric of the logits, and reads no {', '.join(unread)}")


def _of_value(
    model: Runner,
    run: Callable[..., HookCache],
    spec: HookSpec,
    points: Hooks,
    of: HookPoint,
    cotangent: ArrayLike | Seed | None,
    rules: str,
) -> HookCache:
    """Gradients of the value at a hook point, times numbers."""
    if cotangent is None:
        raise GradientError(
            f"of={of}: a value is differentiated as its sum times numbers: give them as cotangent=, or 1.0"
        )
    spec.capture(of)  # what comes before the hook point has an effect on it
    numbers = np.ones(1) if callable(cotangent) else np.atleast_1d(cotangent)
    full = deepcopy(spec).gradient(points).set_metric("cotangent", cotangent=numbers, of=of, rules=rules)
    if callable(cotangent):
        # Refuses a wrong request before the first pass.
        model.binder.bind(full, Outputs(logits=False, carried=False), differentiated=True)
        numbers = np.atleast_1d(cotangent(run(spec, logits=False)[of.name]))
        full.set_metric("cotangent", cotangent=numbers, of=of, rules=rules)
    return run(full, logits=False)


def metric_name(metric: str | Callable[..., Any]) -> str:
    """The name of a metric that the graph computes."""
    if isinstance(metric, str):
        if metric == "cotangent":
            raise GradientError("metric 'cotangent' is the one of cotangent=, the derivative by the logits: give that")
        check_metric(metric)
        return metric
    name = getattr(metric, "__name__", "a function")
    raise GradientError(
        f"metric {name} is a Python function, whose derivative no graph can compute: cotangent= takes its derivative "
        "by the logits, an array [batch, vocab] or a function of the logits that gives it"
    )
