"""Corruption by interventions: causal tracing equals a loop in eager torch, and any spec one forward pass a cell."""

import itertools
import json

import numpy as np
import pytest
import torch
from command_line import LLAMA, mionnx, succeeded
from oracle import Inputs, run
from scipy.special import softmax
from sweep_pairs import SEQ, difference, prompts

from mionnx import HookPoint, HookSpec, Intervention, InterventionError, KnockoutSpec, Noise, create_knockout_mask
from mionnx.analysis.sweep.patched_runs import Shortcuts
from mionnx.errors import InputError

SUBJECT, ANSWER = [2, 3], 7


def traced(reference, ids, noise, layer, at):
    """P(answer) with noise at the subject's embeddings and the clean stream before a layer put back at one token."""
    layers = reference.model.layers
    with torch.no_grad():
        clean = reference(torch.from_numpy(ids[None]), output_hidden_states=True).hidden_states[layer]

    def corrupt(module, given, output):
        output = output.clone()
        output[0, SUBJECT] += torch.from_numpy(noise)
        return output

    def restore(module, given, named):
        value = given[0].clone()
        value[:, at] = clean[:, at]
        return (value, *given[1:]), named

    handles = [reference.get_input_embeddings().register_forward_hook(corrupt)]
    handles += [layers[layer].register_forward_pre_hook(restore, with_kwargs=True)] if at is not None else []
    with torch.no_grad():
        logits = reference(torch.from_numpy(ids[None])).logits[0, -1].double().numpy()
    for handle in handles:
        handle.remove()
    return softmax(logits)[ANSWER]


def test_causal_tracing_equals_a_loop_in_torch(models, references):
    """The noise: 3 standard deviations of the subject's embeddings, drawn by numpy with the seed."""
    model, reference, ids = models("llama"), references("llama"), prompts(11)[0]
    corruption = Noise([SUBJECT], seed=5, repeats=4)
    found = model.patch_sweep(ids, corruption, metric="probability", answer=ANSWER)
    embedded = reference.get_input_embeddings().weight.detach().double().numpy()[ids[SUBJECT]]
    drawn = np.random.default_rng([5, 0]).standard_normal((4, *embedded.shape)) * 3 * embedded.std(ddof=1)
    expected = np.array(
        [
            [[traced(reference, ids, noise, layer, at) for at in range(SEQ)] for layer in range(2)]
            for noise in drawn.astype(np.float32)
        ]
    )
    np.testing.assert_allclose(found.by_pair, expected, atol=5e-6)
    corrupted = [traced(reference, ids, noise, 0, None) for noise in drawn.astype(np.float32)]
    np.testing.assert_allclose(found.corrupted_by_pair, corrupted, atol=5e-6)
    assert found.n == 4
    assert found.clean == pytest.approx(softmax(model.forward(ids).output()[0, -1].astype(float))[ANSWER], abs=1e-6)
    assert (model.patch_sweep(ids, corruption, metric="probability", answer=ANSWER).values == found.values).all()
    assert np.abs(found.effect).max() > 1e-4


def test_repeats_of_several_prompts_are_averaged(models):
    model, (one, other) = models("llama"), prompts(12)
    noise = Noise(1, std=0.5, repeats=3)
    found = model.patch_sweep([one, other], noise, "z", ("layer", "head"), "log_probability", answer=[4, 5])
    specs = noise.specs(model, [one, other])
    assert [len(own) for own in specs] == [3, 3]
    for pair, (ids, answer) in enumerate(((one, 4), (other, 5))):
        alone = model.patch_sweep(ids, specs[pair], "z", ("layer", "head"), "log_probability", answer=answer)
        assert alone.n == 3
        np.testing.assert_allclose(found.by_pair[pair], alone.values, atol=1e-6)
    assert found.n == 2


