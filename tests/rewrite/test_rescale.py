"""A rescaled graph computes the same bits, and says what it is; what has no type is refused by name."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rescaled import rescaled

from mionnx import HookSpec, Intervention
from mionnx.rewrite.exponent_types import ExponentError, check_types
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.rescale import rescale

PROMPTS = [[5, 9, 2, 7, 11], [3, 8]]


def bits(array):
    return np.asarray(array).view(np.int32)


def test_edits_gradients_and_a_past_mean_the_same(shipped, tmp_path):
    other = rescaled(shipped, -4, tmp_path / "rescaled")
    prompt = "The capital of France is"
    width = shipped.hidden_size
    rng = np.random.default_rng(0)
    vector = rng.normal(size=width).astype(np.float32)
    edits = {
        "add": Intervention.Add(vector),
        "clamp": Intervention.Clamp(-1.0, 1.0),
        "zero": Intervention.Zero(),
        "project": Intervention.ProjectOut(vector),
        "low rank": Intervention.LowRank(vector / 64, vector, 0.5),
        "replace": Intervention.Replace(vector, positions=-1),
    }
    plain = shipped.forward(prompt).output()
    for name, edit in edits.items():  # alone: nothing else touches the hook point
        spec = HookSpec().intervene("blocks.2.hook_resid_pre", edit)
        one, two = (model.forward(prompt, spec).output() for model in (shipped, other))
        assert np.array_equal(bits(one), bits(two)), name
        assert not np.array_equal(one, plain), name
    point = "blocks.1.hook_resid_post"
    one, two = (model.gradients(prompt, point, answer="Paris").grad[point] for model in (shipped, other))
    assert np.allclose(one, two, rtol=1e-6, atol=1e-9)
    assert np.abs(one).max() > 1e-4
    first, second = (model.generate(prompt, max_new_tokens=3).ids[0].tolist() for model in (shipped, other))
    assert first == second
    lens = [model.logit_lens(prompt).to_dict() for model in (shipped, other)]
    assert str(lens[0]) == str(lens[1])


def test_a_rescaled_model_verifies_against_its_own(shipped, tmp_path):
    other = rescaled(shipped, -6, tmp_path / "rescaled")
    result = shipped.verify("The capital of France is", ["ort-cpu"], other=other, greedy=0)
    assert result.agrees
    assert all(row.max_abs == 0 for row in result.besides[0].rows)


def graph_of(nodes, weights, hooks):
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "y")]
    held = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()]
    body = helper.make_graph(nodes, "small", info[:1], info[1:], held)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.checker.check_model(model)
    return FloatGraph(model, hooks)


def test_a_decomposed_norm_takes_a_power_away():
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["s"], "s"),
        helper.make_node("Mul", ["s", "s"], ["square"], "square"),
        helper.make_node("ReduceMean", ["square"], ["mean"], "mean", keepdims=1),
        helper.make_node("Add", ["mean", "eps"], ["plus"], "plus"),
        helper.make_node("Sqrt", ["plus"], ["root"], "root"),
        helper.make_node("Div", ["s", "root"], ["y"], "y"),
    ]
    graph = graph_of(nodes, {"two": 2.0, "eps": 1e-6}, ["s"])
    result = rescale(graph, {"s": -3})
    assert result.exponents == {"s": -3}
    types = check_types(graph, result.graph, result.exponents)
    assert types["square"] == types["plus"] == -6
    assert types["root"] == -3
    assert "y" not in types


def test_what_has_no_type_and_does_not_fit_is_refused_by_its_node():
    nodes = [helper.make_node("Mul", ["x", "two"], ["s"], "s"), helper.make_node("Tanh", ["s"], ["y"], "tanh")]
    graph = graph_of(nodes, {"two": 2.0}, ["s"])
    assert rescale(graph, {"s": -3}).steps  # taken back in front
    with pytest.raises(ExponentError, match=r"tanh \(Tanh\) has no type with s as 2\^-3"):
        rescale(graph, {"s": -3}, {"s": 1e5}, 65504.0)


def test_a_false_claim_is_seen():
    nodes = [helper.make_node("Add", ["x", "b"], ["s"], "s"), helper.make_node("Tanh", ["s"], ["y"], "tanh")]
    graph = graph_of(nodes, {"b": np.ones(4)}, ["s"])
    with pytest.raises(ExponentError, match="s has the exponent 0, not -3"):
        check_types(graph, graph, {"s": -3})
    wrong = onnx.ModelProto()
    wrong.CopyFrom(graph.proto)
    wrong.graph.initializer.append(numpy_helper.from_array(np.array(0.125, np.float32), "mionnx.two_to_-3"))
    node = wrong.graph.node.add()
    node.CopyFrom(helper.make_node("Mul", ["b", "mionnx.two_to_-3"], ["c"], "c"))
    nodes = [node, *wrong.graph.node[:2]]
    nodes[1].input[1] = "c"
    copies = [onnx.NodeProto.FromString(one.SerializeToString()) for one in nodes]
    del wrong.graph.node[:]
    wrong.graph.node.extend(copies)
    with pytest.raises(ExponentError, match=r"s \(Add\) has operands of unlike powers of two: x 2\^0, c 2\^-3"):
        check_types(graph, FloatGraph(wrong, ["s"]), {})
