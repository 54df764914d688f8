"""Rewrite: the inputs of interventions become part of the graph, so that the file stands alone.

1. A value becomes a constant, and so do the weights of a fragment. A value that differs from token to token cannot: a
   graph serves texts of any length.
2. Positions are worked out in the graph. A call in which the token at position 0 stands is the prompt's: negative
   positions count from its end, "prompt" means its tokens, and "generated" those of every later call.
3. A knockout mask holds for the positions of each row's text that it was made for; beyond them nothing is knocked out.
   A window is worked out from positions and holds in any text.
4. State interventions of a recurrent model take the place of the gates' defaults; see `mionnx.compile.bake_gates`.
5. Scores and patterns of padding stay as they are, whatever batch the graph is called with.
6. A knob stays an input, with a default: it multiplies what is added or removed, or is the factor itself.
7. The inputs of a metric likewise; see `mionnx.compile.bake_outputs`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.knockout_mask import KnockoutMask
from mionnx.bind.selection import Selection, reads_keys
from mionnx.compile.bake_gates import bake_gates, hidden_positions
from mionnx.compile.bake_outputs import bake_metric
from mionnx.compile.knobs import Knob
from mionnx.compile.token_facts import TokenFacts, replace_input
from mionnx.errors import InterventionError
from mionnx.graph.builder import Builder, Constant, Graph, Tensor, Variable
from mionnx.graph.edited_graph import sort_nodes
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.report import Report
from mionnx.inputs.token_batch import TokenBatch
from mionnx.rewrite.plan import Edit
from mionnx.spec.intervention import Intervention
from mionnx.spec.kinds import KINDS
from mionnx.spec.kinds.kind import ValueShape

# Axis of an activation -> the input of the graph, and its axis, that is as long.
DYNAMIC = {
    "batch": ("input_ids", 0),
    "seq": ("input_ids", 1),
    "seq_q": ("input_ids", 1),
    "seq_k": ("attention_mask", 1),
}


class TurnedKnob(NamedTuple):
    """A knob, the numbers and hook points of the interventions that it turns, and its default."""

    knob: Knob
    indices: list[int]
    hooks: list[str]
    default: float


def bake(graph: Graph, bound: BoundSpec, knobs: Mapping[str, TurnedKnob], report: Report) -> None:
    """Turn the inputs that a plan added into constants and nodes.

    Args:
        knobs: name of an input -> what it turns.
    """
    turned: dict[int, Constant] = {}  # by the number of the intervention that it turns
    for name, one in knobs.items():
        # A constant that becomes an input when the graph is written.
        turned |= dict.fromkeys(one.indices, Constant(name, np.array(one.default, np.float32)))
    report.inputs += knobs
    metadata = bound.model.metadata
    hidden = hidden_positions(bound.spec, metadata)
    calls = TokenFacts(graph, report, both=metadata.bidirectional, hidden=hidden)
    for n, (edit, intervention) in enumerate(bound.edits):
        _edit(calls, edit, intervention, bound.hooks.dims(HookPoint.parse(edit.hook)), turned.get(n))
    bake_gates(graph, bound.spec, metadata, calls, report)
    bake_metric(graph, bound, calls, report)
    # Nodes that work out positions were appended behind the edits that read them.
    sort_nodes(graph)


def knob_default(name: str, where: Sequence[tuple[Edit, Intervention]]) -> float:
    """The default of a knob, from the interventions that it turns."""
    defaults = set()
    for edit, intervention in where:
        strength = intervention.rules.strength(*intervention.values)
        if strength is None:
            having = ", ".join(kind.name for kind in KINDS.values() if kind.has_strength)
            raise InterventionError(
                f"knob {name!r}: {intervention.kind} at {edit.hook} has no strength; kinds that do: {having} "
                "(scale by one factor)"
            )
        defaults.add(strength)
    # One input has one default, and the graph without it must give what the spec says.
    if len(defaults) != 1:
        raise InterventionError(f"knob {name!r} has several defaults, {sorted(defaults)}: give each a knob of its own")
    return float(defaults.pop())


def _edit(
    calls: TokenFacts, edit: Edit, intervention: Intervention, shape: Sequence[str | int], knob: Constant | None
) -> None:
    graph, tensors, positions = calls.graph, calls.graph.tensors(), intervention.positions
    if intervention.rows is not None or (isinstance(positions, tuple) and isinstance(positions[0], tuple)):
        raise InterventionError(
            f"{edit.kind} at {edit.hook}: batch rows are a matter of one call; a compiled graph serves any batch"
        )
    place = _place(edit, intervention, shape)
    if edit.masked:
        _where(calls, place)
    if edit.at_experts is not None:
        _become(graph, tensors[edit.experts_input], np.array(intervention.experts))
    if positions is not None:
        chosen = calls.chosen(f"{edit.prefix}.chosen", [positions] if isinstance(positions, str) else positions)
        replace_input(graph, tensors[edit.positions_input], chosen)
    if intervention.fragment is not None:
        for name, array in intervention.fragment.weights.items():
            _become(graph, tensors[edit.weight_input(name)], array)
    inputs = [tensors[name] for name in edit.value_inputs]
    if intervention.rules.by_distance:
        replace_input(graph, inputs[0], calls.window(int(intervention.values[0]), inputs[0].dtype))
    elif intervention.rules.shape is ValueShape.ATTENTION_MASK:
        _refuse_mask(edit, intervention)
        replace_input(graph, inputs[0], _mask(calls, place))
    else:
        _values(calls, place, inputs, knob)


def _where(calls: TokenFacts, place: Selection) -> None:
    """Select heads, neurons and experts, and scores and pattern entries that are not of padding."""
    variable, mask = calls.graph.tensors()[place.edit.mask_input], place.mask()
    texts = calls.of_texts(place.edit.axes) if reads_keys(place.edit, place.intervention) else None
    if texts is None:
        _become(calls.graph, variable, mask)
    else:
        replace_input(calls.graph, variable, texts if mask.all() else calls.op.And(mask, texts))


def _values(calls: TokenFacts, place: Selection, inputs: Sequence[Variable], knob: Constant | None) -> None:
    """Turn the inputs of values into constants, times a knob's strength if there is one."""
    graph, edit, rules = calls.graph, place.edit, place.intervention.rules
    arrays = _fixed(place, inputs[0].dtype) if inputs else ()
    # A value of the whole activation is not broadcast by its kind's nodes: only a graph that spreads it serves any
    # length.
    if rules.shape is ValueShape.EXACT and not (edit.at_positions or edit.masked):
        _spread(calls, place, inputs[0], arrays[0])
        return
    if knob is None:
        for variable, array in zip(inputs, arrays, strict=True):
            _become(graph, variable, array)
        return
    (variable, *others), (array, *fixed) = inputs, arrays
    for other, value in zip(others, fixed, strict=True):
        _become(graph, other, value)
    op = Builder(graph, edit.hook, f"{edit.prefix}.knob", calls.report)
    # A knob is float32 for whoever feeds it, whatever the graph's dtype is.
    strength = knob if np.dtype(variable.dtype) == np.float32 else op.Cast(knob, to=variable.dtype)
    turned = rules.with_strength(op, array, strength)
    if rules.strength_step is None:
        replace_input(graph, variable, turned)
        return
    # The strength enters at one step of the intervention; other steps read the value itself.
    step = f"{edit.prefix}.{rules.strength_step}:"
    node = next(node for node in graph.nodes if node.name.startswith(step))
    node.inputs = [turned if entry is variable else entry for entry in node.inputs]
    _become(graph, variable, array)


