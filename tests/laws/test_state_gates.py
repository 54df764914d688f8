"""Law: the gates of a call (values) equal those that the nodes of a compiled graph compute."""

from functools import cache

import numpy as np
import pytest
from repository import REPOSITORY

from mionnx import HookSpec, MIModel, StateKnockoutSpec, StateSteeringSpec
from mionnx.bind.state_gates import gates_of
from mionnx.compile.bake_gates import GATES, bake_gates
from mionnx.compile.token_facts import TokenFacts
from mionnx.engine.engines import ENGINES
from mionnx.engine.options import Options
from mionnx.graph import edited_graph
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.report import Report
from mionnx.inputs.token_batch import TokenBatch, make_token_batch
from mionnx.rewrite.intervene import TOKEN_POSITIONS

SPECS = {
    "knockout": HookSpec().set_state_knockout(StateKnockoutSpec().positions([0, -2])),
    "invisible": HookSpec().set_state_knockout(StateKnockoutSpec().positions([1, -1]).invisible()),
    "layers": HookSpec().set_state_knockout(StateKnockoutSpec().position(2).layer(1).decay().token_shift()),
    "erase": HookSpec().set_state_knockout(StateKnockoutSpec(terms=["erase"]).position(1)),
    "steering": HookSpec().set_state_steering(StateSteeringSpec(2.5).position("prompt").head(1)),
    "steered twice": HookSpec()
    .set_state_steering(StateSteeringSpec(0.5).positions([0, 2]))
    .set_state_steering(StateSteeringSpec(3.0).position(2).layer(0).heads([0, 1])),
    "both": HookSpec()
    .set_state_steering(StateSteeringSpec(2.0).positions([1, -1]))
    .set_state_knockout(StateKnockoutSpec().position(-1).layer(2).decay()),
}


CONVOLUTIONS = {
    "convolution": HookSpec().set_state_knockout(StateKnockoutSpec(terms=["convolution"]).positions([0, 2])),
    "in one layer": HookSpec().set_state_knockout(StateKnockoutSpec().position(1).layer(2).convolution()),
    "with a steering": HookSpec()
    .set_state_steering(StateSteeringSpec(0.5).position(1))
    .set_state_knockout(StateKnockoutSpec().position(-1).decay().convolution()),
}
CASES = [("world-rwkv7", name) for name in SPECS] + [("world-hybrid", name) for name in CONVOLUTIONS]


@cache
def opened(name: str) -> HookedModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / name).hooked


def prompts(model: HookedModel) -> TokenBatch:
    """Two prompts of unequal length."""
    return make_token_batch([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]], None, None, model)


def from_nodes(spec: HookSpec, batch: TokenBatch, model: HookedModel) -> dict[str, np.ndarray]:
    """The gates that the nodes of a compiled graph compute."""
    graph = edited_graph.edit(model.proto)
    readers = {name: graph.tensors()[name].outputs[0] for name in GATES.values() if name in graph.tensors()}
    places = {name: readers[name].inputs.index(graph.tensors()[name]) for name in readers}
    report = Report()
    bake_gates(graph, spec, model.metadata, TokenFacts(graph, report), report)
    graph.outputs = [readers[name].inputs[place] for name, place in places.items()]
    names = [tensor.name for tensor in graph.outputs]
    graph.cleanup(remove_unused_graph_inputs=True).toposort()
    program = ENGINES[Options.engine].open(edited_graph.serialise(graph, model.proto), model.folder, Options())
    found = program.run(names, {**batch.feeds(), TOKEN_POSITIONS: batch.token_positions})
    return {gate: found[name] for gate, name in zip(places, names, strict=True)}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_gates_as_values_equal_gates_as_nodes(name, case):
    model = opened(name)
    batch, spec = prompts(model), {**SPECS, **CONVOLUTIONS}[case]
    values = gates_of(spec, batch, model.metadata)
    nodes = from_nodes(spec, batch, model)
    assert values
    for gate, found in nodes.items():
        expected = np.asarray(values.get(gate, np.ones_like(found)))
        found, expected = np.broadcast_arrays(found, expected)
        text = batch.real[None, :, :, None]  # padding has no gate in models that go by the mask
        real = np.ones(1, bool) if model.metadata.shifts_tokens else np.broadcast_to(text, found.shape)
        assert np.array_equal(found & real if found.dtype == bool else found * real, expected * real), gate
