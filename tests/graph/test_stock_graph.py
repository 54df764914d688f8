"""The graph of an adopted file as it came, in the metadata: what cannot be that is refused when the model is opened."""

import base64
import json
import zlib

import fused_llama
import onnx
import pytest

from exporters.adopt import adopt
from mionnx import ModelError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.stock_graph import STOCK_LIMIT, StockGraph, checkable, packed, unpacked

KEY = "mionnx.stock"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    adopt(fused_llama.write(folder / "stock"), folder / "hooked")
    return folder / "hooked"


def opened(folder, tmp_path, change):
    """The model with another table in its metadata."""
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    entry = next(entry for entry in proto.metadata_props if entry.key == KEY)
    entry.value = json.dumps(change(json.loads(entry.value)))
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    for path in folder.iterdir():
        if path.name != "model.onnx":
            (tmp_path / path.name).hardlink_to(path)
    return HookedModel.open(tmp_path)


def edited(edit):
    """Changes the graph of a table."""

    def change(table):
        proto = unpacked(table).proto
        edit(proto)
        return packed(StockGraph(proto, table["expanded"], table["allowed"]))

    return change


def loop(proto):
    body = onnx.helper.make_graph([], "inner", [], [])
    proto.graph.node.insert(0, onnx.helper.make_node("Loop", ["", ""], ["endless"], body=body))


def large(proto):
    size = onnx.helper.make_tensor("size", onnx.TensorProto.INT64, [2], [2**20, 2**20])
    proto.graph.initializer.append(size)
    proto.graph.node.insert(0, onnx.helper.make_node("ConstantOfShape", ["size"], ["large"]))


def outside(proto):
    weight = next(tensor for tensor in proto.graph.initializer if tensor.external_data)
    next(entry for entry in weight.external_data if entry.key == "location").value = "../model.onnx"


def strange(proto):
    proto.graph.node.insert(0, onnx.helper.make_node("Exec", ["input_ids"], ["made"], domain="com.microsoft"))


def another_input(proto):
    proto.graph.input.add().CopyFrom(onnx.helper.make_tensor_value_info("more", 1, [1]))


GRAPHS = {
    "a loop without a body": loop,
    "a value without a bound": large,
    "a weight outside of the folder": outside,
    "an operator that is not known": strange,
    "an input that the model has not": another_input,
    "no logits": lambda proto: proto.graph.output.__delitem__(0),
    "no node": lambda proto: proto.graph.node.__delitem__(slice(None)),
}
TABLES = {
    "no base64": lambda table: {**table, "graph": "?"},
    "no zlib": lambda table: {**table, "graph": base64.b64encode(b"graph").decode()},
    "a cut text": lambda table: {**table, "graph": table["graph"][: len(table["graph"]) // 8 * 4]},
    "no protobuf": lambda table: {**table, "graph": base64.b64encode(zlib.compress(b"\xff" * 99)).decode()},
    "too much": lambda table: {
        **table,
        "graph": base64.b64encode(zlib.compress(bytes(STOCK_LIMIT + 1))).decode(),
    },
    "no difference that is allowed": lambda table: {key: value for key, value in table.items() if key != "allowed"},
    "any difference allowed": lambda table: {**table, "allowed": float("nan")},
    "a field that it has not": lambda table: {**table, "calls": [0]},
    "a text for a truth value": lambda table: {**table, "expanded": "yes"},
    "a list": lambda table: [table],
}


@pytest.mark.parametrize("change", [*map(edited, GRAPHS.values()), *TABLES.values()], ids=[*GRAPHS, *TABLES])
def test_what_cannot_be_a_stock_graph_is_refused(change, folder, tmp_path):
    with pytest.raises(ModelError):
        opened(folder, tmp_path, change)


def test_a_stock_graph_is_read_as_it_was_written(folder, tmp_path):
    model = opened(folder, tmp_path, lambda table: table)
    stock = model.stock
    assert unpacked(packed(stock)) == stock
    assert stock.expanded
    assert 1e-6 < stock.allowed < 1e-4
    assert stock.gives(["present.0.key"])
    assert not stock.gives(["present.2.key"])


def test_operators_of_older_opsets_are_known(folder):
    proto = HookedModel.open(folder).stock.proto
    norm = next(node for node in proto.graph.node if node.op_type == "SimplifiedLayerNormalization")
    assert not norm.domain
    shown = {node.name: node.domain for node in checkable(proto).graph.node}
    assert shown[norm.name] == "com.microsoft"
    assert [*shown.values()].count("") == sum(not node.domain for node in proto.graph.node) - 1
