"""Kinds of layers in metadata: what each carries, and what is refused."""

from dataclasses import replace

import pytest
from repository import REPOSITORY
from toy_hybrid import HOOKS, write_hybrid

from mionnx.errors import ModelError
from mionnx.graph.hooked_model import GRAPH, HookedModel
from mionnx.graph.layers import Attention, Recurrence
from mionnx.graph.metadata import Metadata
from mionnx.graph.onnx_file import properties, read
from mionnx.graph.sizes import Sizes

SIZES = Sizes(3, 2, 2, 4, 8, 23)
BOTH = Attention("W", True, num_kv_heads=1)
SCAN = Recurrence("delta", 6, 4, 5, channels=12, kernel=4)
ALONE = Recurrence(channels=8, kernel=3)


def metadata(attention: list, recurrence: list) -> Metadata:
    return Metadata("family", "float16", SIZES, HOOKS, attention, recurrence=recurrence)


def test_ports_of_each_kind_of_layer():
    told = metadata([BOTH, None, None], [SCAN, ALONE, None])
    assert [(port.past, port.present, port.shape(2, 7)) for port in told.ports] == [
        ("past_key_values.0.key", "present.0.key", (2, 1, 7, 4)),
        ("past_key_values.0.value", "present.0.value", (2, 1, 7, 4)),
        ("past_state.0.conv", "present_state.0.conv", (2, 12, 3)),
        ("past_state.0.state", "present_state.0.state", (2, 6, 4, 5)),
        ("past_state.1.conv", "present_state.1.conv", (2, 8, 2)),
    ]
    assert [port.part for port in told.ports if port.sums] == ["state"]
    assert (told.attends, told.carries_state, told.state_alone, told.state_heads) == (True, True, False, 6)
    assert [layer.has_state for layer in told.layers] == [True, False, False]
    assert Metadata.from_props(told.to_props()) == told


def test_a_model_without_attention_carries_states_alone():
    told = metadata([None] * 3, [ALONE, SCAN, ALONE])
    assert told.state_alone
    assert Metadata.from_props(told.to_props()) == told


@pytest.mark.parametrize("name", ["world-llama", "world-gpt2", "world-rwkv7"])
def test_files_of_one_kind_of_layer_keep_their_metadata(name):
    props = properties(read(REPOSITORY / "models" / name / GRAPH))
    told = Metadata.from_props(props)
    written = told.to_props()
    assert {key: written[key] for key in props if key.startswith("mionnx.")} == props
    assert "mionnx.recurrence" not in written
    kinds = {(layer.attention is not None, layer.recurrence is not None) for layer in told.layers}
    assert kinds == {("rwkv" not in name, "rwkv" in name)}
    if "rwkv" in name:
        own = told.layers[0].recurrence
        assert (own.rule, own.token_shift, own.gates) == ("delta", True, ["write", "erase", "decay", "token_shift"])


@pytest.mark.parametrize(
    ("attention", "recurrence", "message"),
    [
        ([BOTH], [SCAN, None, None], "attention .* must be a list of 3 layers"),
        ([None] * 3, [SCAN], "recurrence .* must be a list of 3 layers"),
        ([None] * 3, [], "an entry"),
        ([None] * 3, [replace(SCAN, rule="other"), None, None], "a rule"),
        ([None] * 3, [replace(SCAN, n_heads=0), None, None], r"recurrence\[0\].n_heads 0 must be a positive"),
        ([None] * 3, [replace(SCAN, kernel=1), None, None], "2 or more"),
        ([None] * 3, [replace(SCAN, kernel=0), None, None], r"recurrence\[0\].kernel 0 must be a positive"),
        ([None] * 3, [replace(SCAN, gates=["all"]), None, None], "among write"),
        ([None] * 3, [Recurrence(), None, None], r"recurrence\[0\].channels 0 must be a positive"),
        ([None] * 3, [replace(SCAN, token_shift=2), None, None], "true or false"),
    ],
)
def test_damaged_layers_are_refused(attention, recurrence, message):
    with pytest.raises(ModelError, match=message):
        Metadata.from_props(metadata(attention, recurrence).to_props())


def test_metadata_that_do_not_agree_with_the_graph_are_refused(tmp_path):
    folder = write_hybrid(tmp_path / "toy-hybrid")
    told = HookedModel.open(folder).metadata
    proto = read(folder / GRAPH)
    for other, message in (
        (replace(told, recurrence=[replace(told.recurrence[0], kernel=4), None, None]), "past_state.0.conv is"),
        (replace(told, attention=[None, None, Attention("W_O1", True)]), r"has attention in the layers \[1\]"),
    ):
        del proto.metadata_props[:]
        for key, value in other.to_props().items():
            proto.metadata_props.add(key=key, value=value)
        (folder / GRAPH).write_bytes(proto.SerializeToString())
        with pytest.raises(ModelError, match=message):
            HookedModel.open(folder)
