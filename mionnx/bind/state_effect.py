"""Refusal of state interventions that nothing returned can show.

A pass that returns the state shows every one. One that returns captures alone shows those whose layer leads to a
capture, at a position that is not later than what is captured.
"""

from mionnx.bind.effect import ByRow, Pairs, Shown, View, replaced_whole
from mionnx.errors import InterventionError
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import TokenBatch
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

State = StateKnockoutSpec | StateSteeringSpec


def states_of(spec: HookSpec) -> list[State]:
    """The state interventions of a spec."""
    return [*spec.state_steerings, *spec.state_knockouts]


def refuse_idle_states(
    spec: HookSpec, edits: Pairs, shown: Shown, model: HookedModel, batch: TokenBatch | None = None
) -> None:
    """Refuse state interventions that nothing shown depends on.

    Args:
        edits: its other interventions; beside a splice, which may lead anywhere, nothing is refused.
        shown: values that the pass returns.
        batch: the tokens of the pass; any tokens if left out.

    Raises:
        InterventionError: there is one.
    """
    if shown.carried or not model.metadata.recurrent or any(edit.fit for edit, _ in edits):
        return
    overwritten = replaced_whole(edits)
    for state in states_of(spec):
        views = [view for view in shown.views() if _leads_to(state, view, model, overwritten)]
        if not views:
            raise InterventionError(
                f"{state.title}: no capture lies behind its layers, and there are no logits: ask for either"
            )
        if batch is not None and not any(_in_time(state, shown.positions.get(view.name), batch) for view in views):
            raise InterventionError(
                f"{state.title}: what is asked for ({shown}) stands before its positions: ask for later ones, or for "
                "the logits"
            )


def _leads_to(state: State, view: View, model: HookedModel, overwritten: frozenset[str]) -> bool:
    """Whether a value that is shown can depend on the state in one of the targeted layers."""
    return any(
        view.source == begin or view.depends_on(begin, model.influence.of(begin, overwritten))
        for layer in state.target_layers(model.metadata.sizes.num_layers)
        for begin in _begins(state, layer)
    )


def _begins(state: State, layer: int) -> list[str]:
    """Hook points of a layer at which the effect of a state intervention begins."""
    mixed = [HookPoint.RwkvWkv(layer), HookPoint.RwkvState(layer)]
    shifted = [HookPoint.RwkvR(layer), HookPoint.RwkvK(layer), HookPoint.RwkvV(layer), HookPoint.MlpAct(layer)]
    return [point.name for point in (*mixed, *(shifted if "token_shift" in state.terms else []))]


def _in_time(state: State, positions: ByRow | None, batch: TokenBatch) -> bool:
    """Whether any position shown is one of the intervention's, or later; None shows all."""
    if positions is None:
        return True
    return any(
        changed <= max(positions[row])
        for row in range(batch.batch)
        for changed in batch.absolutes(state.positions_, row)
    )
