"""Rewrite: state interventions of a recurrent model become nodes that work out its gates from the tokens' positions.

The gates are those of `mionnx.bind.rwkv_gates`, in the same order of steering and knockout, and padding
is invisible there too.
"""

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.bind.rwkv_gates import refuse_terms
from mionnx.compile.token_facts import TokenFacts, replace_input
from mionnx.errors import InterventionError
from mionnx.graph.builder import Builder
from mionnx.graph.metadata import Metadata
from mionnx.graph.report import Report
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

GATES = {
    "write": "state_write",
    "erase": "state_erase",
    "decay": "state_decay",
    "token_shift": "shift_distance",
}
State = StateKnockoutSpec | StateSteeringSpec


def bake_gates(graph: gs.Graph, spec: HookSpec, metadata: Metadata, calls: TokenFacts, report: Report) -> None:
    """Let the state interventions of a spec take the place of the gates' defaults.

    Raises:
        InterventionError: a state intervention on a model without recurrent state, or on layers, heads or terms that
            it does not have.
    """
    states: list[State] = [*spec.state_steerings, *spec.state_knockouts]  # knockouts after: they win
    for state in states:
        _check(state, metadata)
    for term, name in GATES.items() if states else ():
        if term == "erase" and not metadata.has_removal:
            continue
        build = Builder(graph, name, f"mionnx.{name}", report)
        gate = _padding(build, metadata.sizes.num_layers, calls)
        for n, state in enumerate(states):
            if term in state.terms:
                gate = build.node("Mul", [gate, _factor(build, f"{n}", state, metadata, calls)], f"{n}.product")
        if term in ("decay", "token_shift"):
            gate = build.node("Cast", [gate], "kept", np.bool_, to=9)
        _take_over(graph, name, _distances(build, gate) if term == "token_shift" else gate)


def _check(state: State, metadata: Metadata) -> None:
    sizes = metadata.sizes
    if not metadata.recurrent:
        raise InterventionError(f"{state.title}: this {metadata.family} model has no recurrent state")
    numbers = [position for position in state.positions_ if not isinstance(position, str)]
    longest = max([1, *(position + 1 if position >= 0 else -position for position in numbers)])
    state.validate(sizes.num_layers, longest, sizes.num_heads)
    refuse_terms(state, metadata)


def _padding(build: Builder, layers: int, calls: TokenFacts) -> gs.Tensor:
    """[layers, batch, seq, 1]: 1, and 0 at padding."""
    zero = build.constant("zero", 0, np.int64)
    real = build.node("GreaterOrEqual", [calls.positions, zero], "real", np.bool_)
    wide = build.node("Unsqueeze", [real, build.ints("real.axes", 0, 3)], "real.wide", np.bool_)
    ones = build.constant("ones", np.ones((layers, 1, 1, 1)), np.float32)
    return build.node("Where", [wide, ones, build.constant("nought", 0, np.float32)], "padding", np.float32)


def _distances(build: Builder, gate: gs.Tensor) -> gs.Tensor:
    """[layers, batch, seq + 1]: how far back the last token lies that each one may see; see `mionnx.bind.rwkv_gates`.

    The n-th visible token's column is looked up at n, the number of visible tokens before the one that asks: no more
    work than one pass over the text, where comparing all pairs of tokens would take its square.

    Args:
        build: the graph.
        gate: bool [layers, batch, seq, 1 or n_heads], the same for all heads: whether later tokens may see a token.
    """
    seen = build.node("Gather", [gate, build.constant("head", 0, np.int64)], "seen", np.bool_, axis=3)
    one, last = build.ints("one", 1), build.constant("last", 2, np.int64)
    ranks = build.node("CumSum", [build.node("Cast", [seen], "marks", np.int64, to=7), last], "ranks", np.int64)
    shape = build.node("Shape", [seen], "shape", np.int64)
    seq = build.node("Gather", [shape, build.ints("seq.axis", 2)], "seq", np.int64, axis=0)
    columns = _range(build, "columns", seq)
    after = build.node("Add", [seq, one], "after", np.int64)
    beyond = build.node("Add", [columns, after], "beyond", np.int64)  # of unseen tokens: nobody asks there
    slots = build.node("Where", [seen, ranks, beyond], "slots", np.int64)
    none = build.constant("none", -1, np.int64)
    doubled = build.node("Mul", [shape, build.ints("twice", 1, 1, 2)], "doubled", np.int64)
    longer = build.node("Add", [doubled, build.ints("two", 0, 0, 2)], "longer", np.int64)
    empty = build.node("Expand", [none, longer], "empty", np.int64)
    spread = build.node("Expand", [columns, shape], "spread", np.int64)
    table = build.node("ScatterElements", [empty, slots, spread], "table", np.int64, axis=2)
    asked = build.node("Pad", [ranks, build.ints("pads", 0, 0, 1, 0, 0, 0)], "asked", np.int64)
    before = build.node("GatherElements", [table, asked], "before", np.int64, axis=2)
    return build.node("Sub", [_range(build, "entries", after), before], "distance", np.int64)


def _range(build: Builder, step: str, end: gs.Tensor) -> gs.Tensor:
    """0 to an end, which is a tensor of one entry."""
    nought, one = build.constant(f"{step}.from", 0, np.int64), build.constant(f"{step}.step", 1, np.int64)
    return build.node("Range", [nought, build.node("Squeeze", [end], f"{step}.end", np.int64), one], step, np.int64)


def _factor(build: Builder, step: str, state: State, metadata: Metadata, calls: TokenFacts) -> gs.Tensor:
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


def _take_over(graph: gs.Graph, name: str, gate: gs.Tensor | None) -> None:
    tensors = graph.tensors()
    if gate is None or name not in tensors:
        raise InterventionError(f"the graph has no gate {name}")
    replace_input(graph, tensors[name], gate)
