"""Graphs that are edited again: copies of one import, written as onnx-graphsurgeon itself reads and writes them."""

from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from onnx_graphsurgeon import Constant, Graph, Node, Variable, export_onnx, import_onnx
from repository import REPOSITORY

from mionnx.graph import edited_graph, onnx_file
from mionnx.graph.edited_graph import branches, edit, named, to_proto

SHIPPED = ("world-llama", "world-gpt2", "world-rwkv7", "world-hybrid", "world-bert")


@pytest.fixture(scope="module", params=SHIPPED)
def proto(request: pytest.FixtureRequest) -> onnx.ModelProto:
    return onnx_file.read(REPOSITORY / "models" / request.param / "model.onnx")


def parts(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """All of a graph, as text."""
    fields = ("node", "initializer", "input", "output", "value_info")
    return {field: [str(entry) for entry in getattr(graph, field)] for field in fields}


def test_it_is_written_as_graphsurgeon_writes_what_it_imports(proto: onnx.ModelProto) -> None:
    own, copy = export_onnx(import_onnx(proto)), to_proto(edit(proto, again=True), proto, {})
    own.graph.input.extend(
        value for value in proto.graph.input if value.name not in {one.name for one in own.graph.input}
    )
    assert parts(copy.graph) == parts(own.graph)
    assert (copy.opset_import, copy.ir_version) == (own.opset_import, own.ir_version)
    assert (copy.graph.name, copy.graph.doc_string) == (own.graph.name, own.graph.doc_string)


def test_what_is_changed_is_written_and_in_no_other_copy(proto: onnx.ModelProto) -> None:
    before = parts(to_proto(edit(proto, again=True), proto, {}).graph)
    graph = edit(proto, again=True)
    tensors = named(graph)
    node = next(node for node in graph.nodes if node.op == "MatMul" and not branches(node))
    node.op, node.name = "Mod", "changed"
    node.attrs["fmod"] = 1
    value = node.outputs[0]
    value.dtype, value.shape = np.dtype(np.float16), ["changed"]
    node.inputs[1] = Constant("of this copy", np.ones(3, np.float32))
    for other in graph.nodes[5:]:
        for inner in branches(other):
            inner.nodes.append(Node("Identity", "inside", inputs=[inner.outputs[0]], outputs=[Variable("beside")]))
    made = Variable("made", np.float32)
    graph.nodes.append(Node("Gelu", "new", domain="com.example", inputs=[value], outputs=[made]))
    graph.outputs.append(made)
    written = to_proto(graph, proto, {})
    changed = next(one for one in written.graph.node if one.name == "changed")
    assert (changed.op_type, changed.attribute[0].name, changed.input[1]) == ("Mod", "fmod", "of this copy")
    assert next(one for one in written.graph.value_info if one.name == value.name).type.tensor_type.elem_type == 10
    assert {(entry.domain, entry.version) for entry in written.opset_import} >= {("com.example", 1)}
    assert written.graph.output[-1].name == "made"
    assert parts(to_proto(edit(proto, again=True), proto, {}).graph) == before
    assert not {"made", "of this copy"} & {*named(edit(proto, again=True))}
    assert named(graph).keys() >= tensors.keys() - {"of this copy"} - {one.name for one in proto.graph.initializer}
    assert "com.example" not in {entry.domain for entry in proto.opset_import}


def all_nodes(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for inner in branches(node):
            yield from all_nodes(inner)


def test_readers_and_makers_of_values_are_of_the_copy(proto: onnx.ModelProto) -> None:
    nodes = [*all_nodes(edit(proto, again=True))]
    own = {id(node) for node in nodes}
    for node in nodes:
        assert all(any(reader is node for reader in value.outputs) for value in node.inputs)
        for value in node.outputs:
            assert [id(maker) for maker in value.inputs] == [id(node)]
            assert {id(reader) for reader in value.outputs} <= own


def test_a_model_that_has_grown_is_imported_anew(proto: onnx.ModelProto) -> None:
    own = onnx.ModelProto()
    own.CopyFrom(proto)
    edit(own, again=True)
    own.graph.node.add(op_type="Identity", name="later", input=["logits"], output=["later"])
    assert edit(own, again=True).nodes[-1].name == "later"


def test_few_imports_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    protos = [onnx_file.read(REPOSITORY / "models" / name / "model.onnx") for name in SHIPPED]
    monkeypatch.setattr(edited_graph, "KEPT_NODES", sum(len(proto.graph.node) for proto in protos[-2:]))
    for proto in protos:
        edit(proto, again=True)
    assert [entry[0] is proto for entry, proto in zip(edited_graph._imports.values(), protos[-2:], strict=True)] == [
        True,
        True,
    ]
    monkeypatch.setattr(edited_graph, "KEPT_NODES", 0)
    edit(protos[0], again=True)
    assert [id(protos[0])] == [*edited_graph._imports]
