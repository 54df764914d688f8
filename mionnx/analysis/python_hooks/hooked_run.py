"""Runs with Python functions: between the segments of a cut graph, in batches of a list, and at gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.python_hooks.loss import NO_LOSS, row_losses
from mionnx.errors import GradientError, InputError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.past import choose_past, present_names
from mionnx.inputs.prompt_list import read_prompts
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.rewrite.plan import Outputs
from mionnx.run.dead_hooks import dead_hooks, refuse_change
from mionnx.run.decoding import StepFunctions
from mionnx.run.forward_batches import ListRequest, map_rows
from mionnx.run.function_results import replacement
from mionnx.run.hook_cache import HookCache, collect
from mionnx.run.hook_caches import HookCaches
from mionnx.run.hook_functions import Hook, HookFunction
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec

Losses = NDArray[np.float64]


@dataclass(frozen=True)
class RunInputs:
    """Tokens of a run, and everything that came before them.

    Attributes:
        tokens: ids, `Tokens`, or a list of these.
        attention_mask, cache, initial_state, prompt_length: see `forward`.
    """

    tokens: Any
    attention_mask: ArrayLike | None = None
    cache: Past | None = None
    initial_state: RWKVState | None = None
    prompt_length: Any = None

    def past(self, model: Runner) -> Past | None:
        """The key/value cache, or the state, before the tokens."""
        return choose_past(model.hooked, self.cache, self.initial_state)

    def batch(self, model: Runner) -> TokenBatch:
        """The tokens as inputs of the graph."""
        sizes = model.hooked.metadata.sizes
        return make_token_batch(self.tokens, self.attention_mask, self.past(model), sizes, self.prompt_length)

    def forward(self, model: Runner, spec: HookSpec, logits: bool = True) -> HookCache:
        """Run the model on them, without functions."""
        return model.forward(
            self.tokens,
            spec,
            attention_mask=self.attention_mask,
            cache=self.cache,
            initial_state=self.initial_state,
            prompt_length=self.prompt_length,
            logits=logits,
        )


def run_segments(
    model: Runner,
    inputs: RunInputs,
    spec: HookSpec,
    functions: StepFunctions,
    logits: bool,
    state: bool,
    rows: Sequence[int] | None = None,
) -> HookCache:
    """Run a model with functions at hook points.

    Args:
        model, inputs: what runs.
        spec: captures and interventions; functions run after the interventions at the same hook point.
        functions: by hook point; calls that share them share their `ctx`.
        logits: whether the model runs to its end; otherwise to the last hook point of spec and functions.
        state: whether the state that an RWKV model ends with is returned to the user.
        rows: the numbers of the rows in their list.

    Returns:
        logits and captures; a capture holds the value after the functions.
    """
    if not functions.names:
        return inputs.forward(model, spec, logits)
    hooked, batch = model.hooked, inputs.batch(model)
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

    results = chain.run({*bound.outputs(False)}, bound.inputs(batch, inputs.past(model)), between)
    return collect(bound, batch, results, False)


def run_batches(
    model: Runner,
    inputs: RunInputs,
    spec: HookSpec,
    functions: StepFunctions,
    return_type: str | None,
    batch_size: int | str,
    state: bool,
) -> tuple[Any, HookCaches]:
    """Run a list of prompts with functions at hook points, which see each batch; see `run_segments`.

    Returns:
        a list of logits [1, seq, vocab], the losses of all texts, or None; and the results of each prompt.
    """
    past, logits = inputs.past(model), return_type is not None
    texts = read_prompts(inputs.tokens, inputs.attention_mask, past, model.hooked.metadata.sizes).ids
    losses: dict[int, Losses] = {}

    def run(spec: HookSpec, batch: TokenBatch, past: Past | None, _: bool, rows: list[int]) -> HookCache:
        lengths = None if batch.prompt_lengths is None else batch.prompt_lengths.tolist()
        part = RunInputs(batch.input_ids, batch.attention_mask, past, None, lengths)
        return run_segments(model, part, spec, functions, logits, state, rows)

    def read(row: int, cache: HookCache) -> HookCache:
        if return_type not in (None, "logits"):
            losses[row] = row_losses(cache.output()[0], texts[row])
            if return_type != "both" and not cache:
                cache.into_output()  # the loss is all that is returned of this row
        return cache

    request = ListRequest(inputs.tokens, spec, batch_size, inputs.attention_mask, past, inputs.prompt_length, logits)
    rows = map_rows(model, request, read, "run", run=run, kept=return_type in ("logits", "both"))
    return _returned(return_type, rows, [losses[row] for row in sorted(losses)]), HookCaches(rows)


def _returned(return_type: str | None, caches: Sequence[HookCache], losses: list[Losses]) -> Any:
    """Results of a list, as `convert_logits` gives those of a batch."""
    if return_type is None:
        return None
    if losses and not any(map(len, losses)):
        raise InputError(NO_LOSS)
    if return_type == "loss per token":
        width = max(map(len, losses))
        return np.stack([np.pad(row, (width - len(row), 0), constant_values=np.nan) for row in losses])
    if return_type == "loss":
        return np.concatenate(losses).mean()
    logits = [cache.output() for cache in caches]
    return logits if return_type == "logits" else (logits, np.concatenate(losses).mean())


def run_backwards(
    model: Runner,
    inputs: RunInputs,
    spec: HookSpec,
    functions: Mapping[str, list[HookFunction]],
    metric: Mapping[str, Any],
) -> HookCache:
    """Run a model and go back from a metric, with functions at the gradients, which may change them.

    1. The gradients of the metric by all hooked values come from one pass.
    2. The functions are called from the last hook point to the first, with the gradient by the value there.
    3. A gradient g changed to g' reaches earlier hook points as the difference does: one more pass differentiates the
       value times (g' - g), and its gradients are added to theirs.

    Args:
        model, inputs, spec: see `run_segments`.
        functions: by hook point, in execution order.
        metric: the arguments of `HookSpec.set_metric`.

    Returns:
        the logits, and the gradients as the functions left them.

    Raises:
        GradientError: no gradient at a hook point.
        InterventionError: a function's result that cannot replace a gradient.
    """
    cache = inputs.forward(model, deepcopy(spec).set_metric(**metric).gradient([*functions]))
    gradients = {} if cache.grad is None else {name: np.array(value) for name, value in cache.grad.items()}
    flow = Dataflow(model.hooked.proto)
    for name in reversed([*functions]):
        before = gradients[name].copy()
        gradients[name] = _called(model, name, functions[name], gradients[name])
        change = gradients[name] - before
        leading = flow.read_by(flow.ancestors([name]))
        earlier = [other for other in functions if other in leading and other != name]
        if earlier and change.any():
            again = deepcopy(spec).capture(name).set_metric("cotangent", cotangent=change, of=name).gradient(earlier)
            for other, value in (inputs.forward(model, again, logits=False).grad or {}).items():
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
