"""Python functions at the gradients of hook points, which may change them.

1. The gradients of the metric by all hooked values come from one pass.
2. The functions are called from the last hook point to the first, with the gradient by the value there.
3. A gradient g changed to g' reaches earlier hook points as the difference does: one more pass differentiates the value
   times (g' - g), and its gradients are added to theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.python_hooks.segmented_run import RunInputs
from mionnx.errors import GradientError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.run.function_results import replacement
from mionnx.run.hook_cache import HookCache
from mionnx.run.hook_functions import Hook, HookFunction
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec


def run_backwards(
    model: Runner,
    inputs: RunInputs,
    spec: HookSpec,
    functions: Mapping[str, list[HookFunction]],
    metric: Mapping[str, Any],
) -> HookCache:
    """Run a model and go back from a metric, with functions at the gradients.

    Args:
        model: the model.
        inputs: the tokens and what came before them.
        spec: captures and interventions.
        functions: by hook point, in execution order.
        metric: the arguments of `HookSpec.set_metric`.

    Returns:
        the logits, and the gradients as the functions left them.

    Raises:
        GradientError: no gradient at a hook point.
        InterventionError: a function's result that cannot replace a gradient.
    """
    asked = deepcopy(spec).set_metric(**metric).gradient([*functions])
    cache = inputs.forward(model, asked)
    found = {} if cache.grad is None else {name: np.array(value) for name, value in cache.grad.items()}
    flow = Dataflow(model.hooked.proto)
    for name in reversed([*functions]):
        before = found[name].copy()
        found[name] = _called(model, name, functions[name], found[name])
        change = found[name] - before
        leading = flow.read_by(flow.ancestors([name]))
        earlier = [other for other in functions if other in leading and other != name]
        if earlier and change.any():
            again = deepcopy(spec).capture(name).set_metric("cotangent", cotangent=change, of=name).gradient(earlier)
            for other, value in (inputs.forward(model, again, logits=False).grad or {}).items():
                found[other] += value
    cache.grad = HookCache(None, found, num_layers=model.num_layers)
    return cache


def _called(model: Runner, name: str, functions: list[HookFunction], value: NDArray[Any]) -> NDArray[Any]:
    """The gradient after its functions, each called on the result of the one before."""
    hook = Hook(HookPoint.parse(name))
    for function in functions:
        returned = function(value, hook=hook)
        if returned is not None and returned is not value:
            value = replacement(model.hooked, hook, function, returned, value)
        if not np.isfinite(value).all():
            raise GradientError(f"a function at the gradient of {name} left NaN or an infinity")
    return value
