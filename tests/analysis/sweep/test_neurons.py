"""Sweeps over neurons: every cell equals a run of eager torch with that one neuron changed by a hook."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from sweep_pairs import SEQ, difference, prompts

from mionnx.analysis.sweep.result import PICTURED_NEURONS, pictured_entries
from mionnx.errors import InputError

DOWN = {"gpt2": "transformer.h.{}.mlp.c_proj", "llama": "model.layers.{}.mlp.down_proj"}
OVER = ("layer", "neuron")


def read_by_down(reference, name, layer, ids):
    """The activations [1, seq, d_mlp] that a layer's down projection reads."""
    kept = []
    module = reference.get_submodule(DOWN[name].format(layer))
    handle = module.register_forward_pre_hook(lambda module, given: kept.append(given[0].clone()))
    with torch.no_grad():
        reference(torch.from_numpy(ids[None]))
    handle.remove()
    return kept[0]


def last_logits(reference, name, layer, neuron, new, ids):
    """The last logits with one neuron's activations [seq] put in."""

    def change(module, given):
        value = given[0].clone()
        value[:, :, neuron] = new
        return (value,)

    handle = reference.get_submodule(DOWN[name].format(layer)).register_forward_pre_hook(change)
    with torch.no_grad():
        logits = reference(torch.from_numpy(ids[None])).logits[0, -1].numpy()
    handle.remove()
    return logits


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_patched_neurons_equal_a_loop_in_torch(models, references, name):
    reference, (clean, corrupted) = references(name), prompts(3)
    found = models(name).patch_sweep(clean, corrupted, "mlp.hook_act", OVER, answer=5, versus=9)
    for layer in range(2):
        given = read_by_down(reference, name, layer, clean)
        assert found.values.shape == (2, given.shape[-1])
        for neuron in range(0, given.shape[-1], 5):
            logits = last_logits(reference, name, layer, neuron, given[0, :, neuron], corrupted)
            assert found.values[layer, neuron] == pytest.approx(difference(logits, 5, 9), abs=5e-5)
    assert np.abs(found.effect).max() > 1e-3


def test_ablated_neurons_equal_a_loop_in_torch(models, references):
    """Zeros, and the mean over all tokens of some prompts."""
    reference, ids, others = references("llama"), prompts(4)[0], [prompts(5)[0], prompts(6, seq=5)[0]]
    model, answer = models("llama"), 7
    zero = model.ablation_sweep(ids, "mlp.hook_act", OVER, "log_probability", answer=answer)
    mean = model.ablation_sweep(
        ids, "mlp.hook_act", OVER, "log_probability", kind="mean", reference=others, answer=answer
    )
    for layer in range(2):
        tokens = torch.cat([read_by_down(reference, "llama", layer, other)[0] for other in others])
        for neuron in range(0, tokens.shape[-1], 7):
            for found, new in ((zero, 0.0), (mean, tokens[:, neuron].mean())):
                logits = last_logits(reference, "llama", layer, neuron, new, ids)
                assert found.values[layer, neuron] == pytest.approx(log_softmax(logits)[answer], abs=5e-5)
    assert np.abs(zero.effect).max() > 1e-3


def test_single_positions_of_neurons_add_up_to_first_order(models):
    """Over layer, position and neuron, estimated to first order and computed exactly."""
    model, (clean, corrupted) = models("gpt2"), prompts(7)
    over = ("layer", "position", "neuron")
    found = model.attribute_patch(clean, corrupted, "mlp.hook_act", over, answer=5, versus=9, confirm=12)
    exact = model.patch_sweep(clean, corrupted, "mlp.hook_act", over, answer=5, versus=9)
    known = np.isfinite(found.exact)
    assert known.sum() == 12
    np.testing.assert_allclose(found.exact[known], exact.values[known], atol=1e-5)
    assert found.agreement(exact).pearson > 0.99
    summed = model.attribute_patch(clean, corrupted, "mlp.hook_act", OVER, answer=5, versus=9)
    np.testing.assert_allclose(found.effect.sum(axis=1), summed.effect, atol=1e-6)
    assert exact.values.shape == (2, SEQ, exact.values.shape[-1])


def test_pictures_show_the_leading_neurons(shipped, chromium, tmp_path):
    prompt = "The capital of France is"
    found = shipped.ablation_sweep(prompt, "mlp.hook_act", OVER, "log_probability", layers=[0], answer="Paris")
    assert found.values.shape == (1, 352)
    kept = pictured_entries(found.effect, OVER)[1]
    assert {*kept} == {*np.argsort(-np.abs(found.effect[0]))[:PICTURED_NEURONS].tolist()}
    assert kept == sorted(kept)
    page = chromium(found.save(tmp_path / "neurons.html"))
    assert page.locator("table.heat td").count() == PICTURED_NEURONS
    assert f"the {PICTURED_NEURONS} neurons with the largest numbers, of 352" in page.content()
    assert found.save(tmp_path / "neurons.png").stat().st_size > 1000
    loaded = type(found).load(found.save(tmp_path / "neurons.safetensors"))
    assert (loaded.values == found.values).all()
    assert loaded.top(1) == [({"layer": 0, "neuron": 165}, loaded.effect[0, 165])]


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("mlp.hook_pre", "neurons are at hook_gate, hook_up, hook_act"),
        pytest.param(
            "mlp.hook_expert_act", "experts that each token chose, other ones at each position", marks=pytest.mark.slow
        ),
    ],
)
def test_where_there_are_no_neurons_to_go_over(models, hook, message):
    name = "mixtral" if "expert" in hook else "llama"
    with pytest.raises(InputError, match=message):
        models(name).ablation_sweep(prompts()[0], hook, OVER)
