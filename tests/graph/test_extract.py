"""`extract`: a part of a graph is a model of its own, and computes what the whole computes."""

import numpy as np
import onnx
import onnxruntime
from onnx.checker import check_model

from mionnx.graph.dataflow import Dataflow, extract

MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[n] x, float[n] other) => (float[n] y, float[n] z)
<float[1] w = {2}, float[1] unused = {3}>
{
  a = Mul(x, w)
  b = Relu(a)
  c = Neg(a)
  y = Sub(b, c)
  z = Add(y, other)
}"""


def model() -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(onnx.parser.parse_model(MODEL))


def run(proto: onnx.ModelProto, **inputs: list[float]) -> dict[str, np.ndarray]:
    check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    names = [entry.name for entry in session.get_outputs()]
    feeds = {name: np.array(value, np.float32) for name, value in inputs.items()}
    return dict(zip(names, session.run(names, feeds), strict=True))


def interface(proto: onnx.ModelProto) -> tuple[list[str], list[str], list[str]]:
    graph = proto.graph
    return tuple([entry.name for entry in entries] for entries in (graph.input, graph.output, graph.initializer))


def test_the_part_has_the_nodes_inputs_and_weights_that_it_needs():
    part = extract(model(), ["a"], ["y"])
    assert interface(part) == (["a"], ["y"], [])
    assert [node.op_type for node in part.graph.node] == ["Relu", "Neg", "Sub"]
    assert interface(extract(model(), ["b"], ["y"])) == (["b", "x"], ["y"], ["w"])


def test_both_halves_compute_what_the_whole_computes():
    origin, x, other = model(), [1.0, -2.0, 3.0], [10.0, 20.0, 30.0]
    whole = run(origin, x=x, other=other)
    first = run(extract(origin, [], ["a"]), x=x)
    second = run(extract(origin, ["a"], ["z", "y"]), a=first["a"], other=other)
    assert [*second] == ["z", "y"]
    assert all(np.array_equal(second[name], whole[name]) for name in whole)


def test_the_origin_is_left_alone_and_may_be_its_dataflow():
    origin = model()
    before = origin.SerializeToString(deterministic=True)
    part = extract(Dataflow(origin), ["a"], ["y"])
    part.graph.node[0].op_type = "Abs"
    assert origin.SerializeToString(deterministic=True) == before
    assert interface(part) == interface(extract(origin, ["a"], ["y"]))
