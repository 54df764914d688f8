"""The gradients that a spec asks for, checked against the model's hook points."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from mionnx.bind.hook_index import HookIndex
from mionnx.bind.plan import BoundCapture, bind_captures
from mionnx.errors import GradientError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.metadata import Metadata
from mionnx.graph.output_head import LOGITS
from mionnx.rewrite.plan import GradientNode, Gradients
from mionnx.spec.hook_choice import Capture, resolve
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import GRADIENT_RULES, NO_CHOICE, OF_CHOICES, OF_VECTORS, MetricSpec


def metric_of(spec: HookSpec, computed: bool) -> MetricSpec | None:
    """The metric of a spec, refused where nothing reads it or the caller computes none."""
    if spec.gradients and spec.metric is None:
        raise GradientError(
            f"{spec.gradients[0]}: a gradient is that of a metric: set_metric('logit', answer=...) says of which"
        )
    if spec.metric is not None and spec.metric.rules != GRADIENT_RULES[0] and not spec.gradients:
        raise GradientError(f"rules={spec.metric.rules!r} has no effect: the spec asks for no gradient()")
    if spec.metric is not None and not computed:
        raise GradientError(
            "this call computes no metric and no gradient: `forward` and `gradients` do; leave them out of this spec"
        )
    return spec.metric


def bind_gradients(requests: Sequence[Capture], of: str, hooks: HookIndex) -> tuple[BoundCapture, ...]:
    """The gradients that requests mean on a model, in execution order."""
    if not requests:
        return ()
    leading, names = _leading(of, hooks), differentiable(hooks, of)
    chosen = [(request, _names(request, names, of, leading, hooks)) for request in requests]
    return tuple(replace(one, node=GradientNode(**vars(one.node))) for one in bind_captures(chosen, hooks))


def differentiable(hooks: HookIndex, of: str = LOGITS) -> list[str]:
    """The hook points that can have a gradient of a value."""
    leading = _leading(of, hooks)
    return [name for name in hooks.names if not _lacking(name, of, leading, hooks)]


def _leading(of: str, hooks: HookIndex) -> set[str]:
    # splices are no part of this graph: hook points in them are taken to lead on, and refused later if they do not
    return {of, *hooks.inner, *hooks.model.influence.leading(of)}


def _names(
    request: Capture, candidates: Sequence[str], of: str, leading: Collection[str], hooks: HookIndex
) -> tuple[str, ...]:
    """The hook points of a request; of a glob or predicate, those that can have a gradient."""
    if not isinstance(request.what, HookPoint):
        return tuple(resolve(request, candidates))
    (name,) = resolve(request, hooks.names)
    # named by itself it is refused with the reason; a glob leaves it out
    if reason := _lacking(name, of, leading, hooks):
        raise GradientError(f"gradient at {name}: {reason}")
    return (name,)


def _lacking(name: str, of: str, leading: Collection[str], hooks: HookIndex) -> str | None:
    """Why a hook point has no gradient; None if it can have one."""
    point = HookPoint.parse(name)
    if point.derived:
        return f"it is computed for its capture alone, and nothing depends on it; {point.instead} has one"
    if np.dtype(hooks.dtype(point)).kind in "iub":  # experts' numbers
        return "it holds whole numbers"
    if name not in leading:
        return f"the {of} do not depend on it" if of == LOGITS else f"{of} does not depend on it"
    return None


def read_by(metric: MetricSpec | None, hooks: HookIndex) -> str:
    """The value that a metric reads."""
    if metric is None or metric.of is None:
        return LOGITS
    point = HookPoint.parse(metric.of)
    hooks.dims(point)  # refuses a hook point that is not there
    if point.derived or np.dtype(hooks.dtype(point)).kind in "iub":
        raise GradientError(f"the metric at {point}: no number that has a gradient; there is {point.instead or 'none'}")
    return point.name


def refuse_metric(metric: MetricSpec | None, metadata: Metadata) -> None:
    """Refuse a metric that the model's head does not have."""
    if metric is None or metric.of is not None or metric.name == "cotangent":
        return
    if metric.name == "loss":
        _refuse_loss(metric, metadata)
    of_vectors = metadata.head in ("embedding", "none")
    if of_vectors != (metric.name in OF_VECTORS):
        has = f"{', '.join(OF_VECTORS)}, and functions" if of_vectors else "logits, of which these are no metrics"
        raise GradientError(f"metric {metric.name!r}: a model with the head {metadata.head!r} has {has}")
    if metric.name in OF_CHOICES and not metadata.exclusive:
        raise GradientError(f"metric {metric.name!r} {NO_CHOICE}")


def _refuse_loss(metric: MetricSpec, metadata: Metadata) -> None:
    """Refuse a loss of the next token of an encoder, and one of hidden tokens of any other than a masked model."""
    if metadata.head == "masked_lm":
        if metric.answer is None:
            raise GradientError(
                "the loss of a masked language model is that of the tokens which masks hide: give them as answer=, "
                "one for all masks, or of each row one, or a list with one for each of its masks"
            )
    elif metadata.bidirectional:
        raise GradientError(
            "the loss is that of a text's own next tokens, and an encoder reads these tokens; a model with the head "
            f"{metadata.head!r} has metric='log_probability' of an answer"
        )
    elif metric.answer is not None:
        raise GradientError("metric 'loss' reads no answer of a decoder: it is that of a text's own next tokens")


def gradients_of(metric: MetricSpec | None, of: str, by: Sequence[BoundCapture]) -> Gradients | None:
    """The part of a plan with a metric and its gradients."""
    if metric is None:
        return None
    by_node = tuple(one.node for one in by if isinstance(one.node, GradientNode))
    return Gradients(metric.name, by_node, metric.rules, of=of)
