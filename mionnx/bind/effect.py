"""Refusal of interventions without effect: on edges never read, on values overwritten, or unseen.

Decided by structure: which values a hook point leads to, and at which positions. Where that cannot tell, as with
splices, which may do anything, an intervention is taken to have an effect. Values are not looked at: `Add(0)` and
`Scale(1)` are the zero of a dose.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.knockout_mask import cut_edges, end_of
from mionnx.bind.selection import Selection
from mionnx.bind.state_gates import StateEdit, hides, state_layers, states_of
from mionnx.errors import InterventionError
from mionnx.graph.axes import heads_axis
from mionnx.graph.hook_points import LAST_STATES, HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.influence import Reach
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.plan import CaptureNode, Edit, Plan
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention
from mionnx.spec.kinds.kind import ValueShape
from mionnx.spec.limits import LIMITS

Pairs = Sequence[tuple[Edit, Intervention]]
ByRow = Mapping[int, Collection[int]]  # row -> text positions
READ_LATER = {"token_shift", "convolution"}  # terms of a token that the tokens behind it read, and not it itself


@dataclass(frozen=True)
class ShownValues:
    """Values that a pass returns."""

    captures: Sequence[CaptureNode]
    logits: bool
    carried: bool  # keys and values, or a state
    # capture's output name, or "logits" -> the text positions that are shown; all where it has none
    positions: Mapping[str, ByRow] = field(default_factory=dict)
    # row -> length of its text after the call or generation; none if channel mixes may read any token before
    ends: Mapping[int, int] = field(default_factory=dict)

    def views(self) -> Iterator["OutputView"]:
        """Each value that is shown."""
        if self.logits:
            yield OutputView(LOGITS, LOGITS)
        for node in self.captures:
            point = HookPoint.parse(node.hook)
            yield OutputView(node.output, point.source.name, node.before, point.derived)

    def __str__(self) -> str:
        parts = [LOGITS] * self.logits + [node.output for node in self.captures] + ["the cache"] * self.carried
        named = parts if len(parts) < 4 else [*parts[:3], f"{len(parts) - 3} more"]
        return ", ".join(f"{name} in part" if name in self.positions else name for name in named) or "nothing"


@dataclass(frozen=True)
class OutputView:
    """One value that is shown."""

    name: str  # of the output
    source: str
    before: bool = False
    derived: bool = False

    def depends_on(self, hook: str, reach: Reach) -> bool:
        """Whether it can depend on an intervention at a hook point."""
        if self.source == hook:
            return self.derived or not self.before
        return self.source in (reach.arrives if self.before or self.derived else reach.passes)


def refuse_idle_structure(edits: Pairs, plan: Plan, model: HookedModel) -> None:
    """Refuse what has no effect in any call."""
    for edit, one in edits:
        # a mask by distance has one number, the distance, and its cuts follow from the text
        masks = one.rules.shape is ValueShape.ATTENTION_MASK and not one.rules.by_distance
        if masks and not np.isneginf(one.values[0]).any():
            raise InterventionError(f"{edit.kind} at {edit.hook}: its mask has no -inf, so it knocks nothing out")
    for n, (edit, one) in enumerate(edits):
        for later, other in _later(edits, n, plan):
            if _covers(other, one):
                raise _overwritten(edit, edits[later][0])
    shown = ShownValues(plan.captures, plan.outputs.logits, plan.outputs.carried)
    for edit, _ in edits:
        _refuse_unseen(edit, edits, shown, model, None)


def refuse_idle_in(selections: Sequence[Selection], plan: Plan, shown: ShownValues, model: HookedModel) -> None:
    """Refuse interventions without effect in one call, or in its whole generation."""
    edits = [(selection.edit, selection.intervention) for selection in selections]
    for n, selection in enumerate(selections):
        # what a limit of experts or neurons leaves is not counted by places of text and heads: it may leave something
        later = [selections[m] for m, other in _later(edits, n, plan) if other.experts is other.neurons is None]
        left = _not_overwritten(selection, _chosen(selection, model), later)
        _refuse_unseen(selection.edit, edits, shown, model, left)


def _chosen(selection: Selection, model: HookedModel) -> ByRow:
    """Text positions at which an intervention changes something; none for a row without edges."""
    chosen = selection.text_positions()
    if selection.intervention.rules.shape is not ValueShape.ATTENTION_MASK:
        return chosen
    layer, limited = HookPoint.parse(selection.edit.hook).layer or 0, selection.intervention.positions is not None
    window, both = model.metadata.window(layer), selection.call.both
    queried: dict[int, list[int]] = {}
    for row, named, queries in cut_edges(selection.knockout_mask, chosen, limited, window):
        if named and not queries:
            raise _no_edge(selection, row, window)
        queried[row] = queries
    # one row with an edge is enough: one mask serves texts of unequal length
    if any(queried.values()):
        return queried
    if not selection.intervention.rules.by_distance:
        raise InterventionError(
            f"{selection.edit.kind} at {selection.edit.hook}: it knocks nothing out; -inf must stand at a query that "
            "is selected and computed in this call, and at a key that it reads: "
            + ("one of the text" if both else "its own position or an earlier one")
        )
    longest = max(end_of(selection.call, row) for row in selection.rows)
    within = "" if window is None else f", in a layer that reads {window} keys"
    raise InterventionError(
        f"{selection.edit.kind} at {selection.edit.hook}: it cuts nothing: no selected query has more than "
        f"{int(selection.intervention.values[0])} tokens before it{' or behind it' if both else ''} that it reads, in "
        f"texts of at most {longest}{within}"
    )


def _no_edge(selection: Selection, row: int, window: int | None) -> InterventionError:
    tokens = end_of(selection.call, row)
    within = "" if window is None else f", each query reading {window} keys"
    return InterventionError(
        f"{selection.edit.kind} at {selection.edit.hook}: it knocks nothing out in row {row}, which has {tokens} tokens"
        f" (0 to {tokens - 1}){within}; rows and columns of a mask are positions of each row's own text: limit it by "
        "rows=, or give each row its own mask (create_knockout_mask takes a length for each row)"
    )


def _later(edits: Pairs, n: int, plan: Plan) -> Iterator[tuple[int, Intervention]]:
    """Later interventions at the same hook point that overwrite all of an earlier one."""
    hook = edits[n][0].hook
    here = [(m, edit, one) for m, (edit, one) in enumerate(edits) if edit.hook == hook]
    if any(edit.fit for _, edit, _ in here) and any(node.hook.startswith(f"{hook}.") for node in plan.captures):
        return  # a value inside a splice may show it
    yield from ((m, one) for m, _, one in here if m > n and one.rules.overwrites)


def _covers(other: Intervention, one: Intervention) -> bool:
    limits = ((getattr(other, name), getattr(one, name)) for name in LIMITS)
    return all(wide is None or (narrow is not None and _within(narrow, wide)) for wide, narrow in limits)


def _within(narrow: tuple[object, ...] | str, wide: tuple[object, ...] | str) -> bool:
    return narrow == wide or not (isinstance(narrow, str) or isinstance(wide, str) or {*narrow} - {*wide})


def _overwritten(edit: Edit, later: Edit) -> InterventionError:
    return InterventionError(
        f"{edit.kind} at {edit.hook} would do nothing: the {later.kind} after it there puts other values in place of "
        "all that it changes; leave it out, or register it after that one"
    )


def _not_overwritten(selection: Selection, chosen: ByRow, later: Sequence[Selection]) -> ByRow:
    """Text positions at which later interventions leave something of an earlier one."""
    if not later:
        return chosen
    left = _spots(selection, chosen)
    for other in later:
        left &= ~_spots(other, other.text_positions())
    if not left.any():
        raise _overwritten(selection.edit, later[-1].edit)
    return {row: np.flatnonzero(left[row].any(axis=0)).tolist() for row in chosen}


def _spots(selection: Selection, chosen: ByRow) -> NDArray[np.bool_]:
    """[batch, n_heads or 1, longest text] bool: the places that an intervention changes."""
    call, heads, axis = selection.call, selection.heads, heads_axis(selection.edit.axes)
    longest = max(end_of(call, row) for row in range(call.batch))
    # by position in the text, which means the same at every step of a generation
    spots = np.zeros((call.batch, 1 if axis is None else selection.shape[axis], longest), bool)
    for row, positions in chosen.items():
        for head in range(spots.shape[1]) if heads is None else heads:
            spots[row, head, list(positions)] = True
    return spots


def _refuse_unseen(edit: Edit, edits: Pairs, shown: ShownValues, model: HookedModel, chosen: ByRow | None) -> None:
    """Refuse an intervention that nothing shown depends on; None: at every position."""
    if any(one.fit for one, _ in edits):
        return  # a splice may mix positions, and read other hook points
    overwritten = replaced_whole(edits) - {edit.hook}
    # Without a look at the graph: every hook point but the last state leads to the logits, unless something between
    # them is overwritten.
    leads_on = not overwritten and HookPoint.parse(edit.hook).variant not in LAST_STATES
    if leads_on and shown.logits and (chosen is None or LOGITS not in shown.positions):
        return
    reach = model.influence.of(edit.hook, overwritten)
    if shown.carried and reach.carried and not _forgotten(reach, shown, chosen):
        return
    backward = model.metadata.bidirectional
    if not any(_seen(edit.hook, view, reach, shown, chosen, backward) for view in shown.views()):
        raise _unseen(edit, shown, chosen, [hook for hook in overwritten if hook in reach.arrives])


def replaced_whole(edits: Pairs) -> frozenset[str]:
    """Hook points at which an intervention puts other values in place of all."""
    return frozenset(edit.hook for edit, one in edits if one.rules.overwrites and not one.limited)


def _forgotten(reach: Reach, shown: ShownValues, chosen: ByRow | None) -> bool:
    """Whether only the last token's value is carried, and that token is not changed."""
    if chosen is None or not shown.ends or not reach.next_token_only:
        return False
    return all(shown.ends[row] - 1 not in changed for row, changed in chosen.items())


