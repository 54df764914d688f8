"""A file that computes attention in float16 and the rest in float32: each hook point has its own dtype."""

import fused_llama
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from exporters.adopt import adopt
from mionnx import HookSpec, Intervention, MIModel

IDS = np.random.default_rng(0).integers(3, fused_llama.VOCAB, (2, 9))
HALF = 2e-3  # of numbers of order 1


def halved(file):
    """Let the attention of a file compute in float16, caches included."""
    proto = onnx.load(file)
    graph, nodes = proto.graph, []
    for tensor in graph.initializer:
        if tensor.name in ("cos_cache", "sin_cache"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past_key_values.", "present.")):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in graph.node:
        if node.op_type != "GroupQueryAttention":
            nodes.append(node)
            continue
        packed, z = node.input[0], node.output[0]
        node.input[0], node.output[0] = f"{packed}.half", f"{z}.half"
        nodes += [helper.make_node("Cast", [packed], [f"{packed}.half"], to=TensorProto.FLOAT16), node]
        nodes.append(helper.make_node("Cast", [f"{z}.half"], [z], to=TensorProto.FLOAT))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    onnx.save(proto, file)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("half")
    adopt(halved(fused_llama.write(folder / "stock")), folder / "hooked")
    adopt(fused_llama.write(folder / "whole"), folder / "single")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return MIModel.from_pretrained(folder / "hooked")


@pytest.fixture(scope="module")
def single(folder):
    """The same in float32 throughout."""
    return MIModel.from_pretrained(folder / "single", fused=False)


def test_each_hook_point_has_its_dtype(model, single):
    spec = HookSpec().capture("*")
    found, expected = model.forward(IDS, spec), single.forward(IDS, spec)
    dtypes = {name: found[name].dtype for name in found}
    assert {str(dtypes[f"blocks.0.attn.hook_{part}"]) for part in ("q", "rot_k", "v", "pattern", "z")} == {"float16"}
    assert {str(dtypes[name]) for name in ("hook_embed", "blocks.1.hook_resid_mid", "hook_logits")} == {"float32"}
    for point in model.hook_points():
        assert dtypes[point.name] == model.hooked.dtype(point), point
    for name in expected:
        seen = expected[name] > -1e4
        np.testing.assert_allclose(found[name][seen], expected[name][seen], atol=5 * HALF, err_msg=name)


def test_the_empty_spec_and_the_cache_are_the_files(model, folder):
    found = model.forward(IDS[:, :5], use_cache=True)
    session = onnxruntime.InferenceSession(folder / "stock" / "model.onnx", providers=["CPUExecutionProvider"])
    past = [np.asarray(value) for pair in found.kv_cache.layers for value in pair]
    assert {value.dtype.name for value in past} == {"float16"}
    names = [entry.name for entry in session.get_inputs()][2:]
    feeds = {
        "input_ids": IDS[:, 5:6],
        "attention_mask": np.ones((2, 6), np.int64),
        **dict(zip(names, past, strict=True)),
    }
    later = model.forward(IDS[:, 5:6], cache=found.kv_cache).output()
    np.testing.assert_array_equal(later, session.run(["logits"], feeds)[0])


@pytest.mark.slow
def test_interventions_take_the_effect_that_they_have_in_one_dtype(model, single):
    base = single.forward(IDS).output()
    for point in [point for point in model.hook_points() if not point.derived]:
        spec = HookSpec().intervene(point, Intervention.Scale(-0.5))
        found, expected = model.forward(IDS, spec).output(), single.forward(IDS, spec).output()
        np.testing.assert_allclose(found, expected, atol=10 * HALF, err_msg=str(point))
        assert np.abs(expected - base).max() > 20 * HALF, point


def test_generation_and_sweeps(model, single):
    greedy = {"max_new_tokens": 4, "eos_token_id": []}
    found, expected = (one.generate(IDS[:, :4], **greedy) for one in (model, single))
    assert [row.tolist() for row in found.ids] == [row.tolist() for row in expected.ids]
    ablated = [one.ablation_sweep(IDS[:1]) for one in (model, single)]
    values = [np.asarray(one.values, np.float64) for one in ablated]
    assert values[0].shape == values[1].shape
    np.testing.assert_allclose(*values, atol=20 * HALF)
