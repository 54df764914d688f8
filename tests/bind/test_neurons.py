"""`neurons=`: single neurons changed, against hooks in eager torch; in spec files, compiled graphs and gradients."""

from contextlib import contextmanager

import numpy as np
import onnxruntime
import pytest
import torch

from mionnx import HookPoint, HookSpec, Intervention, InterventionError

IDS = np.random.default_rng(0).integers(3, 101, (2, 6))
CHOSEN = [5, 2, 9]
VALUES = np.array([0.5, -1.0, 2.0], np.float32)
PART = np.random.default_rng(1).normal(size=(2, 6, 3)).astype(np.float32)
DOWN = {"gpt2": "transformer.h.{}.mlp.c_proj", "llama": "model.layers.{}.mlp.down_proj"}


@contextmanager
def in_torch(reference, name, layer, change):
    """Change what a layer's down projection reads."""
    module = reference.get_submodule(DOWN[name].format(layer))
    handle = module.register_forward_pre_hook(lambda module, given: (change(given[0].clone()),))
    try:
        yield
    finally:
        handle.remove()


def put(value, new):
    value[..., CHOSEN] = new(value[..., CHOSEN]) if callable(new) else new
    return value


CASES = {
    "zero": (Intervention.Zero(neurons=CHOSEN), 0.0),
    "scale": (Intervention.Scale(3.0, neurons=CHOSEN), lambda old: old * 3),
    "scale each": (Intervention.Scale(VALUES, neurons=CHOSEN), lambda old: old * torch.from_numpy(VALUES)),
    "add": (Intervention.Add(VALUES, neurons=CHOSEN), lambda old: old + torch.from_numpy(VALUES)),
    "replace": (Intervention.Replace(PART, neurons=CHOSEN), torch.from_numpy(PART)),
    "clamp": (Intervention.Clamp(0.01, None, neurons=CHOSEN), lambda old: old.clamp(min=0.01)),
}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("case", CASES)
def test_changed_neurons_equal_a_hook_in_torch(models, references, name, case):
    edit, new = CASES[case]
    point = HookPoint.MlpAct(0)
    found = models(name).forward(IDS, HookSpec().intervene(point, edit).capture(point))
    with in_torch(references(name), name, 0, lambda value: put(value, new)), torch.no_grad():
        expected = references(name)(torch.from_numpy(IDS)).logits.numpy()
    np.testing.assert_allclose(found.output(), expected, atol=5e-5)
    plain = models(name).forward(IDS, HookSpec().capture(point))
    others = np.setdiff1d(np.arange(found[point].shape[-1]), CHOSEN)
    assert (found[point][..., others] == plain[point][..., others]).all()
    assert np.abs(found.output() - plain.output()).max() > 1e-4


def test_the_gradient_passes_through_changed_neurons(models, references):
    seed = np.random.default_rng(2).normal(size=(*IDS.shape, 101)).astype(np.float32)
    spec = HookSpec().intervene(HookPoint.MlpAct(0), Intervention.Scale(VALUES, neurons=CHOSEN, positions=3))
    before = HookPoint.MlpAct(0)
    spec.gradient(before, before=True).gradient("hook_embed").set_metric("cotangent", cotangent=seed)
    found = models("llama").forward(IDS, spec).grad
    kept = {}

    def change(value):
        kept["act"] = value = value.detach().requires_grad_()
        factor = torch.ones_like(value)
        factor[:, 3, CHOSEN] = torch.from_numpy(VALUES)
        return value * factor

    with in_torch(references("llama"), "llama", 0, change):
        (references("llama")(torch.from_numpy(IDS)).logits * torch.from_numpy(seed)).sum().backward()
    expected = kept["act"].grad.numpy()
    np.testing.assert_allclose(found[f"{before}.before"], expected, atol=2e-5 * np.abs(expected).max())
    references("llama").zero_grad()


def test_a_spec_file_holds_neurons_and_a_compiled_graph_has_them_inside(shipped, tmp_path):
    prompt = "The capital of France is"
    spec = HookSpec().intervene("blocks.0.mlp.hook_act", Intervention.Add([3.0, -2.0], neurons=[165, 7]))
    spec.save(tmp_path / "spec.safetensors")
    again = HookSpec.load(tmp_path / "spec.safetensors")
    assert again.interventions[0][1].neurons == (165, 7)
    assert again.sha256 == spec.sha256
    assert HookSpec().intervene("blocks.0.mlp.hook_act", Intervention.Add([3.0, -2.0])).sha256 != spec.sha256
    expected = shipped.forward(prompt, again).output()
    made = shipped.compile(again, tmp_path / "compiled")
    assert "neurons 165, 7" in (made / "README.md").read_text()
    session = onnxruntime.InferenceSession(made / "model.onnx")
    ids = np.asarray(shipped.to_tokens(prompt))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.shape[1])[None]}
    for entry in session.get_inputs():
        if entry.name.startswith("past"):
            feeds[entry.name] = np.zeros([1, entry.shape[1], 0, entry.shape[3]], np.float32)
    found = session.run(["logits"], feeds)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_neurons_of_chosen_experts(models, references):
    """Neuron 3 of expert 1, at each place of a token at which that expert was chosen."""
    from oracle import Inputs, run

    point, edit = HookPoint.MlpExpertAct(1), Intervention.Scale(-2.0, experts=1, neurons=3)
    found = models("mixtral").forward(IDS, HookSpec().intervene(point, edit)).output()
    expected = run(references("mixtral"), Inputs(IDS, np.ones_like(IDS)), [(point, edit)]).logits
    np.testing.assert_allclose(found, expected, atol=5e-5)
    assert np.abs(found - models("mixtral").forward(IDS).output()).max() > 1e-4


@pytest.mark.parametrize(
    ("hook", "edit", "message"),
    [
        ("blocks.0.mlp.hook_pre", Intervention.Zero(neurons=1), r"have no neurons; .*blocks\.0\.mlp\.hook_gate"),
        ("blocks.0.mlp.hook_act", Intervention.Zero(neurons=352), r"neuron 352 of 352 \(d_mlp, 0 to 351\)"),
        ("blocks.0.mlp.hook_act", Intervention.Add([1.0, 2.0], neurons=[1, 2, 3]), "fits neither"),
        ("blocks.0.mlp.hook_act", Intervention.Add([1.0, 2.0], neurons=[1, 1]), "chosen twice"),
    ],
)
def test_neurons_that_are_not_there_are_said(shipped, hook, edit, message):
    with pytest.raises(InterventionError, match=message):
        shipped.forward("The capital", HookSpec().intervene(hook, edit))


def test_a_later_zero_covers_only_the_neurons_that_it_names(shipped):
    act = "blocks.0.mlp.hook_act"
    add, zero = Intervention.Add(1.0, neurons=[1, 2]), Intervention.Zero(neurons=[1])
    shipped.forward("The capital", HookSpec().intervene(act, add).intervene(act, zero))
    with pytest.raises(InterventionError, match="would do nothing"):
        shipped.forward(
            "The capital", HookSpec().intervene(act, zero).intervene(act, Intervention.Zero(neurons=[2, 1]))
        )