def everywhere(heads: int, width: int) -> HookSpec:
    """Interventions of several kinds, from the embedding to the last layer."""
    draw = np.random.default_rng(3)
    spec = HookSpec().intervene("hook_embed", Intervention.Add(draw.normal(size=(SEQ, width)), positions=[1, 4]))
    spec.intervene(HookPoint.AttnZ(0), Intervention.Scale(np.linspace(0.5, 1.5, SEQ)[:, None, None]))
    spec.intervene(HookPoint.MlpAct(0), Intervention.Zero(neurons=[3, 5], positions=-1))
    spec.intervene(HookPoint.MlpAct(0), Intervention.Add(0.3))
    spec.intervene(
        HookPoint.AttnScores(1), Intervention.Knockout(create_knockout_mask(KnockoutSpec().edge(-1, 2), heads, SEQ))
    )
    spec.intervene(HookPoint.MlpOut(1), Intervention.ProjectOut(draw.normal(size=width)))
    return spec.intervene(HookPoint.FinalNorm, Intervention.Scale(1.1))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize("hook", ["hook_resid_pre", "hook_v", "mlp.hook_act", "hook_mlp_out"])
def test_a_corruption_by_any_spec_equals_torch(models, references, name, direction, hook):
    model, ids = models(name), prompts(13)[0]
    spec = everywhere(model.num_heads, model.hooked.metadata.sizes.hidden_size)
    edits, inputs = list(spec.interventions), Inputs(ids[None], np.ones((1, SEQ), int))
    over = ("layer", "position")
    found = model.patch_sweep(ids, spec, hook, over, answer=5, versus=9, patching=direction)
    given = run(references(name), inputs, edits if direction == "noising" else [])
    for layer, position in itertools.product(range(2), (0, 2, 4, SEQ - 1)):
        point = HookPoint.parse(f"blocks.{layer}.{'attn.' if hook == 'hook_v' else ''}{hook}")
        patch = (point, Intervention.Replace(given.values[str(point)], positions=position))
        logits = run(references(name), inputs, [*(edits if direction == "denoising" else []), patch]).logits[0, -1]
        assert found.values[layer, position] == pytest.approx(difference(logits, 5, 9), abs=5e-5)
    plain = Shortcuts(**dict.fromkeys(("batch", "truncate", "last", "window", "skip"), False))
    slow = model.patch_sweep(ids, spec, hook, over, answer=5, versus=9, patching=direction, shortcuts=plain)
    np.testing.assert_allclose(found.values, slow.values, atol=5e-6)
    assert np.abs(found.effect).max() > 1e-3


def test_a_corrupted_run_of_a_recurrent_model(recurrent):
    prompt = "The capital of France is"
    spec = HookSpec().intervene("hook_embed", Intervention.Scale(-1.0, positions=3))
    found = recurrent.patch_sweep(prompt, spec, "resid_post", answer="Paris", versus="Rome")
    point = HookPoint.ResidPost(1)
    clean = recurrent.forward(prompt, HookSpec().capture(point))[point]
    patched = HookSpec().extend(spec).intervene(point, Intervention.Replace(clean, positions=3))
    logits = recurrent.forward(prompt, patched).output()[0, -1]
    tokens = recurrent.token_id("Paris"), recurrent.token_id("Rome")
    assert found.values[1, 3] == pytest.approx(difference(logits, *tokens), abs=5e-5)


def test_estimates_of_a_corruption_by_a_spec(models):
    model, ids = models("llama"), prompts(14)[0]
    noise = Noise([SUBJECT], std=0.002, repeats=2)
    given = {"metric": "logit_diff", "answer": 5, "versus": 9}
    found = model.attribute_patch(ids, noise, "z", ("layer", "head", "position"), **given, confirm=6)
    exact = model.patch_sweep(ids, noise, "z", ("layer", "head", "position"), **given)
    known = np.isfinite(found.exact)
    np.testing.assert_allclose(found.exact[known], exact.values[known], atol=1e-5)
    assert found.agreement(exact).pearson > 0.999
    path = model.attribute_patch(ids, noise, "z", ("layer", "head"), **given, steps=4)
    assert path.n == 2


def test_a_file_continues_the_same_corruption_only(models, tmp_path):
    model, ids = models("llama"), prompts(15)[0]
    given = {"metric": "probability", "answer": 5, "resume": tmp_path / "sweep.safetensors"}
    first = model.patch_sweep(ids, Noise(2, std=0.1), **given)
    assert (model.patch_sweep(ids, Noise(2, std=0.1), **given).values == first.values).all()
    with pytest.raises(InputError, match="another sweep"):
        model.patch_sweep(ids, Noise(2, std=0.1, seed=1), **given)


