"""Rewrite: the inputs of interventions become part of the graph, so that the file stands alone.

1. A value becomes a constant, and so do the weights of a fragment. A value that differs from token to token cannot: a
   graph serves texts of any length.
2. Positions are worked out in the graph. A call in which the token at position 0 stands is the prompt's: negative
   positions count from its end, "prompt" means its tokens, and "generated" those of every later call.
3. A knockout mask holds for the columns it was made for; beyond them nothing is knocked out.
4. State interventions of a recurrent model take the place of the gates' defaults.
5. A knob stays an input, with a default: it multiplies what is added or removed, or is the factor itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from mionnx.call import Call
from mionnx.errors import InterventionError
from mionnx.hookpoint import HookPoint
from mionnx.intervention import Intervention
from mionnx.metadata import Metadata
from mionnx.place import Place
from mionnx.rewrite.build import Builder
from mionnx.rewrite.intervene import TOKEN_POSITIONS, token_positions
from mionnx.rewrite.plan import Edit, Plan, Report
from mionnx.spec import HookSpec
from mionnx.state_spec import StateKnockoutSpec, StateSteeringSpec

NOWHERE = -2  # no token stands there; padding stands at -1
KNOBS = {"add": 1.0, "project_out": 1.0, "scale": None}  # kind -> the knob's default; None: the factor itself
GATES = {"write": "state_write", "erase": "state_erase", "decay": "state_decay"}
State = StateKnockoutSpec | StateSteeringSpec


def bake(
    graph: gs.Graph,
    plan: Plan,
    spec: HookSpec,
    shapes: Mapping[str, Sequence[str | int]],
    metadata: Metadata,
    knobs: Mapping[str, Sequence[int]],
    report: Report,
) -> None:
    """Turn the inputs that a plan added into constants and nodes.

    Args:
        graph: a graph that the plan was carried out on.
        plan, spec: the structure, and the values.
        shapes: of each hook point that is intervened at: its axes, numbers where they are fixed.
        metadata: of the hooked model.
        knobs: name of an input -> which of the spec's interventions it is for.
        report: what is done is noted here.

    Raises:
        InterventionError: what only a single call can have: batch rows, values for several tokens, token shift.
    """
    turned = {
        at: _knob(graph, name, [spec.interventions[n] for n in where], report)
        for name, where in knobs.items()
        for at in where
    }
    calls = _Calls(graph, report)
    for n, (edit, (_, intervention)) in enumerate(zip(plan.edits, spec.interventions, strict=True)):
        _edit(graph, edit, intervention, shapes[edit.hook], calls, turned.get(n), report)
    _gates(graph, spec, metadata, calls, report)
    graph.toposort()


def _knob(graph: gs.Graph, name: str, where: Sequence[tuple[HookPoint, Intervention]], report: Report) -> gs.Constant:
    """A knob's default, as a constant that becomes an input when the graph is written."""
    defaults = set()
    for point, intervention in where:
        value = np.asarray(intervention.value)
        if intervention.kind not in KNOBS or (intervention.kind == "scale" and value.size != 1):
            raise InterventionError(
                f"knob {name!r}: {intervention.kind} at {point} has no strength; kinds that do: add, project_out, and "
                "scale by one factor"
            )
        fixed = KNOBS[intervention.kind]
        defaults.add(float(value.item()) if fixed is None else fixed)
    if len(defaults) != 1:
        raise InterventionError(f"knob {name!r} has several defaults, {sorted(defaults)}: give each a knob of its own")
    report.inputs.append(name)
    return gs.Constant(name, np.array(defaults.pop(), np.float32))


