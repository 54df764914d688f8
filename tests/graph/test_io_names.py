"""Names of the past among a graph's inputs and outputs: those of the shipped models, layer by layer."""

import pytest
from repository import REPOSITORY

from mionnx.graph import onnx_file
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.io_names import KEYS_AND_VALUES, past_of


def test_one_layer():
    assert KEYS_AND_VALUES.layer_inputs(1) == ("past_key_values.1.key", "past_key_values.1.value")
    assert KEYS_AND_VALUES.layer_outputs(0) == ("present.0.key", "present.0.value")


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2", "world-rwkv7"])
def test_a_shipped_graph_has_these_names_and_no_other(name):
    model = HookedModel.open(REPOSITORY / "models" / name)
    inputs, outputs = onnx_file.interface(model.proto)
    ports = model.metadata.ports
    assert [one for one in inputs if one.startswith("past")] == [port.past for port in ports]
    assert [one for one in outputs if one.startswith("present")] == [port.present for port in ports]
    assert [past_of(output) for output in outputs] == [None, *(port.past for port in ports)]