def _spread(calls: TokenFacts, place: Selection, value: Variable, array: NDArray[Any]) -> None:
    """Expand a constant to the whole activation that it stands for, in any batch and text."""
    tensors = calls.graph.tensors()
    op = Builder(calls.graph, place.edit.hook, f"{place.edit.prefix}.spread", calls.report)
    sizes: list[Any] = []
    for name, size in zip(place.edit.axes, place.shape, strict=True):
        source, axis = DYNAMIC.get(name, ("", 0))
        sizes.append(op.Shape(tensors[source], start=axis, end=axis + 1) if source else np.array([size]))
    replace_input(calls.graph, value, op.Expand(array, op.Concat(*sizes, axis=0)))


def _place(edit: Edit, intervention: Intervention, shape: Sequence[str | int]) -> Selection:
    """The intervention on one token of one row, since a compiled graph's batch is not known."""
    one = np.ones((1, 1), np.int64)
    call = TokenBatch(one, one, one - 1, final_lengths=np.array([1]))
    sizes = tuple(dim if isinstance(dim, int) else 1 for dim in shape)
    return Selection(replace(edit, at_positions=False), replace(intervention, positions=None, rows=None), sizes, call)


def _fixed(place: Selection, dtype: Any) -> tuple[NDArray[Any], ...]:
    """The values as constants of any call, of one entry along axes that are others in every call."""
    try:
        return place.values(dtype)
    except InterventionError as error:
        raise InterventionError(
            f"{error}; a compiled graph serves texts of any length, so a value has one entry for all tokens: give each "
            "position an intervention of its own"
        ) from None


