"""One call with functions in between."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike, NDArray

from mionnx.analysis.python_hooks.check_result import apply
from mionnx.analysis.python_hooks.dead_hooks import idle, refuse_change
from mionnx.analysis.python_hooks.hook import (
    Hook,
    HookFunction,
    Where,
    register,
)
from mionnx.bind import plan as bind
from mionnx.bind.feeds import feeds_of
from mionnx.bind.rwkv_gates import refuse_idle
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs import past
from mionnx.inputs.rwkv_state import RWKVState
from mionnx.inputs.token_batch import Past, TokenBatch, make_token_batch
from mionnx.rewrite.plan import CaptureNode, Outputs
from mionnx.run.hook_cache import HookCache
from mionnx.spec.capture import Capture
from mionnx.spec.hook_spec import HookSpec

if TYPE_CHECKING:
    from mionnx.run.runner import Runner


@dataclass(frozen=True)
class Text:
    """What a call is made on.

    Attributes:
        tokens: ids, `Tokens`, or a list of these.
        attention_mask, cache, initial_state, prompt_length: see `forward`.
    """

    tokens: Any
    attention_mask: ArrayLike | None = None
    cache: Past | None = None
    initial_state: RWKVState | None = None
    prompt_length: Any = None

    def call(self, model: "Runner") -> TokenBatch:
        """The tokens as inputs of the graph."""
        before = past.choose(model.hooked, self.cache, self.initial_state)
        sizes = model.hooked.metadata.sizes
        return make_token_batch(self.tokens, self.attention_mask, before, sizes, self.prompt_length)


def run(
    model: "Runner",
    text: Text,
    spec: HookSpec,
    fwd_hooks: Iterable[tuple[Where, HookFunction]],
    logits: bool,
    state: bool,
) -> HookCache:
    """Run a model with functions at hook points.

    Args:
        model: the model.
        text: the tokens and what came before them.
        spec: captures and interventions besides; the functions see what the interventions made.
        fwd_hooks: pairs of a hook and a function.
        logits: whether the model runs to its end; otherwise to the last hook point that is asked for.
        state: whether whoever calls gets the state that an RWKV model ends with.

    Returns:
        logits and captures; a capture sees what the functions made.

    Raises:
        HookError, InterventionError, InputError: see `run_with_hooks`.
    """
    functions = register(model.hooked, fwd_hooks)
    if not functions:
        return _plain(model, text, spec, logits)
    hooked, call = model.hooked, text.call(model)
    before = past.choose(hooked, text.cache, text.initial_state)
    carried = logits and hooked.metadata.recurrent
    chosen = bind.captures_of(spec, hooked)
    cuts = {CaptureNode(name): Capture(HookPoint.parse(name)) for name in functions}
    plan = bind.plan_of(spec, hooked, Outputs(logits=logits, carried=carried), {**cuts, **chosen})
    if not logits:
        refuse_idle(spec, plan.captures, model.num_layers)
    feeds = {**feeds_of(hooked, spec, plan, call, before), **bind.parts_of(chosen, call, hooked)}
    chain = model.variants.chain(plan, tuple(functions), call.batch * call.seq)
    hooks = {name: Hook(HookPoint.parse(name)) for name in functions}
    kept = [want for want in plan.captures if want in chosen]
    carries = past.present_names(hooked, False) if carried else []
    returned = [*(["logits"] if logits else []), *(want.hook for want in kept), *(carries if state else [])]
    unseen = idle(hooked, functions, returned)

    def between(name: str, value: NDArray[Any]) -> NDArray[Any]:
        if name not in unseen:
            return apply(hooked, call, hooks[name], functions[name], value)
        before = value.copy()
        return refuse_change(name, before, apply(hooked, call, hooks[name], functions[name], value))

    wanted = {*(["logits"] if logits else []), *(want.fetched for want in kept), *carries}
    found = chain.run(wanted, feeds, between)
    after = past.take_present(hooked, found, call, False) if carried else (None, None)
    return HookCache(found.get("logits"), {want.output: found[want.fetched] for want in kept}, *after)


def _plain(model: "Runner", text: Text, spec: HookSpec, logits: bool) -> HookCache:
    return model.forward(
        text.tokens,
        spec,
        attention_mask=text.attention_mask,
        cache=text.cache,
        initial_state=text.initial_state,
        prompt_length=text.prompt_length,
        logits=logits,
    )
