"""The gradients that a spec asks for, checked against the model's hook points."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mionnx.bind.hook_index import HookIndex
from mionnx.bind.plan import BoundCapture, bind_captures
from mionnx.errors import GradientError
from mionnx.graph.hook_points import HookPoint
from mionnx.rewrite.plan import GradientNode, Gradients
from mionnx.spec.capture import Capture
from mionnx.spec.hook_choice import resolve
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.metric import MetricSpec


def gradients_asked(spec: HookSpec, computed: bool) -> MetricSpec | None:
    """The metric of a spec.

    Args:
        spec: the spec.
        computed: whether the caller computes metrics and gradients.

    Raises:
        GradientError: gradients without a metric, or a caller that computes none.
    """
    if spec.gradients and spec.metric is None:
        raise GradientError(
            f"{spec.gradients[0]}: a gradient is that of a metric: set_metric('logit', answer=...) says of which"
        )
    if spec.metric is not None and not computed:
        raise GradientError(
            "this call computes no metric and no gradient: `forward` and `gradients` do; leave them out of this spec"
        )
    return spec.metric


def bind_gradients(requests: Sequence[Capture], hooks: HookIndex) -> tuple[BoundCapture, ...]:
    """The gradients that requests mean on a model, in execution order.

    Raises:
        HookError: a hook point that the model does not have, or one asked for in two different parts.
        GradientError: a hook point that is only computed for its capture, or that holds no fractions.
        InterventionError: positions or heads where there are none.
    """
    if not requests:
        return ()
    held = [name for name in hooks.names if not lacking(name, hooks)]
    chosen = [(request, _names(request, held, hooks)) for request in requests]
    return tuple(replace(one, node=GradientNode(**vars(one.node))) for one in bind_captures(chosen, hooks))


def _names(request: Capture, held: Sequence[str], hooks: HookIndex) -> tuple[str, ...]:
    """The hook points of a request; of a glob or predicate, those that can have a gradient."""
    if not isinstance(request.what, HookPoint):
        return tuple(resolve(request, held))
    (name,) = resolve(request, hooks.names)
    if reason := lacking(name, hooks):
        raise GradientError(f"gradient at {name}: {reason}")
    return (name,)


def lacking(name: str, hooks: HookIndex) -> str | None:
    """Why a hook point has no gradient; None if it can have one."""
    point = HookPoint.parse(name)
    if point.derived:
        return f"it is computed for its capture alone, and nothing depends on it; {point.instead} has one"
    if np.dtype(hooks.dtype(point)).kind in "iub":
        return "it holds whole numbers"
    if name in hooks.model.order and name not in hooks.model.before_logits:
        return "the logits do not depend on it, nor does any metric of them"
    return None


def gradients_of(metric: MetricSpec | None, by: Sequence[BoundCapture]) -> Gradients | None:
    """The part of a plan with a metric and its gradients."""
    if metric is None:
        return None
    return Gradients(metric.name, tuple(one.node for one in by if isinstance(one.node, GradientNode)), metric.rules)