def _mask(calls: TokenFacts, place: Selection) -> Tensor:
    """Take a knockout mask's entries at the text positions of a call; 0 beyond its own text."""
    edit, knockout = place.edit, place.knockout_mask
    assert isinstance(knockout, KnockoutMask)  # not one by distance
    mask = knockout.value  # [1, n_heads or 1, seq_q or 1, seq_k or 1]
    op = Builder(calls.graph, edit.hook, f"{edit.prefix}.mask", calls.report)
    dtype = calls.graph.tensors()[edit.value_input].dtype
    heads, *axes = mask.shape[1:]
    # An entry of 0 behind the last along each axis: index `size` reads it.
    full = np.pad(mask.astype(dtype), [(0, 0), (0, 0), *((0, int(size > 1)) for size in axes)])
    index: Tensor | None = None
    for axis, size, positions in ((0, axes[0], calls.positions), (1, axes[1], calls.keys)):
        if size > 1:
            beyond = op.Or(op.Less(positions, 0), op.Greater(positions, size))
            # Queries [batch, seq, 1] and keys [batch, 1, total] together index [batch, seq, total].
            at = op.Unsqueeze(op.Where(beyond, size, positions, dtype=np.int64), [2 - axis])
            index = at if index is None else op.Add(op.Mul(index, [size + 1]), at)  # row by row, as in `flat`
    if index is None:
        constant: Tensor = op.constant(full)
        return constant
    flat = op.constant(full.reshape(heads, -1))
    return op.Transpose(op.Gather(flat, index, axis=1), perm=[1, 0, 2, 3])  # from [heads, batch, seq, total]


def _refuse_mask(edit: Edit, intervention: Intervention) -> None:
    """Refuse a mask for the chosen positions of one call, and one of later keys only."""
    positions, mask = intervention.positions, np.atleast_2d(intervention.values[0])
    queries, keys = mask.shape[-2:]
    if isinstance(positions, tuple) and 1 < queries == len(positions):
        raise InterventionError(
            f"{edit.kind} at {edit.hook}: a mask with one row for each of its positions is a matter of one call: give "
            "the mask of the whole text"
        )
    if queries > 1 and not np.isneginf(mask[..., np.tri(queries, keys, dtype=bool)]).any():
        raise InterventionError(f"{edit.kind} at {edit.hook}: it knocks nothing out: no query reads a later key")


def _become(graph: Graph, variable: Variable, array: NDArray[Any]) -> None:
    graph.inputs = [entry for entry in graph.inputs if entry is not variable]
    variable.to_constant(np.ascontiguousarray(array))
