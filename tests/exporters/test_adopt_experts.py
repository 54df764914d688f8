"""Routers of adopted mixtures of experts; beside transformers, those of torch's exporter are in test_adopt_lacking."""

import fused_llama
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import quantize_dynamic

from exporters.adopt import adopt
from mionnx import HookSpec, Intervention, MIModel

IDS = np.random.default_rng(0).integers(3, 90, (2, 9))
LOGITS = "blocks.1.mlp.hook_router_logits"


def test_experts_inside_of_one_operator_are_chosen_by_the_router_s_logits(tmp_path):
    """As onnxruntime-genai writes GPT-OSS: the choice is no value, and what it is made from is."""
    file = fused_llama.write(tmp_path / "stock", router="")
    found = adopt(file, tmp_path / "hooked")
    assert [name for name in found.hooks if "expert" in name or "router" in name] == [LOGITS.replace("1", "0"), LOGITS]
    assert any("hook_expert_indices, hook_expert_weights: inside of MoE only" in note for note in found.notes)
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    assert model.hooked.metadata.sizes.n_experts == fused_llama.EXPERTS
    plain = model.forward(IDS, HookSpec().capture([LOGITS, "blocks.1.mlp.hook_*"]))
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(file).graph.initializer}
    expected = plain["blocks.1.mlp.hook_pre"] @ held["layers.1.router.weight"]
    np.testing.assert_allclose(plain[LOGITS], expected, atol=1e-5)
    first = np.array([50.0, 49.0, 0.0, 0.0], np.float32)  # experts 0 and 1, and their weights
    spec = HookSpec().intervene(LOGITS, Intervention.Replace(np.broadcast_to(first, (2, 9, 4))))
    turned = model.forward(IDS, spec.capture("blocks.1.mlp.hook_post"))["blocks.1.mlp.hook_post"]
    weights = np.exp(first[:2]) / np.exp(first[:2]).sum()
    inner = np.einsum("bsh,eih->bsei", plain["blocks.1.mlp.hook_pre"], held["layers.1.first"][:2])
    grown = inner / (1 + np.exp(-inner))
    made = np.einsum("bsei,ehi,e->bsh", grown, held["layers.1.last"][:2], weights)
    np.testing.assert_allclose(turned, made, atol=1e-4)


@pytest.mark.parametrize("operator", ["Neg", "Sigmoid"])
def test_logits_whose_order_is_not_that_of_the_choice_are_not_named(operator, tmp_path):
    """A sigmoid makes large logits the same number."""
    found = adopt(fused_llama.write(tmp_path / "stock", router=operator), tmp_path / "hooked")
    assert not [name for name in found.hooks if "router" in name]
    assert any("hook_router_logits: no one linear map" in note for note in found.notes)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_router_whose_sizes_nothing_says_is_found_rounded_or_not(rounded, tmp_path):
    """As in GPT-OSS after ONNX Runtime's optimizer, or its dynamic quantiser: a Gemm, and no shape of what it makes."""
    file = fused_llama.write(tmp_path / "stock", router="TopK")
    if rounded:
        quantize_dynamic(file, file, reduce_range=True, extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT})
    else:
        assert not any("router" in value.name for value in onnx.load(file).graph.value_info)
    found = adopt(file, tmp_path / "hooked")
    assert any(law.law == "chosen experts = largest router logits" for law in found.laws)
    names = [f"blocks.1.mlp.hook_{name}" for name in ("pre", "router_logits", "expert_indices", "expert_weights")]
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    captured = model.forward(IDS, HookSpec().capture(names))
    pre, logits, indices, weights = (captured[name] for name in names)
    fused_llama.write(tmp_path / "plain", router="TopK")
    held = {
        one.name: numpy_helper.to_array(one) for one in onnx.load(tmp_path / "plain" / "model.onnx").graph.initializer
    }
    expected = pre @ held["layers.1.router.weight"].T + held["layers.1.router.bias"]
    np.testing.assert_allclose(logits, expected, atol=0.1 if rounded else 1e-5)
    np.testing.assert_array_equal(indices, np.argsort(-logits, axis=-1)[..., : fused_llama.CHOSEN])
    shares = np.exp(np.take_along_axis(logits, indices, -1))
    np.testing.assert_allclose(weights, shares / shares.sum(-1, keepdims=True), atol=1e-6)
