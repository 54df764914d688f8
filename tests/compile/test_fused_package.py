"""Compiled graphs of an adopted file keep its fused operators where nothing inside them is touched, if asked to."""

import json
from collections import Counter

import fused_llama
import numpy as np
import onnx
import onnxruntime
import pytest
from command_line import mionnx

from exporters.adopt import adopt
from mionnx import HookSpec, InputError, Intervention, MIModel

IDS = np.random.default_rng(0).integers(3, fused_llama.VOCAB, (2, 9))
SPEC = HookSpec().intervene("blocks.1.attn.hook_z", Intervention.Scale(0.5))
LEFT = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 4, "GroupQueryAttention": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fused")
    adopt(fused_llama.write(folder / "stock"), folder / "hooked")
    return MIModel.from_pretrained(folder / "hooked")


def logits(folder, ids, mask):
    """Logits of a compiled graph in plain onnxruntime, after no past."""
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(mask.cumsum(1) - 1, 0)}
    empty = np.zeros((len(ids), fused_llama.KV_HEADS, 0, fused_llama.WIDTH), np.float32)
    return session.run(["logits"], {one.name: feeds.get(one.name, empty) for one in session.get_inputs()})[0]


def operators(folder):
    nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes if node.op_type in LEFT)


def test_only_the_layer_that_is_changed_is_unfused(model, tmp_path):
    folder, mask = model.compile(SPEC, tmp_path / "all", fused="all"), np.ones_like(IDS)
    assert operators(folder) == LEFT
    expected = MIModel.from_pretrained(model.hooked.folder, fast=True).forward(IDS, SPEC).output()
    np.testing.assert_array_equal(logits(folder, IDS, mask), expected)
    plain = model.compile(SPEC, tmp_path / "none")
    assert operators(plain) == {}
    np.testing.assert_allclose(logits(plain, IDS, mask), expected, atol=2e-5)
    card = (folder / "README.md").read_text()
    assert "6 of ONNX Runtime's own" in card
    assert "must not be padded" in card
    assert "fused operators" not in (plain / "README.md").read_text()


def test_operators_for_padded_texts(model, tmp_path):
    folder, mask = model.compile(SPEC, tmp_path / "padded", fused="padded"), np.ones_like(IDS)
    mask[0, :4] = 0
    assert operators(folder) == {name: count for name, count in LEFT.items() if "Attention" not in name}
    expected = model.forward(IDS, SPEC, attention_mask=mask).output()
    real = mask.astype(bool)
    np.testing.assert_allclose(logits(folder, IDS, mask)[real], expected[real], atol=2e-5)
    card = (folder / "README.md").read_text()
    assert "5 of ONNX Runtime's own" in card
    assert "padded" not in card


def test_what_cannot_be_kept_is_refused(model, tmp_path):
    with pytest.raises(InputError, match="did you mean 'all'"):
        model.compile(SPEC, tmp_path / "another", fused="al")
    assert not [*tmp_path.iterdir()]


def test_the_command_line_keeps_them_too(model, tmp_path):
    scale = ["--scale", "blocks.1.attn.hook_z=0.5", "--fused", "all", "--json"]
    result = mionnx("compile", model.hooked.folder, "-o", tmp_path / "out", *scale)
    assert json.loads(result.stdout)["interventions"] == 1
    assert operators(tmp_path / "out") == LEFT
