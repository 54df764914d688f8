"""The metric of an attribution: one that a graph computes, or a function and its derivative by the logits, the
cotangent."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.gradients.gradients import Seed, metric_name
from mionnx.analysis.sweep.metric import Measure
from mionnx.bind.logit_selection import Logits
from mionnx.errors import GradientError, InputError
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

LAST = Logits(positions=-1)


def check_metric(metric: Measure, cotangent: ArrayLike | Seed | None, estimated: str) -> Measure:
    """The metric, if it has a gradient.

    Args:
        metric, cotangent: as given.
        estimated: the verb whose exact numbers are estimated.

    Raises:
        GradientError, InputError: a function without a cotangent, a cotangent without a function, or no metric of that
            verb.
    """
    if callable(metric):
        return metric if cotangent is not None else metric_name(metric)
    if cotangent is not None:
        raise GradientError(f"cotangent= is the derivative of a metric that is a function; {metric!r} has its own")
    if metric_name(metric) in ("logit", "loss"):
        raise InputError(f"metric {metric!r} is none of `{estimated}`, which this estimates: give logit_diff")
    return metric


def with_metric(
    model: Runner,
    spec: HookSpec,
    metric: Measure,
    cotangent: ArrayLike | Seed | None,
    known: Mapping[str, Any],
    rules: str,
    ids: NDArray[np.int64],
) -> HookSpec:
    """Set the metric; a cotangent that is a function is called with the logits of these rows.

    Args:
        model, spec: what runs.
        metric, cotangent: what is measured, and the derivative of a metric that is a function.
        known: tokens or reference of the metric.
        rules: the name of the rules of going back.
        ids: the rows, [batch, seq].
    """
    if not callable(metric):
        return spec.set_metric(metric, **known, rules=rules)
    if callable(cotangent):
        plain = HookSpec()
        plain.interventions += spec.interventions
        cotangent = cast(Seed, cotangent)(model.forward(ids, plain, logits=LAST).output()[:, 0])
    return spec.set_metric("cotangent", cotangent=np.asarray(cotangent), rules=rules)
