"""`Builder`: an operator is a call, a number is a constant of the right dtype, every node is named and reported."""

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from mionnx.graph.builder import Builder, write
from mionnx.graph.edited_graph import edit, to_proto
from mionnx.graph.report import Report

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 3] x) => (float[n, 3] y)
{
  a = Neg(x)
  y = Relu(a)
}"""


class Edited:
    """A graph of two nodes, a builder on it, and what it computes when it is done."""

    def __init__(self) -> None:
        self.origin, self.report = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(MODEL)), Report()
        self.graph = edit(self.origin)
        self.op = Builder(self.graph, "here", "prefix", self.report)
        self.a = self.graph.tensors()["a"]

    def run(self, *values, **inputs) -> list[np.ndarray]:
        self.graph.outputs = list(values)
        self.graph.cleanup(remove_unused_graph_inputs=False).toposort()
        proto = to_proto(self.graph, self.origin, {})
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        return session.run([value.name for value in values], {"x": X, **inputs})


X = np.array([[1, -2, 3], [-4, 5, -6]], np.float32)


@pytest.fixture
def edited() -> Edited:
    return Edited()


def test_operators_are_calls(edited):
    op, a = edited.op, edited.a
    found = op.Where(op.Greater(a, 0), op.Mul(a, 2.5), op.Sub(1, a))
    assert np.array_equal(edited.run(found)[0], np.where(-X > 0, -X * 2.5, 1 + X))


def test_numbers_take_the_dtype_of_the_other_operands(edited):
    op, a = edited.op, edited.a
    assert op.Mul(a, 2).inputs[0].inputs[1].dtype == np.float32
    assert op.Add(op.Shape(a), 1).inputs[0].inputs[1].dtype == np.int64
    assert op.Reshape(a, [0, -1]).inputs[0].inputs[1].dtype == np.int64
    assert op.Mul(a, np.float16(2)).inputs[0].inputs[1].dtype == np.float16
    with pytest.raises(TypeError, match="here"):
        op.Reshape(a, [0.5])


def test_outputs_know_their_dtype(edited):
    op, a = edited.op, edited.a
    assert op.Greater(a, 0).dtype == np.bool_
    assert op.Shape(a).dtype == np.int64
    assert op.Cast(a, to=np.float16).dtype == np.float16
    values, places = op.TopK(a, [2], axis=1, outputs=2)
    assert (values.dtype, places.dtype) == (np.float32, np.int64)
    largest, ids = edited.run(values, places)
    assert largest.tolist() == [[2, -1], [6, 4]]
    assert ids.tolist() == [[1, 0], [2, 0]]


def test_names_are_prefixed_numbered_and_reported(edited):
    op, a = edited.op, edited.a
    made = [op.Neg(a), op.Neg(a), op.Neg(a, name="turned")]
    assert [value.name for value in made] == ["prefix.Neg", "prefix.Neg_2", "prefix.turned"]
    assert [value.inputs[0].name for value in made] == ["prefix.Neg", "prefix.Neg_2", "prefix.turned:Neg"]
    assert edited.report.added == {"here": ["prefix.Neg", "prefix.Neg_2", "prefix.turned:Neg"]}


def test_equal_constants_are_one(edited):
    op, a = edited.op, edited.a
    one, same, other = (op.Mul(a, number).inputs[0].inputs[1] for number in (2, 2.0, 3))
    assert one is same
    assert one is not other


def test_an_input_is_dynamic_and_reported(edited):
    scale = edited.op.input("scale", np.float32, 2)
    found = edited.run(edited.op.Mul(edited.a, scale), scale=np.full((2, 1), 3, np.float32))
    assert np.array_equal(found[0], -3 * X)
    assert edited.report.inputs == ["scale"]


def test_what_is_written_takes_the_name_and_present_readers_keep_the_value(edited):
    op, a = edited.op, edited.a
    y = edited.graph.outputs[0]
    doubled = op.Mul(a, 2)
    a_reader = next(node for node in edited.graph.nodes if node.op == "Relu")
    write(doubled, into := type(y)("doubled", dtype=np.float32))
    assert into.inputs[0].op == "Mul"
    assert a_reader.inputs[0] is a
    assert np.array_equal(edited.run(into)[0], -2 * X)


def test_only_operators_are_calls(edited):
    with pytest.raises(AttributeError):
        _ = edited.op.lowercase


def test_bfloat16_is_a_dtype_like_any_other():
    """Graphsurgeon knows it by number only: an input and a constant beside it have the dtype of ml_dtypes."""
    origin = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(MODEL.replace("float[", "bfloat16[")))
    graph, report = edit(origin), Report()
    op, a = Builder(graph, "here", "prefix", report), graph.tensors()["a"]
    changed = op.Max(op.Add(a, op.input("value", a.dtype, 2)), 0.5)
    changed.shape, graph.outputs = ["n", 3], [changed]
    proto = to_proto(graph.cleanup(remove_unused_graph_inputs=False).toposort(), origin, {})
    onnx.checker.check_model(proto, full_check=True)
    narrow = X.astype(ml_dtypes.bfloat16)
    (found,) = ReferenceEvaluator(proto).run(None, {"x": narrow, "value": narrow * 3})
    assert found.dtype == ml_dtypes.bfloat16
    assert np.array_equal(found.astype(np.float32), np.maximum(2 * X, 0.5))