def _seen(hook: str, view: OutputView, reach: Reach, shown: ShownValues, chosen: ByRow | None, backward: bool) -> bool:
    """Whether a value that is shown can depend on a position changed; `backward`: attention reads both ways."""
    positions = shown.positions.get(view.name)
    if not view.depends_on(hook, reach) or positions is None or chosen is None:
        return view.depends_on(hook, reach)
    spreads, once = view.source in reach.spread, bool(shown.ends) and reach.next_token_only
    for row, changed in chosen.items():
        # next_token_only: the way leads through token shifts, which carry a value to the next token and no further
        reached = {*changed, *(at + 1 for at in changed if spreads and once)}
        if not reached.isdisjoint(positions[row]):
            return True
        # attention and states lead to any later position, attention of an encoder to earlier ones too
        if changed and spreads and not once and (backward or min(changed) < max(positions[row])):
            return True
    return False


def _unseen(edit: Edit, shown: ShownValues, chosen: ByRow | None, overwritten: Collection[str]) -> InterventionError:
    places = sorted({at for positions in (chosen or {}).values() for at in positions})
    at = f" at position {', '.join(map(str, places[:4]))}{', ...' * (len(places) > 4)}" if places else ""
    behind = f"; another intervention overwrites the whole value at {min(overwritten)}" if overwritten else ""
    return InterventionError(
        f"{edit.kind} at {edit.hook}{at} changes nothing that is asked for ({shown}){behind}: ask for logits there, or "
        "capture a hook point behind it"
    )


