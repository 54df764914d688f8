"""Rewrite: state interventions of a recurrent model become nodes that work out its gates from the tokens' positions.

The gates are those of `mionnx.bind.state_gates`, in the same order of steering and knockout, and padding
is invisible there too.
"""

import numpy as np

from mionnx.bind.state_gates import hides, refuse_terms, state_layers
from mionnx.compile.token_facts import TokenFacts, replace_input
from mionnx.errors import InterventionError
from mionnx.graph.builder import Builder, Graph, Tensor
from mionnx.graph.metadata import Metadata
from mionnx.graph.report import Report
from mionnx.rewrite.intervene import TOKEN_POSITIONS, among
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.state_interventions import StateKnockoutSpec, StateSteeringSpec

GATES = {
    "write": "state_write",
    "erase": "state_erase",
    "decay": "state_decay",
    "token_shift": "shift_distance",
    "convolution": "conv_seen",
}
OWN_NODES = ("mionnx.", TOKEN_POSITIONS)  # begin the names of nodes that count tokens
State = StateKnockoutSpec | StateSteeringSpec


def bake_gates(graph: Graph, spec: HookSpec, metadata: Metadata, calls: TokenFacts, report: Report) -> None:
    """Let the state interventions of a spec take the place of the gates' defaults."""
    states: list[State] = [*spec.state_steerings, *spec.state_knockouts]  # knockouts after: they win
    for state in states:
        _check(state, metadata)
    _hide(graph, calls, report)
    for term, name in GATES.items() if states else ():
        if term not in metadata.state_gates:
            continue
        op = Builder(graph, name, f"mionnx.{name}", report)
        real = op.Unsqueeze(op.GreaterOrEqual(calls.positions, 0), [0, 3])  # tokens that are no padding
        gate = op.Where(real, np.ones((metadata.sizes.num_layers, 1, 1, 1), np.float32), np.float32(0))
        for n, state in enumerate(states):
            if term in state.terms and not hides(state, metadata):
                gate = op.Mul(gate, _factor(op, f"{n}", state, term, metadata, calls))
        # These gates are switches: a token is let through or not.
        if term in ("decay", "token_shift", "convolution"):
            gate = op.Cast(gate, to=np.bool_)
        tensors = graph.tensors()
        if name not in tensors:
            raise InterventionError(f"the graph has no gate {name}")
        replace_input(graph, tensors[name], _distances(op, gate) if term == "token_shift" else gate)


def hidden_positions(spec: HookSpec, metadata: Metadata) -> list[int | str]:
    """The positions of tokens that a spec hides from all layers.

    Raises:
        InterventionError: others than positions from the start.
    """
    states = [state for state in spec.state_knockouts if hides(state, metadata)]
    positions = [position for state in states for position in state.positions_]
    if any(isinstance(one, str) or one < 0 for one in positions):
        raise InterventionError(
            f"{states[0].title}: a compiled graph does not remember where a prompt ended, and hides tokens only by "
            f"positions from the start, got {positions!r}"
        )
    return positions


def _hide(graph: Graph, calls: TokenFacts, report: Report) -> None:
    """Let the model read a mask without invisible tokens; positions are counted on the mask as it comes."""
    if not calls.hidden:
        return
    mask, keys = graph.tensors()["attention_mask"], calls.keys
    readers = [node for node in mask.outputs if not node.name.startswith(OWN_NODES)]
    op = Builder(graph, "attention_mask", "mionnx.hidden", report)
    hidden = among(op, keys, op.constant([[*calls.hidden]]))
    shown = op.Where(hidden, op.constant(0), mask, dtype=mask.dtype)
    for node in readers:
        node.inputs = [shown if entry is mask else entry for entry in node.inputs]


def _check(state: State, metadata: Metadata) -> None:
    refuse_terms(state, metadata)
    numbers = [position for position in state.positions_ if not isinstance(position, str)]
    # At least as many tokens as the positions ask for; a compiled graph knows no length.
    longest = max([1, *(position + 1 if position >= 0 else -position for position in numbers)])
    state.validate(metadata.sizes.num_layers, longest, max(metadata.state_heads, 1))


def _distances(op: Builder, gate: Tensor) -> Tensor:
    """[layers, batch, seq + 1]: distance to the last token that each may see; `gate` is bool [..., 1 or n_heads]."""
    # The n-th visible token's column is looked up at n, the number of visible tokens before the one that asks: no more
    # work than one pass over the text, where comparing all pairs of tokens would take its square.
    seen = op.Gather(gate, 0, axis=3)
    ranks = op.CumSum(op.Cast(seen, to=np.int64), 2)
    shape = op.Shape(seen)
    seq = op.Gather(shape, [2], axis=0)
    columns = op.Range(0, op.Squeeze(seq), 1)
    after = op.Add(seq, [1])
    beyond = op.Add(columns, after)  # for unseen tokens: nobody asks there
    slots = op.Where(seen, ranks, beyond)
    empty = op.Expand(-1, op.Add(op.Mul(shape, [1, 1, 2]), [0, 0, 2]))
    table = op.ScatterElements(empty, slots, op.Expand(columns, shape), axis=2)
    # A token sees those before it: ranks one further to the right, and 0 before the first.
    before = op.GatherElements(table, op.Pad(ranks, [0, 0, 1, 0, 0, 0]), axis=2)
    return op.Sub(op.Range(0, op.Squeeze(after), 1), before)


def _factor(op: Builder, step: str, state: State, term: str, metadata: Metadata, calls: TokenFacts) -> Tensor:
    """[layers, batch, seq, n_heads]: the factor at the state's positions, layers, heads; else 1."""
    # a convolution has no heads
    count = 1 if term == "convolution" else metadata.state_heads
    factor = np.ones((metadata.sizes.num_layers, 1, 1, count), np.float32)
    heads, scale = list(range(count)), 0.0
    if isinstance(state, StateSteeringSpec):
        heads, scale = list(state.target_heads(count)), state.scale
    for layer in state_layers(state, metadata, term):
        factor[layer, 0, 0, heads] = scale
    chosen = calls.chosen(f"{op.prefix}.{step}", state.positions_)
    here = op.Unsqueeze(among(op, calls.positions, chosen), [0, 3])
    return op.Where(here, factor, np.float32(1))
