"""Pairs of tokens that make two texts similar: the sum laws, and the derivatives beside torch."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch

from mionnx import HookSpec, InputError, Intervention, MIModel

A, B = "the man plays guitar", "someone performs music for the audience"


@pytest.fixture(scope="module")
def both(text_encoder):
    return text_encoder("embedding")


def test_late_interaction_sums_to_the_similarity(both):
    model, _ = both
    found = model.attribute_similarity(A, B, "late")
    assert abs(found.gap) < 1e-6
    assert abs(found.similarity - model.similarity(A, B)[0, 0]) < 1e-6
    assert found.pairs.shape == (len(model.tokenize(A)), len(model.tokenize(B)))


def test_a_prompt_stands_before_what_is_explained_as_before_what_is_compared(both, tmp_path):
    shutil.copytree(both[0].hooked.folder, tmp_path / "model")
    path = tmp_path / "model" / "model.onnx"
    proto = onnx.load(path, load_external_data=False)
    entry = next(one for one in proto.metadata_props if one.key.endswith("pooling"))
    table = json.loads(entry.value)
    table |= {"prompts": {"query": "music in rome "}, "default_prompt": "query", "lower_case": True}
    entry.value = json.dumps(table)
    onnx.save(proto, path)
    model = MIModel.from_pretrained(tmp_path / "model", threads=1)
    for name in (None, "the man "):
        found = model.attribute_similarity(A.upper(), B, "late", prompt_name=name)
        assert abs(found.similarity - model.similarity(A.upper(), B, prompt_name=name)[0, 0]) < 1e-6
        assert abs(found.similarity - both[0].similarity(A, B)[0, 0]) > 1e-3


@pytest.mark.parametrize("layer", [0, 1])
def test_integrated_jacobians_keep_their_law(both, layer):
    model, _ = both
    found = model.attribute_similarity(A, B, layer=layer, steps=50)
    assert abs(found.gap) < 2e-3
    assert abs(found.pairs.sum() - found.explained) == abs(found.gap)
    if layer == 0:  # special tokens are those of the references
        assert np.abs(found.pairs[[0, -1]]).max() == np.abs(found.pairs[:, [0, -1]]).max() == 0
    assert found.top(1)[0][2] == found.pairs.flat[np.abs(found.pairs).argmax()]
    assert "f(r, r)" in found.page()
    assert len(found.to_frame()) == found.pairs.size


def test_the_gradient_of_a_cosine_is_torchs(both):
    model, reference = both
    vector = model.embed(B)[0]
    tokens = model.tokenize(A)
    given = {"input_ids": torch.from_numpy(tokens.ids[None]), "attention_mask": torch.ones(1, len(tokens), dtype=int)}
    states = reference(**given, output_hidden_states=True).hidden_states
    for state in states:
        state.retain_grad()
    mean = states[-1].mean(1)
    cosine = (mean / mean.norm(dim=-1) * torch.from_numpy(vector)).sum()
    cosine.backward()
    found = model.gradients(A, "blocks.*.hook_resid_pre", versus=B)
    assert abs(found.metric[0] - cosine.item()) < 1e-5
    for layer in range(model.num_layers):
        assert np.abs(found.grad["resid_pre", layer] - states[layer].grad.numpy()).max() < 1e-5


def test_cells_of_a_sweep_equal_forward_passes(both):
    model, _ = both
    other = "the woman plays guitar"
    sweep = model.patch_sweep(A, other, "resid_pre", metric="cosine", versus=B)
    assert sweep.values.shape == (model.num_layers, 6)
    clean = model.forward(A, HookSpec().capture("blocks.1.hook_resid_pre"))["resid_pre", 1]
    for at in (0, 2, 5):
        patch = Intervention.Replace(clean[:, [at]], positions=at)
        changed = model.embed(other, HookSpec().intervene("blocks.1.hook_resid_pre", patch))
        assert abs(sweep.values[1, at] - float(changed[0] @ model.embed(B)[0])) < 1e-5
    ablated = model.ablation_sweep(A, "z", metric="cosine", versus=B)
    assert ablated.values.shape == (model.num_layers, model.num_heads)
    saliency = model.integrated_gradients(A, versus=B, steps=20, hook="blocks.1.hook_resid_pre")
    assert abs(saliency.gap) < 1e-3


def test_what_has_no_pairs_is_refused(both, text_encoder):
    model, _ = both
    for call, message in (
        (lambda: model.attribute_similarity(A, B, "lately"), "integrated or late"),
        (lambda: model.attribute_similarity(A, B, layer=9), "layers 0 to 1"),
        (lambda: text_encoder("masked_lm")[0].attribute_similarity(A, B), "'embedding'"),
        (lambda: model.patch_sweep(A, A.replace("man", "woman"), metric="probability"), "cosine and dot"),
    ):
        with pytest.raises(InputError, match=message):
            call()
