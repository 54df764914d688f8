"""All inputs of one call of a rewritten graph."""

from mionnx.bind import plan as bind
from mionnx.bind.rwkv_gates import gates_of
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs import past
from mionnx.inputs.token_batch import Past, TokenBatch
from mionnx.inputs.value import Value
from mionnx.rewrite.plan import Plan
from mionnx.spec.hook_spec import HookSpec


def feeds_of(model: HookedModel, spec: HookSpec, plan: Plan, call: TokenBatch, before: Past | None) -> dict[str, Value]:
    """The tokens, what came before them, and the values, positions, masks and gates of a spec.

    Args:
        model: the hooked model.
        spec, plan: what was asked, and the structure that it has.
        call: the tokens.
        before: keys and values, or a state.

    Raises:
        InputError: a past that does not fit.
        InterventionError: a value, position, head or row that does not fit; see `bind.values_of` and `gates.gates_of`.
    """
    feeds: dict[str, Value] = {**call.feeds(), **past.past_inputs(model, before, call)}
    feeds |= bind.values_of(spec, plan, call, model)
    return feeds | gates_of(spec, call, model.metadata)