class _Calls:
    """What a graph can tell of the call it is run in; worked out once, where it is needed."""

    def __init__(self, graph: gs.Graph, report: Report) -> None:
        self.graph, self.report = graph, report
        self.build = Builder(graph, TOKEN_POSITIONS, "mionnx.call", report)
        self._known: dict[str, gs.Tensor] = {}

    @property
    def positions(self) -> gs.Tensor:
        """[batch, seq]: each token's position in its row's text, -1 for padding."""
        if "positions" not in self._known:
            found = self.graph.tensors().get(f"{TOKEN_POSITIONS}.of_tokens") or self.graph.tensors().get(
                TOKEN_POSITIONS
            )
            self._known["positions"] = found if found is not None else token_positions(self.graph, self.report)
        return self._known["positions"]

    @property
    def length(self) -> gs.Tensor:
        """[batch, 1]: how many tokens each row's text has by now."""
        if "length" not in self._known:
            last = self.build.node("ReduceMax", [self.positions, self.build.ints("axis", 1)], "last", keepdims=1)
            self._known["length"] = self.build.node("Add", [last, self.build.constant("one", 1, np.int64)], "length")
        return self._known["length"]

    @property
    def is_prompt(self) -> gs.Tensor:
        """[batch, 1]: whether this call is the prompt's."""
        if "is_prompt" not in self._known:
            first = self.build.node(
                "Equal", [self.positions, self.build.constant("zero", 0, np.int64)], "first", dtype=np.bool_
            )
            numbers = self.build.node("Cast", [first], "firsts", np.int32, to=6)
            found = self.build.node("ReduceMax", [numbers, self.build.ints("across", 1)], "any_first", keepdims=1)
            self._known["is_prompt"] = self.build.node("Cast", [found], "is_prompt", np.bool_, to=9)
        return self._known["is_prompt"]

    def chosen(self, prefix: str, positions: Sequence[int | str]) -> gs.Tensor:
        """[batch or 1, n]: the absolute positions that are meant in this call, NOWHERE for those that are not in it."""
        build = Builder(self.graph, prefix, prefix, self.report)
        numbers = [position for position in positions if not isinstance(position, str)]
        parts: list[gs.Tensor] = []
        nowhere = build.constant("nowhere", NOWHERE, np.int64)
        if numbers:
            table = build.constant("table", [numbers], np.int64)
            parts.append(table)
            if min(numbers) < 0:
                ahead = build.constant("ahead", [[number >= 0 for number in numbers]], np.bool_)
                counted = build.node("Add", [self.length, table], "counted")
                there = build.node("Where", [self.is_prompt, counted, nowhere], "there", np.int64)
                parts = [build.node("Where", [ahead, table, there], "absolute", np.int64)]
        for phase in dict.fromkeys(position for position in positions if isinstance(position, str)):
            real = build.node(
                "GreaterOrEqual", [self.positions, build.constant("zero", 0, np.int64)], f"{phase}.real", dtype=np.bool_
            )
            now = self.is_prompt
            if phase == "generated":
                now = build.node("Not", [now], "generated.now")
            both = build.node("And", [real, now], f"{phase}.both")
            parts.append(build.node("Where", [both, self.positions, nowhere], f"{phase}.at", np.int64))
        if len(parts) == 1:
            return parts[0]
        rows = build.node("Shape", [self.positions], "rows", np.int64, start=0, end=1)
        wide = build.node("Concat", [rows, build.ints("one", 1)], "wide", axis=0)
        spread = [build.node("Expand", [part, wide], f"spread.{i}", np.int64) for i, part in enumerate(parts)]
        return build.node("Concat", spread, "all", np.int64, axis=1)


