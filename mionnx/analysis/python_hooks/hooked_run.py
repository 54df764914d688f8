"""Runs with Python functions: between the segments of a cut graph, in batches of a list, and at gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import GradientError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.past import choose_past, present_names
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.rewrite.plan import Outputs
from mionnx.run.batching import BatchSize
from mionnx.run.decoding import StepFunctions
from mionnx.run.forward_batches import ListRequest, bind_pass, in_one_pass, map_rows
from mionnx.run.hook_cache import HookCache, collect, joined
from mionnx.run.hook_functions import Hook, HookFunction, dead_hooks, refuse_change, replacement
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec


@dataclass(frozen=True)
class RunInputs:
    """Tokens of a run, and everything that came before them.

    Attributes:
        tokens: ids, `Tokens`, or a list of these.
        attention_mask, cache, initial_state, prompt_length: see `forward`.
    """

    model: Runner
    tokens: Any
    attention_mask: ArrayLike | None = None
    cache: Past | None = None
    initial_state: RWKVState | None = None
    prompt_length: Any = None

    @cached_property
    def past(self) -> Past | None:
        """The key/value cache, or the state, before the tokens."""
        return choose_past(self.model.hooked, self.cache, self.initial_state)

    @cached_property
    def batch(self) -> TokenBatch:
        """The tokens as inputs of the graph."""
        sizes = self.model.hooked.metadata.sizes
        return make_token_batch(self.tokens, self.attention_mask, self.past, sizes, self.prompt_length)

    def forward(self, spec: HookSpec, logits: bool = True) -> HookCache:
        """Run the model on them, without functions."""
        return self.model.forward(
            self.tokens,
            spec,
            attention_mask=self.attention_mask,
            cache=self.past,
            prompt_length=self.prompt_length,
            logits=logits,
            batch_size=None,
        )


def run_segments(
    inputs: RunInputs,
    spec: HookSpec,
    functions: StepFunctions,
    logits: bool,
    state: bool,
    rows: Sequence[int] | None = None,
) -> HookCache:
    """Run a model with functions at hook points.

    Args:
        spec: captures and interventions; functions run after the interventions at the same hook point.
        functions: by hook point; calls that share them share their `ctx`.
        logits: whether the model runs to its end; otherwise to the last hook point of spec and functions.
        state: whether the state that an RWKV model ends with is returned to the user.
        rows: the numbers of the rows in their list.

    Returns:
        logits and captures; a capture holds the value after the functions.
    """
    if not functions.names:
        return inputs.forward(spec, logits)
    model, hooked, batch = inputs.model, inputs.model.hooked, inputs.batch
    here = functions.of_rows(range(batch.batch) if rows is None else rows)
    outputs = Outputs(logits=logits, carried=logits and hooked.metadata.recurrent)
    bound = model.binder.bind(spec, outputs, cuts=here.names).on(batch)
    chain = model.variants.chain(bound.plan, here.names, batch.batch * batch.seq)
    returned = [*(["logits"] if logits else []), *(capture.node.hook for capture in bound.captures)]
    returned += present_names(hooked, False) if state and bound.plan.outputs.carried else []
    dead = dead_hooks(hooked, here.names, returned)

    def between(name: str, value: NDArray[Any]) -> NDArray[Any]:
        if name not in dead:
            return here.call(hooked, batch, 0, name, value)
        before = value.copy()
        return refuse_change(name, before, here.call(hooked, batch, 0, name, value))

    results = chain.run({*bound.outputs(False)}, bound.inputs(batch, inputs.past), between)
    return collect(bound, batch, results, False)


def run_batches(
    inputs: RunInputs,
    spec: HookSpec,
    functions: StepFunctions,
    batch_size: BatchSize,
    logits: bool,
    state: bool,
) -> HookCache:
    """Run a list of prompts with functions at hook points, in one pass or in batches.

    See `run_segments`; functions see each batch.
    """
    model, past = inputs.model, inputs.past
    if not isinstance(batch_size, int) and (
        inputs.batch.batch == 1  # no look at memory
        or in_one_pass(bind_pass(model.binder, spec, logits, False), inputs.batch, batch_size)
    ):
        return run_segments(inputs, spec, functions, logits, state)

    def run(spec: HookSpec, batch: TokenBatch, past: Past | None, _: bool, rows: list[int]) -> HookCache:
        lengths = None if batch.prompt_lengths is None else batch.prompt_lengths.tolist()
        part = RunInputs(model, batch.input_ids, batch.attention_mask, past, None, lengths)
        return run_segments(part, spec, functions, logits, state, rows)

    request = ListRequest(inputs.tokens, spec, batch_size, inputs.attention_mask, past, inputs.prompt_length, logits)
    rows = map_rows(model, request, lambda _, cache: cache, "run", run=run, keep=True)
    return joined(rows, bind_pass(model.binder, spec, logits, False), inputs.batch)


def run_backwards(
    inputs: RunInputs,
    spec: HookSpec,
    functions: Mapping[str, list[HookFunction]],
    metric: Mapping[str, Any],
) -> HookCache:
    """Run a model and go back from a metric, with functions at the gradients.

    1. The gradients of the metric by all hooked values come from one pass.
    2. The functions are called from the last hook point to the first, with the gradient by the value there.
    3. A gradient g changed to g' reaches earlier hook points as the difference does: one more pass differentiates the
       value times (g' - g), and its gradients are added to theirs.

    Args:
        inputs, spec: see `run_segments`.
        functions: by hook point, in execution order.
        metric: the arguments of `HookSpec.set_metric`.

    Returns:
        the logits, and the gradients as the functions left them.
    """
    cache = inputs.forward(deepcopy(spec).set_metric(**metric).gradient([*functions]))
    gradients = {} if cache.grad is None else {name: np.array(value) for name, value in cache.grad.items()}
    model, flow = inputs.model, Dataflow(inputs.model.hooked.proto)
    for name in reversed([*functions]):
        before = gradients[name].copy()
        gradients[name] = _called(model, name, functions[name], gradients[name])
        change = gradients[name] - before
        leading = flow.read_by(flow.ancestors([name]))
        earlier = [other for other in functions if other in leading and other != name]
        if earlier and change.any():
            again = deepcopy(spec).capture(name).set_metric("cotangent", cotangent=change, of=name).gradient(earlier)
            for other, value in (inputs.forward(again, logits=False).grad or {}).items():
                gradients[other] += value
    cache.grad = HookCache(None, gradients, num_layers=model.num_layers)
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