@pytest.mark.parametrize(
    ("corrupted", "kind", "message"),
    [
        (HookSpec(), InputError, "without interventions"),
        (HookSpec().capture("hook_embed"), InputError, "leave captures"),
        ([HookSpec().intervene("hook_embed", Intervention.Scale(2.0)), "The"], InputError, "of something else"),
        (Noise("France"), InputError, "came as ids"),
        (Noise(9), InputError, "9 of 7 tokens"),
        (Noise(1, hook="blocks.0.attn.hook_q"), InputError, r"\[batch, n_heads, seq, head_dim\]"),
        (HookSpec().intervene("hook_embed", Intervention.Zero(positions=9)), InterventionError, "does not exist"),
        (
            HookSpec().intervene(HookPoint.ResidPost(1), Intervention.Zero(positions=0)),
            InterventionError,
            "changes nothing that is asked for",
        ),
    ],
)
def test_corruptions_that_do_not_fit_are_said(models, corrupted, kind, message):
    with pytest.raises(kind, match=message):
        models("llama").patch_sweep(prompts()[0], corrupted, metric="probability", answer=5)


def test_path_patching_and_other_positions_take_texts_only(models):
    model, ids, noise = models("llama"), prompts()[0], Noise(1, std=1.0)
    with pytest.raises(InputError, match="path patching takes a corrupted text"):
        model.path_patch(ids, noise, "all", metric="probability", answer=5)
    with pytest.raises(InputError, match="read at its last token"):
        model.patch_sweep(ids, noise, metric="probability", answer=5, position=3)


@pytest.mark.parametrize(
    "given", [{"std": 0.0}, {"sigmas": -1.0}, {"std": 1.0, "sigmas": 3.0}, {"repeats": 0}, {"seed": -1}]
)
def test_noise_of_no_size_is_refused(given):
    with pytest.raises(InputError):
        Noise("France", **given)


def test_more_draws_than_memory_holds_are_refused():
    with pytest.raises(InputError, match="repeats must be 1,000 or below, got 1000000000000"):
        Noise("France", repeats=10**12)


def test_noise_and_specs_on_the_command_line(tmp_path):
    prompt, asked = "The capital of France is", ("--metric", "probability", "--answer", "Paris", "--json")
    found = json.loads(succeeded("sweep", LLAMA, prompt, "--noise", "France", "--repeats", 3, *asked))
    assert found["n"] == 3
    assert np.array(found["values"])[0, 3] > 0.99 > found["corrupted"]
    HookSpec().intervene("hook_embed", Intervention.Zero(positions=3)).save(tmp_path / "zero.safetensors")
    spec = ("--corrupted-spec", tmp_path / "zero.safetensors")
    assert json.loads(succeeded("sweep", LLAMA, prompt, *spec, *asked))["corrupted"] < 0.5
    assert "give one of them" in mionnx("sweep", LLAMA, prompt, *spec, "--noise", "France").stderr
    assert "goes with --noise" in mionnx("sweep", LLAMA, prompt, "The capital of Peru is", "--seed", "1").stderr


@pytest.mark.slow
def test_means_by_position_and_resampling_on_the_command_line(tmp_path, shipped):
    prompt, texts = "The capital of France is", [f"The capital of {one} is" for one in ("Peru", "Japan", "Kenya")]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    file = tmp_path / "texts.txt"
    asked = ("sweep", LLAMA, prompt, "--hook", "z", "--over", "layer,head", "--reference", file, "--json")
    found = json.loads(succeeded(*asked, "--ablate", "mean", "--by", "position"))
    expected = shipped.ablation_sweep(prompt, kind="mean", by="position", reference=texts)
    np.testing.assert_allclose(found["values"], expected.values, atol=1e-6)
    assert json.loads(succeeded(*asked, "--ablate", "resample", "--repeats", 4, "--seed", 2))["n"] == 4
    assert "goes with --ablate" in mionnx("sweep", LLAMA, prompt, "The capital of Peru is", "--by", "token").stderr