def _edit(
    graph: gs.Graph,
    edit: Edit,
    intervention: Intervention,
    shape: Sequence[str | int],
    calls: _Calls,
    knob: gs.Constant | None,
    report: Report,
) -> None:
    if intervention.rows is not None or _by_row(intervention.positions):
        raise InterventionError(
            f"{edit.kind} at {edit.hook}: batch rows are a matter of one call; a compiled graph serves any batch"
        )
    tensors = graph.tensors()
    place = _place(edit, intervention, shape)
    if edit.masked:
        _become(graph, tensors[edit.mask_input], place.mask())
    given: Any = intervention.positions
    if given is not None:
        chosen = calls.chosen(f"{edit.prefix}.chosen", [given] if isinstance(given, str) else given)
        _replace(graph, tensors[edit.positions_input], chosen)
    if intervention.fragment is not None:
        for name, array in intervention.fragment.weights.items():
            _become(graph, tensors[edit.weight_input(name)], array)
    if intervention.value is None:
        return
    value, dtype = tensors[edit.value_input], tensors[edit.value_input].dtype
    if edit.kind == "knockout":
        _replace(graph, value, _mask(graph, edit, intervention.value, report))
        return
    array = _fixed(place, intervention, dtype)
    if knob is None:
        _become(graph, value, array)
        return
    build = Builder(graph, edit.hook, f"{edit.prefix}.knob", report)
    strength = knob if np.dtype(dtype) == np.float32 else build.node("Cast", [knob], "cast", dtype, to=_number(dtype))
    if edit.kind == "scale":
        _replace(graph, value, strength)
        return
    constant = gs.Constant(f"{value.name}.full", array)
    turned = build.node("Mul", [constant, strength], "turned", dtype)
    if edit.kind == "project_out":  # x - strength (x D^T) D: the directions enter twice, the strength once
        along = next(node for node in graph.nodes if node.name == f"{edit.prefix}.along:MatMul")
        along.inputs[1] = turned
        _become(graph, value, array)
        return
    _replace(graph, value, turned)


def _by_row(positions: Any) -> bool:
    return positions is not None and not isinstance(positions, str) and isinstance(positions[0], tuple)


def _place(edit: Edit, intervention: Intervention, shape: Sequence[str | int]) -> Place:
    """The intervention on one token of one row: what is left of its shape when the call is not known."""
    one = np.ones((1, 1), np.int64)
    call = Call(one, one, one - 1, horizon=np.array([1]))
    sizes = tuple(dim if isinstance(dim, int) else 1 for dim in shape)
    return Place(replace(edit, at_positions=False), replace(intervention, positions=None, rows=None), sizes, call)


def _fixed(place: Place, intervention: Intervention, dtype: Any) -> NDArray[Any]:
    """The value as a constant of any call.

    Raises:
        InterventionError: it has several entries along an axis that is another in every call.
    """
    try:
        return place.value(np.asarray(intervention.value), dtype)
    except InterventionError as error:
        raise InterventionError(
            f"{error}; a compiled graph serves texts of any length, so a value has one entry for all tokens: give each "
            "position an intervention of its own"
        ) from None


def _mask(graph: gs.Graph, edit: Edit, given: NDArray[Any], report: Report) -> gs.Tensor:
    """A knockout mask in place: rows and columns of the whole text, those beyond it zero."""
    build = Builder(graph, edit.hook, f"{edit.prefix}.mask", report)
    dtype = graph.tensors()[edit.value_input].dtype
    full = given.astype(dtype).reshape((1,) * (len(edit.axes) - given.ndim) + given.shape)
    full = np.pad(full, [(0, 0)] * (full.ndim - 2) + [(0, int(size > 1)) for size in full.shape[-2:]])
    mask: gs.Tensor = build.constant("whole", full, dtype)
    tensors = graph.tensors()
    total = build.node("Shape", [tensors["attention_mask"]], "total", np.int64, start=1, end=2)
    seq = build.node("Shape", [tensors["input_ids"]], "seq", np.int64, start=1, end=2)
    nought, one = build.constant("nought", 0, np.int64), build.constant("one", 1, np.int64)
    keys = build.node("Range", [nought, build.node("Squeeze", [total], "keys"), one], "columns", np.int64)
    first = build.node("Squeeze", [build.node("Sub", [total, seq], "first")], "past")
    end = build.node("Squeeze", [total], "end")
    queries = build.node("Range", [first, end, one], "rows", np.int64)
    for axis, index, step in ((-2, queries, "queries"), (-1, keys, "keys_in")):
        size = full.shape[axis]
        if size > 1:
            last = build.constant(f"{step}.last", size - 1, np.int64)
            inside = build.node("Min", [index, last], step, np.int64)
            mask = build.node("Gather", [mask, inside], f"{step}.gathered", dtype, axis=full.ndim + axis)
    return mask


