"""Integrated gradients: completeness, the formula against a hand-written path, gradient x input, pages."""

import numpy as np
import pytest

from mionnx import GradientError, HookError, HookSpec, InputError, Intervention, MIModel, Saliency

SCORES = "blocks.0.attn.hook_scores"
PROMPT, OTHER = "The capital of France is", "The capital of Spain is"


def test_scores_sum_to_the_change_of_the_metric(shipped):
    found = shipped.integrated_gradients(PROMPT, OTHER, metric="logit_diff", answer="Paris", versus="Madrid", steps=30)
    paris, madrid = (shipped.token_id(word) for word in ("Paris", "Madrid"))
    ends = [shipped.forward(text).output()[0, -1] for text in (PROMPT, OTHER)]
    change = float(np.subtract(*(logits[paris] - logits[madrid] for logits in ends)))
    text = found.texts[0]
    np.testing.assert_allclose(text.metric - text.baseline, change, rtol=1e-5)
    np.testing.assert_allclose(text.scores.sum(), change, rtol=2e-3)
    assert text.gap == pytest.approx(text.scores.sum() - change, abs=1e-3)
    assert np.count_nonzero(text.scores) == 1  # the texts differ in one token


def test_the_path_is_that_of_the_formula(shipped):
    hook, steps = "blocks.1.hook_resid_pre", 4
    found = shipped.integrated_gradients(PROMPT, "zero", hook, answer=7, steps=steps).scores()
    value = shipped.forward(PROMPT, HookSpec().capture(hook))[hook]
    total = np.zeros_like(value)
    for step in range(steps):
        moved = HookSpec().intervene(hook, Intervention.Scale((step + 0.5) / steps))
        spec = HookSpec().extend(moved).gradient(hook).set_metric("logit", answer=7)
        total += shipped.forward(PROMPT, spec).grad[hook]
    np.testing.assert_allclose(found, (value * total / steps).sum(-1)[0], rtol=1e-3, atol=1e-3)


def test_each_text_of_a_batch_is_attributed_as_alone(shipped):
    texts = [PROMPT, "Madrid is the capital of Spain ."]
    together = shipped.integrated_gradients(texts, answer=["Paris", "Madrid"], steps=3)
    for n, (text, answer) in enumerate(zip(texts, ("Paris", "Madrid"), strict=True)):
        alone = shipped.integrated_gradients(text, answer=answer, steps=3)
        np.testing.assert_array_equal(together.scores(n), alone.scores())


def test_gradient_times_input_is_that(shipped):
    spec = HookSpec().intervene("blocks.2.attn.hook_z", Intervention.Zero(heads=1))
    found = shipped.gradient_times_input(PROMPT, metric="probability", answer="Paris", hooks=spec)
    both = HookSpec().extend(spec).capture("hook_embed")
    cache = shipped.gradients(PROMPT, "hook_embed", "probability", "Paris", hooks=both)
    np.testing.assert_allclose(found.scores(), (cache.grad["embed"] * cache["embed"]).sum(-1)[0], rtol=1e-4, atol=1e-7)
    assert found.gap is None


def test_an_intervention_is_a_part_of_the_model_that_is_attributed(shipped):
    plain = shipped.integrated_gradients(PROMPT, OTHER, answer="Paris", steps=10)
    spec = HookSpec().intervene("blocks.1.hook_attn_out", Intervention.Zero())
    changed = shipped.integrated_gradients(PROMPT, OTHER, answer="Paris", hooks=spec, steps=10)
    logit = shipped.forward(PROMPT, spec).output()[0, -1, shipped.token_id("Paris")]
    assert changed.texts[0].metric == pytest.approx(float(logit), rel=1e-5)
    assert changed.texts[0].metric != pytest.approx(plain.texts[0].metric, rel=1e-2)


def test_what_cannot_be_attributed_is_refused(shipped):
    cases = {
        "positions must correspond": (InputError, lambda: shipped.integrated_gradients(PROMPT, "The capital")),
        "does not broadcast": (InputError, lambda: shipped.integrated_gradients(PROMPT, np.zeros(7))),
        "needs an array": (GradientError, lambda: shipped.integrated_gradients(PROMPT, metric="kl")),
        "steps": (InputError, lambda: shipped.integrated_gradients(PROMPT, steps=0)),
        "no tokens to attribute": (
            HookError,
            lambda: shipped.gradient_times_input(PROMPT, SCORES),
        ),
        "3 tokens for 1 prompts": (InputError, lambda: shipped.gradient_times_input(PROMPT, answer=[1, 2, 3])),
    }
    for message, (error, call) in cases.items():
        with pytest.raises(error, match=message):
            call()


def test_a_result_is_saved_shown_and_loaded(shipped: MIModel, tmp_path):
    found = shipped.gradient_times_input([PROMPT, "</script><b>Spain"], answer="Paris")
    assert "<b>Spain" not in found.page()
    for ending in ("html", "png", "json"):
        assert found.save(tmp_path / f"saliency.{ending}").stat().st_size > 500
    again = Saliency.load(found.save(tmp_path / "saliency.safetensors"))
    assert again.to_json() == found.to_json()
    assert str(again) == str(found)


@pytest.mark.parametrize("size", [3, "auto"])
def test_a_path_in_other_batches_is_the_same_path(shipped, size):
    asked = {"answer": "Paris", "steps": 20}
    one, other = (
        shipped.integrated_gradients([PROMPT, "Paris is"], **asked, **more) for more in ({}, {"batch_size": size})
    )
    for a, b in zip(one.texts, other.texts, strict=True):
        assert np.allclose(a.scores, b.scores, atol=5e-5)
