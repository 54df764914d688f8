"""A run of the model in segments, with Python functions called between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import ArrayLike, NDArray

from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.past import choose_past, present_names
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.rewrite.plan import Outputs
from mionnx.run.function_results import apply_functions, dead_hooks, refuse_change
from mionnx.run.hook_cache import HookCache, collect
from mionnx.run.hook_functions import (
    Hook,
    HookFunction,
    Where,
    register,
)
from mionnx.run.runner import Runner
from mionnx.spec.hook_spec import HookSpec


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

    def batch(self, model: Runner) -> TokenBatch:
        """The tokens as inputs of the graph."""
        before = choose_past(model.hooked, self.cache, self.initial_state)
        sizes = model.hooked.metadata.sizes
        return make_token_batch(self.tokens, self.attention_mask, before, sizes, self.prompt_length)

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
    fwd_hooks: Iterable[tuple[Where, HookFunction]],
    logits: bool,
    state: bool,
    hooks: dict[str, Hook] | None = None,
    rows: Sequence[int] | None = None,
) -> HookCache:
    """Run a model with functions at hook points.

    Args:
        model: the model.
        inputs: the tokens and what came before them.
        spec: captures and interventions besides; functions run after the interventions at the same hook point.
        fwd_hooks: pairs of a hook and a function.
        logits: whether the model runs to its end; otherwise to the last hook point that is asked for.
        state: whether the state that an RWKV model ends with is returned to the user.
        hooks: the arguments of functions, by hook point, that several runs of one call share; new ones are put here.
        rows: the numbers of the rows in their list.

    Returns:
        logits and captures; a capture holds the value after the functions.

    Raises:
        HookError, InterventionError, InputError: see `run_with_hooks`.
    """
    functions = register(model.hooked, fwd_hooks)
    if not functions:
        return inputs.forward(model, spec, logits)
    hooked, batch = model.hooked, inputs.batch(model)
    outputs = Outputs(logits=logits, carried=logits and hooked.metadata.recurrent)
    bound = model.binder.bind(spec, outputs, cuts=functions).on(batch)
    feeds = bound.inputs(batch, choose_past(hooked, inputs.cache, inputs.initial_state))
    chain = model.variants.chain(bound.plan, tuple(functions), batch.batch * batch.seq)
    hooks = {} if hooks is None else hooks
    for name in functions:
        known = hooks.get(name, Hook(HookPoint.parse(name)))
        numbers = tuple(range(batch.batch) if rows is None else rows)
        hooks[name] = replace(known, positions=batch.token_positions, rows=numbers)
    returned = [*(["logits"] if logits else []), *(capture.node.hook for capture in bound.captures)]
    returned += present_names(hooked, False) if state and bound.plan.outputs.carried else []
    dead = dead_hooks(hooked, functions, returned)

    def between(name: str, value: NDArray[Any]) -> NDArray[Any]:
        if name not in dead:
            return apply_functions(hooked, batch, hooks[name], functions[name], value)
        before = value.copy()
        return refuse_change(name, before, apply_functions(hooked, batch, hooks[name], functions[name], value))

    results = chain.run({*bound.outputs(False)}, feeds, between)
    return collect(bound, batch, results, False)
