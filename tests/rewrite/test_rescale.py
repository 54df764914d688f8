"""A rescaled graph computes the same bits, and says what it is; what has no type is refused by name."""

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from rescaled import rescaled

from mionnx import HookSpec, Intervention
from mionnx.rewrite.exponent_types import ExponentError, check_types
from mionnx.rewrite.float_graph import FloatGraph
from mionnx.rewrite.rescale import rescale

law = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# Hook points of an edit and of a capture: few, since each pair is a graph that is opened.
PLACES = [("blocks.1.hook_resid_pre", "blocks.2.hook_mlp_out"), ("blocks.2.hook_resid_mid", "blocks.3.hook_resid_post")]


def bits(array):
    return np.asarray(array).view(np.int32)


@pytest.fixture(scope="module")
def pair(shipped, tmp_path_factory):
    """A model, and the same with its stream times 2^-5."""
    return shipped, rescaled(shipped, -5, tmp_path_factory.mktemp("rescaled") / "m")


@law
@given(data=st.data())
def test_bits_are_the_same_in_batches_after_a_past_with_padding_captures_and_edits(pair, data):
    rows, seq = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 8))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    ids = random.integers(3, pair[0].vocab_size, (rows, seq))
    past, edited = data.draw(st.integers(0, seq - 1)), data.draw(st.booleans())
    left = bool(past) or data.draw(st.booleans())
    lengths = [data.draw(st.integers(seq - past + 1 if past else 1, seq)) for _ in range(rows)]
    real = [[1] * one + [0] * (seq - one) for one in lengths]
    mask = np.array([one[::-1] if left else one for one in real])
    where, seen = data.draw(st.sampled_from(PLACES))
    spec = HookSpec().capture(seen)
    if edited:
        vector = random.normal(scale=data.draw(st.sampled_from([1e-3, 1.0, 1e3])), size=pair[0].hidden_size)
        spec.intervene(
            where, Intervention.Add(vector.astype(np.float32), positions=data.draw(st.sampled_from([None, -1])))
        )
    results = []
    for model in pair:
        cache = None
        if past:
            cache = model.forward(ids[:, :past], attention_mask=mask[:, :past], use_cache=True).kv_cache
        results.append(model.forward(ids[:, past:], spec, attention_mask=mask, cache=cache))
    one, two = results
    assert np.array_equal(bits(one[seen]), bits(two[seen]))
    assert np.array_equal(bits(one.output()), bits(two.output()))


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