def refuse_idle_states(
    spec: HookSpec, edits: Pairs, shown: ShownValues, model: HookedModel, batch: TokenBatch | None = None
) -> None:
    """Refuse state interventions that nothing shown depends on, in any pass or in that of a batch."""
    # a pass that returns the state shows every one of them; a splice may lead anywhere
    if shown.carried or not model.metadata.carries_state or any(edit.fit for edit, _ in edits):
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


def _leads_to(state: StateEdit, view: OutputView, model: HookedModel, overwritten: frozenset[str]) -> bool:
    """Whether a value that is shown can depend on the state in one of the targeted layers."""
    all_layers = hides(state, model.metadata)
    layers = range(model.metadata.sizes.num_layers) if all_layers else state_layers(state, model.metadata)
    return any(
        view.source == begin or view.depends_on(begin, model.influence.of(begin, overwritten))
        for layer in layers
        for begin in _begins(state, layer, model)
    )


def _begins(state: StateEdit, layer: int, model: HookedModel) -> list[str]:
    """Hook points of a layer at which the effect of a state intervention begins."""
    # the first hook points behind the state; token shifts also change what r, k, v and the channel mix read
    points = [HookPoint.RwkvWkv(layer), HookPoint.RwkvState(layer), HookPoint.SsmY(layer), HookPoint.SsmState(layer)]
    if hides(state, model.metadata):  # what reads other tokens first
        points += [HookPoint.SsmConv(layer), HookPoint.AttnScores(layer)]
    elif "token_shift" in state.terms:
        points += [HookPoint.RwkvR(layer), HookPoint.RwkvK(layer), HookPoint.RwkvV(layer), HookPoint.MlpAct(layer)]
    if "convolution" in state.terms:
        points.append(HookPoint.SsmConv(layer))
    begins = [point.name for point in points]
    return [name for name in begins if name in model.metadata.hooks]


def _in_time(state: StateEdit, positions: ByRow | None, batch: TokenBatch) -> bool:
    """Whether any position shown, None for all, is one that the intervention changes: its own, or a later one."""
    behind = {*state.terms} <= READ_LATER
    if positions is None and not behind:
        return True
    last = [
        int(here.max()) if positions is None else max(positions[row]) for row, here in enumerate(batch.token_positions)
    ]
    return any(
        changed + behind <= last[row]
        for row in range(batch.batch)
        for changed in batch.absolutes(state.positions_, row)
    )
