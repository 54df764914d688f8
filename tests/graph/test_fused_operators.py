"""Fused operators in the metadata: what cannot stand for its nodes is refused."""

import base64
import json

import fused_llama
import onnx
import pytest

from exporters.adopt import adopt
from mionnx import ModelError
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.fused_operators import LONGEST_NODE_TEXT, read_fused, restore, written
from mionnx.graph.hooked_model import HookedModel

KEY = "mionnx.fused"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    adopt(fused_llama.write(folder / "stock"), folder / "hooked")
    return folder / "hooked"


def node_of(folder, operator):
    """One of the fused operators of the metadata."""
    texts = HookedModel.open(folder).metadata.fused
    nodes = [onnx.NodeProto.FromString(base64.b64decode(text)) for text in texts]
    return next(node for node in nodes if node.op_type == operator)


def rename(node, **fields):
    for name, value in fields.items():
        setattr(node, name, value)


def attribute(node, made):
    node.attribute.append(made)


def tensor():
    return onnx.helper.make_attribute("value", onnx.helper.make_tensor("t", 1, [1], [0.0]))


def graph():
    return onnx.helper.make_attribute("body", onnx.helper.make_graph([], "inner", [], []))


TAMPERED = {
    "another operator": lambda node: rename(node, op_type="Loop"),
    "another domain": lambda node: rename(node, domain="ai.onnx.ml"),
    "a tensor as an attribute": lambda node: attribute(node, tensor()),
    "a graph as an attribute": lambda node: attribute(node, graph()),
    "an unknown attribute": lambda node: attribute(node, onnx.helper.make_attribute("sliding_window_cache", 1)),
    "an input that is no value": lambda node: node.input.__setitem__(0, "nothing"),
    "an output that is no value": lambda node: node.output.__setitem__(0, "nothing"),
    "no output": lambda node: node.output.__delitem__(slice(None)),
    "a later output": lambda node: node.output.__setitem__(0, "hook_logits"),
    "an output before its inputs": lambda node: node.output.__setitem__(0, "hook_embed"),
    "a value of another layer read": lambda node: node.input.__setitem__(0, "hook_embed"),
    "a weight that it does not read": lambda node: node.input.__setitem__(7, "cos_cache.other"),
    "lengths from the text": lambda node: node.input.__setitem__(5, "logits"),
}


@pytest.mark.parametrize("change", TAMPERED)
def test_what_cannot_stand_for_its_nodes_is_refused(change, folder):
    node, flow = node_of(folder, "GroupQueryAttention"), Dataflow(HookedModel.open(folder).proto)
    assert read_fused(flow, [written(node)])
    TAMPERED[change](node)
    with pytest.raises(ModelError, match="fused"):
        read_fused(flow, [written(node)])


@pytest.mark.parametrize("change", ["another value", "no number so low", "other booleans"])
def test_a_mask_that_is_added_is_made_of_the_booleans_of_its_nodes(change, tmp_path):
    file = fused_llama.write(tmp_path / "stock", standard=True, adds=True)
    (file.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    adopt(file, tmp_path / "hooked")
    node, proto = node_of(tmp_path / "hooked", "MultiHeadAttention"), HookedModel.open(tmp_path / "hooked").proto
    assert read_fused(Dataflow(proto), [written(node)])
    added = next(one for one in proto.graph.node if node.input[5] in one.output)
    if change == "another value":
        node.input[5] = added.input[1]
    elif change == "no number so low":
        added.input[2] = added.input[1]
    else:
        others = onnx.helper.make_node("Not", [added.input[0]], ["others"])
        proto.graph.node.insert([*proto.graph.node].index(added), others)
        added.input[0] = "others"
    with pytest.raises(ModelError, match="fused MultiHeadAttention"):
        read_fused(Dataflow(proto), [written(node)])


@pytest.mark.parametrize(
    "texts",
    [
        ["no base64!"],
        ["ä"],
        [base64.b64encode(b"\xff\xff no protobuf").decode()],
        ["A" * (LONGEST_NODE_TEXT + 4)],
        [7],
        "text",
        {"a": 1},
    ],
    ids=["base64", "unicode", "protobuf", "length", "number", "text", "table"],
)
def test_damaged_metadata_are_refused_when_a_model_is_opened(texts, folder, tmp_path):
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    next(entry for entry in proto.metadata_props if entry.key == KEY).value = json.dumps(texts)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="fused"):
        HookedModel.open(tmp_path, check="none")


def test_two_operators_that_make_one_value_are_refused(folder):
    model = HookedModel.open(folder)
    with pytest.raises(ModelError, match="same value"):
        read_fused(Dataflow(model.proto), model.metadata.fused[:1] * 2)


def test_a_model_without_any_writes_no_field(folder):
    props = HookedModel.open(folder).metadata.to_props()
    assert json.loads(props[KEY])
    from dataclasses import replace

    assert KEY not in replace(HookedModel.open(folder).metadata, fused=[]).to_props()


def test_restored_graphs_are_valid_and_hold_nothing_that_is_not_read(folder):
    model = HookedModel.open(folder)
    flow = Dataflow(model.proto)
    made, count = restore(model.proto, flow, read_fused(flow, model.metadata.fused), padding=False)
    assert count == len(model.metadata.fused) == 7
    known = {entry.name for entry in (*made.graph.input, *made.graph.initializer)} | {""}
    for node in made.graph.node:
        assert {*node.input} <= known, node.name
        known |= {*node.output}
    read = {name for node in made.graph.node for name in node.input}
    assert {entry.name for entry in made.graph.initializer} <= read
    assert {entry.name for entry in made.graph.output} <= known
    assert model.proto.graph.node[0].op_type  # left alone
    again, none = restore(model.proto, flow, [], padding=False)
    assert (none, again) == (0, model.proto)
