"""Which fused operators of a file are kept for specs that touch nothing: those that run, and give what nodes give."""

import base64
import json
import shutil
from collections import Counter
from pathlib import Path

import fused_llama
import numpy as np
import onnx
import onnxruntime
import pytest

from exporters.adopt import adopt, restorable
from mionnx import HookSpec, MIModel
from mionnx.graph.fused_operators import restore
from mionnx.run.stock_calls import StockGraphWarning

FOREIGN = Path(__file__).parents[1] / "shared" / "foreign"
IDS = np.random.default_rng(0).integers(3, 90, (2, 9))


def kept(folder):
    """Operator -> how many of it the metadata have."""
    texts = MIModel.from_pretrained(folder).hooked.metadata.fused
    return Counter(onnx.NodeProto.FromString(base64.b64decode(text)).op_type for text in texts)


@pytest.fixture
def optimised(tmp_path):
    """A file of optimum after ONNX Runtime's own optimizer."""
    from onnxruntime.transformers.optimizer import optimize_model

    shutil.copytree(FOREIGN / "optimum", tmp_path / "optimised")
    file = tmp_path / "optimised" / "model.onnx"
    optimize_model(str(file), "gpt2", 0, 0).save_model_to_file(str(file))
    return file


def test_an_optimised_file_runs_as_it_came(optimised, tmp_path):
    found = adopt(optimised, tmp_path / "hooked")
    assert kept(tmp_path / "hooked") == Counter(found.expanded)
    assert found.expanded["SkipSimplifiedLayerNormalization"] == 4
    model = MIModel.from_pretrained(tmp_path / "hooked")
    session = onnxruntime.InferenceSession(optimised, providers=["CPUExecutionProvider"])
    past = np.zeros((2, model.num_kv_heads, 0, model.head_dim), np.float32)
    known = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "position_ids": np.tile(np.arange(9), (2, 1))}
    expected = session.run(["logits"], {one.name: known.get(one.name, past) for one in session.get_inputs()})[0]
    np.testing.assert_array_equal(model.forward(IDS).output(), expected)
    ids = [IDS[0].tolist(), IDS[1, :4].tolist()]  # with padding too: nothing in this file looks for lengths
    plain = MIModel.from_pretrained(tmp_path / "hooked", fused=False)
    spec = HookSpec().capture("blocks.1.attn.hook_pattern")
    one, other = model.forward(ids, spec), plain.forward(ids, spec)
    assert [*model.compiled.values()][-1].report.restored == len(model.hooked.metadata.fused)
    np.testing.assert_allclose(one["pattern", 1], other["pattern", 1], atol=1e-5)


def test_operators_that_do_not_run_here_are_left_out_and_said(tmp_path):
    """ONNX Runtime's attention wants heads of a multiple of 16; this file has 8."""
    found = adopt(FOREIGN / "genai-fp32", tmp_path / "hooked")
    assert kept(tmp_path / "hooked") == {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 4}
    (note,) = [note for note in found.notes if "standard nodes always stand" in note]
    assert "GroupQueryAttention" in note
    assert "multiple of 16" in note
    model = MIModel.from_pretrained(tmp_path / "hooked")
    assert np.isfinite(model.forward(IDS).output()).all()


def test_operators_with_attributes_that_nodes_have_not_are_left_out(tmp_path):
    file = fused_llama.write(tmp_path / "stock")
    proto = onnx.load(file)
    for node in proto.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.attribute.append(onnx.helper.make_attribute("qk_output", 0))
    onnx.save(proto, file)
    adopt(file, tmp_path / "hooked")
    assert kept(tmp_path / "hooked") == {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 4}


def test_operators_that_give_something_else_than_their_nodes_are_left_out(tmp_path, monkeypatch):
    file = fused_llama.write(tmp_path / "stock")
    monkeypatch.setattr(restorable, "restore", _scaled)
    found = adopt(file, tmp_path / "hooked")
    assert kept(tmp_path / "hooked") == {}
    assert sum("fused logits" in note for note in found.notes) == 2