def _gates(graph: gs.Graph, spec: HookSpec, metadata: Metadata, calls: _Calls, report: Report) -> None:
    states: list[State] = [*spec.state_steerings, *spec.state_knockouts]  # knockouts after: they win
    for state in states:
        _check(state, metadata)
    for term, name in GATES.items():
        here = [state for state in states if term in state.terms]
        if not here or (term == "erase" and not metadata.has_removal):
            continue
        build = Builder(graph, name, f"mionnx.{name}", report)
        gate: gs.Tensor | None = None
        for n, state in enumerate(here):
            factor = _factor(build, f"{n}", state, metadata, calls)
            gate = factor if gate is None else build.node("Mul", [gate, factor], f"{n}.product")
        if gate is not None and term == "decay":
            gate = build.node("Cast", [gate], "kept", np.bool_, to=9)
        _take_over(graph, name, gate)


def _check(state: State, metadata: Metadata) -> None:
    sizes = metadata.sizes
    if not metadata.recurrent:
        raise InterventionError(f"{state.title}: this {metadata.family} model has no recurrent state")
    if "token_shift" in state.terms:
        raise InterventionError(
            f"{state.title}: token shift (and with it `invisible`) depends on all tokens of a call and cannot be "
            "compiled; terms that can: write, erase, decay"
        )
    numbers = [position for position in state.positions_ if not isinstance(position, str)]
    longest = max([1, *(position + 1 if position >= 0 else -position for position in numbers)])
    state.validate(sizes.num_layers, longest, sizes.num_heads)
    if state.terms == ["erase"] and not metadata.has_removal:
        raise InterventionError(f"{state.title}: {metadata.family} has no removal term to erase")


def _factor(build: Builder, step: str, state: State, metadata: Metadata, calls: _Calls) -> gs.Tensor:
    """[layers, batch, seq, n_heads]: the factor at the state's positions, layers and heads, and 1 elsewhere."""
    sizes = metadata.sizes
    factor = np.ones((sizes.num_layers, 1, 1, sizes.num_heads), np.float32)
    heads, scale = list(range(sizes.num_heads)), 0.0
    if isinstance(state, StateSteeringSpec):
        heads, scale = list(state.target_heads(sizes.num_heads)), state.scale
    for layer in state.target_layers(sizes.num_layers):
        factor[layer, 0, 0, heads] = scale
    chosen = calls.chosen(f"{build.prefix}.{step}", state.positions_)
    each = build.node("Unsqueeze", [calls.positions, build.ints(f"{step}.last", 2)], f"{step}.each", np.int64)
    among = build.node("Unsqueeze", [chosen, build.ints(f"{step}.middle", 1)], f"{step}.among", np.int64)
    hits = build.node("Equal", [each, among], f"{step}.equal", dtype=np.bool_)
    numbers = build.node("Cast", [hits], f"{step}.hits", np.int32, to=6)
    found = build.node("ReduceMax", [numbers, build.ints(f"{step}.over", 2)], f"{step}.any", keepdims=0)
    at = build.node("Cast", [found], f"{step}.here", np.bool_, to=9)
    wide = build.node("Unsqueeze", [at, build.ints(f"{step}.axes", 0, 3)], f"{step}.at", np.bool_)
    one, full = build.constant(f"{step}.one", 1, np.float32), build.constant(f"{step}.factor", factor, np.float32)
    return build.node("Where", [wide, full, one], f"{step}.where", np.float32)


def _become(graph: gs.Graph, variable: gs.Variable, array: NDArray[Any]) -> None:
    """Let an input be a constant."""
    graph.inputs = [entry for entry in graph.inputs if entry is not variable]
    variable.to_constant(np.ascontiguousarray(array))


def _replace(graph: gs.Graph, variable: gs.Tensor, by: gs.Tensor) -> None:
    """Let every reader of an input read something else."""
    graph.inputs = [entry for entry in graph.inputs if entry is not variable]
    for node in [*variable.outputs]:
        node.inputs = [by if entry is variable else entry for entry in node.inputs]


def _take_over(graph: gs.Graph, name: str, gate: gs.Tensor | None) -> None:
    tensors = graph.tensors()
    if gate is None or name not in tensors:
        raise InterventionError(f"the graph has no gate {name}")
    _replace(graph, tensors[name], gate)


def _number(dtype: Any) -> int:
    import onnx

    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
