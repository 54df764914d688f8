"""The rewrite that cuts a graph into a chain: what it makes of small graphs, and that nothing is computed twice."""

import numpy as np
import onnx
import onnxruntime
from onnx.checker import check_model

from mionnx.graph.dataflow import extract
from mionnx.run.segment_chain import cut

TWO_PATHS = """<ir_version: 10, opset_import: ["" : 21]>
g (float[N, 3] x) => (float[N, 3] y)
<float[3, 3] weight = {1, 2, 3, 4, 5, 6, 7, 8, 9}>
{
  turned = Transpose <perm = [1, 0]> (weight)
  a = MatMul(x, turned)
  left = Relu(a)
  right = Neg(a)
  late = MatMul(x, turned)
  sum = Add(left, right)
  y = Add(sum, late)
}"""

LOOP = """<ir_version: 10, opset_import: ["" : 21]>
g (float[3] x, int64[1] count) => (float[3] y)
{
  doubled = Add(x, x)
  hooked = Relu(doubled)
  always = Constant <value = bool {1}> ()
  start = Neg(hooked)
  y = Loop <body = body (int64 i, bool go, float[3] before) => (bool on, float[3] after) {
      on = Identity(go)
      after = Sub(before, doubled)
  }> (count, always, start)
}"""


def segments_of(text: str, hooks: list[str]):
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    made = cut(proto, hooks)
    return proto, made, [segment.model for segment in made]


def run(protos, feeds, between=lambda name, value: value, hooks=()):
    values = dict(feeds)
    for proto in protos:
        check_model(proto, full_check=True)
        session = onnxruntime.InferenceSession(proto.SerializeToString())
        names = [entry.name for entry in session.get_outputs()]
        found = session.run(names, {entry.name: values[entry.name] for entry in session.get_inputs()})
        values |= {
            name: between(name, value) if name in hooks else value for name, value in zip(names, found, strict=True)
        }
    return values


def test_what_does_not_depend_on_each_other_ends_one_segment():
    proto, made, protos = segments_of(TWO_PATHS, ["left", "right"])
    assert [segment.hooks for segment in made] == [("left", "right"), ()]
    assert made[1].others == ("y",)
    assert set(made[1].inputs) == {"left", "right", "x"}
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    whole = run([proto], {"x": x})["y"]
    assert np.array_equal(run(protos, {"x": x})["y"], whole)
    changed = run(protos, {"x": x}, lambda name, value: value + 1, ("left", "right"))["y"]
    assert np.array_equal(changed, whole + 2)


def test_a_hook_behind_another_begins_a_segment_and_sees_it_changed():
    _, made, protos = segments_of(TWO_PATHS, ["a", "left"])
    assert [segment.hooks for segment in made] == [("a",), ("left",), ()]
    x = np.ones((1, 3), np.float32)
    found = run(protos, {"x": x}, lambda name, value: value * 0 - 1 if name == "a" else value, ("a", "left"))
    assert np.array_equal(found["left"], np.zeros((1, 3)))
    assert np.array_equal(found["y"], [[7, 16, 25]])  # -(-1) and the rows' sums


def test_what_is_made_of_weights_alone_does_not_cross_a_cut():
    """Each segment that needs the turned matrix has it; the late product stands where it is read."""
    _, made, _ = segments_of(TWO_PATHS, ["a"])
    ops = [[node.op_type for node in segment.model.graph.node] for segment in made]
    assert ops == [["Transpose", "MatMul"], ["Transpose", "Relu", "Neg", "MatMul", "Add", "Add"]]
    assert set(made[1].inputs) == {"a", "x"}


def test_what_the_body_of_a_loop_reads_from_outside_crosses_too():
    proto, made, protos = segments_of(LOOP, ["hooked"])
    assert set(made[1].inputs) == {"hooked", "doubled", "count"}
    feeds = {"x": np.array([1, 2, 3], np.float32), "count": np.array([2])}
    assert np.array_equal(run(protos, feeds)["y"], run([proto], feeds)["y"])


def test_without_an_output_left_there_is_no_last_segment():
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(TWO_PATHS))
    part = extract(proto, ["x"], ["left"])
    assert [segment.hooks for segment in cut(part, ["a", "left"])] == [("a",), ("left",)]


SPLIT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[3, 4] x) => (float[3, 2] y)
{
  left, right = Split <axis = 1, num_outputs = 2> (x)
  turned = Neg(left)
  y = Add(turned, right)
}"""


def test_values_of_one_node_are_cut_in_one_segment():
    """GPT-NeoX splits queries, keys and values, and rotates the first two before the third is read."""
    _, made, protos = segments_of(SPLIT, ["left", "turned", "right"])
    assert [segment.hooks for segment in made] == [("left", "right"), ("turned",), ()]
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    double = lambda name, value: value * 2  # noqa: E731
    values = run(protos, {"x": x}, double, ("left", "turned", "right"))
    np.testing.assert_array_equal(values["y"], -4 * x[:, :2] + 2 * x[:, 2:])