def _scaled(*given, **named):
    """The graph with fused operators, its first norm with another epsilon."""
    made, count = restore(*given, **named)
    norm = next(node for node in made.graph.node if node.op_type == "SimplifiedLayerNormalization")
    next(entry for entry in norm.attribute if entry.name == "epsilon").f = 0.1
    return made, count


@pytest.mark.parametrize("cached", [True, False])
def test_rotation_and_attention_of_opset_23_stand_in_layers_that_are_not_touched(cached, tmp_path):
    """Their positions and masks are inputs: padding and a past with several tokens are theirs too, an added one's."""
    file = fused_llama.write(tmp_path / "stock", standard=True, cached=cached)
    (file.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    adopt(file, tmp_path / "hooked")
    assert {name: count for name, count in kept(tmp_path / "hooked").items() if "Norm" not in name} == {
        "RotaryEmbedding": 4,
        "Attention": 2,
    }
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    plain = MIModel.from_pretrained(tmp_path / "hooked", threads=1, fused=False)
    mask, spec = np.array([[0, 0, 1, 1, 1], [1] * 5]), HookSpec().capture("blocks.1.attn.*")
    found, expected = (one.forward(IDS[:, :5], spec, attention_mask=mask, use_cache=True) for one in (model, plain))
    graph = [*model.compiled.values()][-1]
    left = Counter(node.op_type for node in onnx.load_from_string(graph.model).graph.node)
    assert (left["RotaryEmbedding"], left["Attention"], left["Softmax"]) == (4, 1, 1)  # hook points end a rotation
    later, wanted = (
        one.forward(IDS[:, 5:], spec, cache=past.kv_cache) for one, past in ((model, found), (plain, expected))
    )
    for one, other, real in ((found, expected, mask.astype(bool)), (later, wanted, np.ones((2, 4), bool))):
        np.testing.assert_allclose(one.output()[real], other.output()[real], atol=1e-5)
        np.testing.assert_allclose(one["z", 1][real], other["z", 1][real], atol=1e-5)


def test_attention_that_adds_a_mask_adds_the_one_that_was_put_in_its_place(tmp_path):
    """The file's own is wrong for a past, so that its operators stand where its whole graph cannot."""
    file = fused_llama.write(tmp_path / "stock", standard=True, adds=True)
    (file.parent / "config.json").write_text(json.dumps({"model_type": "llama"}))
    found = adopt(file, tmp_path / "hooked")
    assert any("another was put in its place" in note for note in found.notes)
    assert kept(tmp_path / "hooked") == Counter(found.expanded)
    assert found.expanded["MultiHeadAttention"] == 2
    model, plain = (MIModel.from_pretrained(tmp_path / "hooked", threads=1, fused=fused) for fused in (True, False))
    mask, spec = np.array([[0, 0, 1, 1, 1], [1] * 5]), HookSpec().capture("blocks.1.attn.*")
    whole, first = (plain.forward(IDS[:, :end], attention_mask=real) for end, real in ((9, None), (5, mask)))
    past = model.forward(IDS[:, :5], spec, attention_mask=mask, use_cache=True)
    np.testing.assert_allclose(past.output()[mask == 1], first.output()[mask == 1], atol=1e-5)
    cache = model.forward(IDS[:, :5], spec, use_cache=True).kv_cache
    later = model.forward(IDS[:, 5:], spec, cache=cache)
    graph = onnx.load_from_string([*model.compiled.values()][-1].model).graph
    assert Counter(node.op_type for node in graph.node)["MultiHeadAttention"] == 1  # of the layer that is not captured
    np.testing.assert_allclose(later.output(), whole.output()[:, 5:], atol=1e-5)
    with pytest.warns(StockGraphWarning, match="several tokens after a past run the hooked graph"):
        last = model.forward(IDS[:, 5:], cache=cache)
    np.testing.assert_allclose(last.output(), whole.output()[:, 5:], atol=1e-5)
    graph = onnx.load_from_string([*model.compiled.values()][-1].model).graph
    assert Counter(node.op_type for node in graph.node)["MultiHeadAttention"] == 2
