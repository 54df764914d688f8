"""Gradients against torch's autograd in float64, against finite differences, and against each other."""

import numpy as np
import onnx
import pytest
import torch
from families import VOCAB
from family_batches import batch
from gradient_oracle import gradients as by_autograd
from scipy.special import log_softmax, softmax

from mionnx import SAE, GradientError, HookPoint, HookSpec, Intervention, Logits, MIModel, Options
from mionnx.analysis.features.config import Config
from mionnx.run.graph_memory import NODE, SESSION

PROMPT = "The capital of France is"
TIMES = 3.0  # of torch's own float32 error
LEAST = 2e-6  # relative: some roundings of float32


def worst(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest number; an expected value that is none would hide all."""
    assert np.isfinite(expected).all()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_every_gradient_equals_that_of_torch_in_float64(family, models, references):
    inputs, model = batch("left"), models(family)
    seed = np.random.default_rng(0).normal(size=(*inputs.ids.shape, VOCAB)) * inputs.real[..., None]
    exact, single = (by_autograd(references(family), inputs, seed, dtype) for dtype in (torch.float64, torch.float32))
    for values in (exact, single):  # what a pattern has for keys that are padding no intervention changes
        for name in (name for name in values if name.endswith("attn.hook_pattern")):
            values[name] *= inputs.real[:, None, None]
    spec = HookSpec().gradient("*").set_metric("cotangent", cotangent=seed)
    cache = model.forward(inputs.ids, spec, attention_mask=inputs.mask, logits=False)
    whole = {str(point) for point in model.hook_points() if model.hooked.dtype(point) == np.int64}
    assert set(cache.grad) == {str(point) for point in model.hook_points() if not point.derived} - whole
    assert set(cache.grad) == set(exact)
    off = {name: worst(cache.grad[name], exact[name]) for name in exact}
    own = {name: worst(single[name], exact[name]) for name in exact}
    assert {
        name: (off[name], own[name]) for name in off if not off[name] <= max(TIMES * max(own.values()), LEAST)
    } == {}


def quotient_of(model: MIModel, hook: str, spec: HookSpec, metric, step: float = 1e-2) -> tuple[float, np.ndarray]:
    """The derivative of a metric along a random direction at a hook point by central differences, and the direction."""
    shape = model.forward(PROMPT, HookSpec().capture(hook))[hook].shape
    direction = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    ends = []
    for sign in (1, -1):
        moved = HookSpec().extend(spec).intervene(hook, Intervention.Add(sign * step * direction))
        ends.append(metric(model.forward(PROMPT, moved).output()[0, -1].astype(np.float64)))
    return float(ends[0] - ends[1]) / (2 * step), direction


METRICS = {
    "logit": ({"answer": 7}, lambda logits: logits[7]),
    "logit_diff": ({"answer": 7, "versus": 9}, lambda logits: logits[7] - logits[9]),
    "log_probability": ({"answer": 7}, lambda logits: log_softmax(logits)[7]),
    "probability": ({"answer": 7}, lambda logits: softmax(logits)[7]),
    "kl": ({"reference": np.linspace(0, 9, 471)}, lambda logits: kl(np.linspace(0, 9, 471), logits)),
}


def kl(reference: np.ndarray, logits: np.ndarray) -> float:
    """KL(reference || logits), in nats."""
    return float((softmax(reference) * (log_softmax(reference) - log_softmax(logits))).sum())


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_has_its_value_and_its_gradient(shipped, name):
    given, metric = METRICS[name]
    hook = "blocks.2.hook_resid_mid"
    cache = shipped.gradients(PROMPT, hook, name, **given)
    logits = shipped.forward(PROMPT).output()[0, -1].astype(np.float64)
    np.testing.assert_allclose(cache.metric, [metric(logits)], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(cache.output()[0, 0], logits.astype(np.float32))
    quotient, direction = quotient_of(shipped, hook, HookSpec(), metric)
    np.testing.assert_allclose((cache.grad[hook] * direction).sum(), quotient, rtol=2e-2, atol=1e-4)


def test_the_loss_is_that_of_the_texts_own_tokens_and_padding_counts_for_nothing(shipped):
    texts = [PROMPT, "The capital of Spain is Madrid ."]
    cache = shipped.gradients(texts, "blocks.1.hook_mlp_out", "loss")
    for row, text in enumerate(texts):
        ids = shipped.tokenize(text).ids
        logits = log_softmax(shipped.forward(text).output()[0].astype(np.float64), axis=-1)
        expected = -np.mean([logits[i, ids[i + 1]] for i in range(len(ids) - 1)])
        np.testing.assert_allclose(cache.metric[row], expected, rtol=1e-5)
        alone = shipped.gradients(text, "blocks.1.hook_mlp_out", "loss").grad["mlp_out", 1]
        np.testing.assert_allclose(cache.grad["mlp_out", 1][row, -len(ids) :], alone[0], atol=1e-6)
        assert not cache.grad["mlp_out", 1][row, : -len(ids)].any()


@pytest.mark.parametrize("hook", ["hook_logits", "blocks.1.attn.hook_pattern"])
def test_gradients_of_a_padded_batch_are_those_of_texts_one_by_one(shipped, hook):
    """By the logits too, of which the metric reads one position; keys that are padding have none."""
    texts = [PROMPT, "When Mary and John went to the store , John gave a drink to"]
    together, apart = (shipped.gradients(texts, hook, batch_size=size).grad[hook] for size in (None, 1))
    np.testing.assert_allclose(together, apart, atol=1e-5)
    if hook == "hook_logits":
        assert [place[:2] for place in np.argwhere(together).tolist()] == [[0, 13], [1, 13]]


RIGHT = [[5, 6, 7, 8], [5, 6, 9, 9]], np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
READINGS = {
    "logit": {"metric": "logit", "answer": 7},
    "top": {"metric": "logit"},
    "before the last": {"metric": "log_probability", "answer": 7, "position": -2},
    "kl": {"metric": "kl", "reference": np.linspace(0, 9, 471)},
    "cotangent": {"cotangent": lambda logits: np.tanh(logits)},
    "loss": {"metric": "loss"},
}


@pytest.mark.parametrize("name", READINGS)
def test_a_batch_padded_on_the_right_is_read_at_the_end_of_each_rows_own_text(shipped, name):
    """FINDINGS, part 1, defect 6: the metric and its gradients are those of each row alone."""
    (ids, mask), hook = RIGHT, "blocks.1.hook_resid_post"
    cache = shipped.gradients(ids, hook, attention_mask=mask, **READINGS[name])
    for row, length in enumerate(mask.sum(axis=1)):
        alone = shipped.gradients(ids[row][:length], hook, **READINGS[name])
        np.testing.assert_allclose(cache.metric[row], alone.metric[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(cache.grad[hook][row, :length], alone.grad[hook][0], rtol=1e-3, atol=2e-6)
        assert not cache.grad[hook][row, length:].any()
        if name != "loss":
            np.testing.assert_allclose(cache.output()[row], alone.output()[0], atol=5e-5)


def test_a_gradient_of_a_row_padded_on_the_right_is_the_quotient_of_its_logit(shipped):
    """FINDINGS, part 1, defect 6: beside finite differences of `Logits(positions=-1)`, refused there too."""
    (ids, mask), hook = RIGHT, "blocks.1.hook_resid_post"
    grad = shipped.gradients(ids, hook, "logit", answer=7, attention_mask=mask).grad[hook]
    direction = np.random.default_rng(1).normal(size=grad.shape)
    ends = []
    for step in (0.01, -0.01):
        moved = HookSpec().intervene(hook, Intervention.Add(step * direction))
        ends.append(shipped.forward(ids, moved, attention_mask=mask, logits=Logits(positions=-1)).output()[:, 0, 7])
    quotients = (ends[0].astype(float) - ends[1]) / 0.02
    np.testing.assert_allclose((grad * direction).sum(axis=(1, 2)), quotients, rtol=2e-2, atol=1e-3)


VECTOR = np.random.default_rng(2).normal(size=128).astype(np.float32)
INTERVENTIONS = {
    "zero": ("blocks.2.attn.hook_z", Intervention.Zero(heads=[1, 3])),
    "scale": ("blocks.2.hook_mlp_out", Intervention.Scale(0.3)),
    "add": ("blocks.2.hook_resid_pre", Intervention.Add(VECTOR, positions=-1)),
    "project out": ("blocks.3.hook_resid_pre", Intervention.ProjectOut(VECTOR)),
    "low rank": ("blocks.3.hook_resid_pre", Intervention.LowRank(VECTOR / 99, VECTOR, 0.1, positions=[2, -1])),
    "replace": ("blocks.2.hook_resid_mid", Intervention.Replace(VECTOR, positions=[1, 2])),
    "clamp": ("blocks.2.mlp.hook_act", Intervention.Clamp(-0.1, 0.1)),
}


@pytest.mark.parametrize("name", INTERVENTIONS)
def test_gradients_are_those_of_the_model_as_it_is_changed(shipped, name):
    spec, hook = HookSpec().intervene(*INTERVENTIONS[name]), "blocks.1.hook_resid_pre"
    cache = shipped.gradients(PROMPT, hook, "logit", 7, hooks=spec)
    step = 2e-4 if name == "clamp" else 1e-3  # a clamp's bounds lie near some of the values
    quotient, direction = quotient_of(shipped, hook, spec, lambda logits: logits[7], step)
    np.testing.assert_allclose((cache.grad[hook] * direction).sum(), quotient, rtol=3e-2, atol=1e-2)


def test_a_gradient_by_part_of_a_value_is_that_part_of_the_whole(shipped):
    hook = HookPoint.AttnZ(1)
    whole = shipped.gradients(PROMPT, hook, "logit", 7).grad[hook]
    spec = HookSpec().gradient(hook, positions=[-1, 1], heads=[2]).set_metric("logit", answer=7)
    part = shipped.forward(PROMPT, spec).grad[hook]
    np.testing.assert_allclose(part, whole[:, [4, 1]][:, :, [2]], rtol=1e-4, atol=1e-7)


def test_a_gradient_before_an_intervention_is_by_what_came_in(shipped):
    hook = "blocks.2.hook_resid_pre"
    spec = HookSpec().intervene(hook, Intervention.Scale(0.5))
    spec.gradient(hook).gradient(hook, before=True).set_metric("logit", answer=7)
    cache = shipped.forward(PROMPT, spec)
    np.testing.assert_allclose(cache.grad[f"{hook}.before"], 0.5 * cache.grad[hook], rtol=1e-5)
    plain = HookSpec().gradient(hook, before=True).set_metric("logit", answer=7)
    alone = shipped.forward(PROMPT, plain).grad
    np.testing.assert_array_equal(alone[f"{hook}.before"], shipped.gradients(PROMPT, hook, "logit", 7).grad[hook])


def test_a_past_does_not_change_gradients(shipped):
    ids = shipped.tokenize(PROMPT).ids
    hook = "blocks.2.hook_resid_mid"
    past = shipped.forward([ids[:3]], use_cache=True).kv_cache
    spec = HookSpec().gradient(hook).set_metric("logit", answer=7)
    cached = shipped.forward([ids[3:]], spec, cache=past)
    whole = shipped.forward([ids], spec)
    np.testing.assert_allclose(cached.grad[hook], whole.grad[hook][:, 3:], rtol=1e-4, atol=1e-6)


def test_a_function_of_the_logits_is_differentiated_by_its_seed(shipped):
    hook = "blocks.2.hook_resid_mid"

    def derivative(logits):
        made = np.zeros_like(logits)
        made[:, 7], made[:, 9] = 1, -1
        return made

    by_name = shipped.gradients(PROMPT, hook, "logit_diff", 7, 9)
    by_seed = shipped.gradients(PROMPT, hook, lambda logits: logits[:, 7] - logits[:, 9] + 100, cotangent=derivative)
    np.testing.assert_allclose(by_seed.grad[hook], by_name.grad[hook], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_seed.metric, by_name.metric + 100, rtol=1e-6)


def test_a_seed_for_every_logit_is_that_of_all_positions(shipped):
    hook, seed = "blocks.2.hook_resid_mid", np.zeros((1, 5, 471), np.float32)
    seed[0, [2, 4], 7] = 1
    whole = shipped.gradients(PROMPT, hook, cotangent=seed)
    parts = [shipped.gradients(PROMPT, hook, "logit", 7, position=at) for at in (2, -1)]
    np.testing.assert_allclose(whole.grad[hook], sum(part.grad[hook] for part in parts), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(whole.metric, sum(part.metric for part in parts), rtol=1e-5)
    assert whole.output().shape == (1, 5, 471)


def test_rules_of_the_verb_are_those_of_the_spec(shipped):
    hook = "blocks.1.hook_resid_pre"
    spec = HookSpec().gradient(hook).set_metric("logit", answer=7, rules="relp")
    found = shipped.gradients(PROMPT, hook, answer=7, rules="relp").grad[hook]
    np.testing.assert_array_equal(found, shipped.forward(PROMPT, spec, logits=Logits(positions=-1)).grad[hook])
    assert np.abs(found - shipped.gradients(PROMPT, hook, answer=7).grad[hook]).max() > 1e-2
    inside = {"of": "blocks.3.hook_resid_pre", "cotangent": 1.0}
    relp, plain = (shipped.gradients(PROMPT, hook, rules=rules, **inside).grad[hook] for rules in ("relp", "gradient"))
    assert np.abs(relp - plain).max() > 1e-2


def test_what_nothing_would_read_is_refused(shipped, monkeypatch):
    monkeypatch.setattr(type(shipped), "forward", None)
    whole, inside = np.ones((1, 5, 471)), {"of": "blocks.2.hook_resid_pre", "cotangent": 1.0}
    refused = {
        "the loss reads every position": {"metric": "loss", "position": 2},
        "has numbers for every position": {"cotangent": whole, "position": 2},
        "reads no metric=": {"metric": "logit", "cotangent": np.ones(471)},
        "cotangent= takes the place .* reads no answer=": {"answer": 7, "cotangent": np.ones(471)},
        "of=blocks.2.hook_resid_pre takes the place .* metric=, position=, answer=, versus=, reference=": {
            "metric": "logit_diff",
            "answer": 7,
            "versus": 9,
            "position": 1,
            "reference": np.ones(471),
            **inside,
        },
    }
    for message, given in refused.items():
        with pytest.raises(GradientError, match=message):
            shipped.gradients(PROMPT, "hook_embed", **given)
    later, last = "blocks.3.hook_mlp_out", lambda value: value
    for message, given in {  # before the pass that tells the most probable token, or what a seed is a function of
        "nothing depends on it": {"points": "blocks.1.attn.hook_result"},
        "reads no versus": {"points": later, "versus": 9},
        "a rank changes in steps": {"points": later, "metric": "rank"},
        "no rules 'relq'": {"points": later, "rules": "relq"},
        "blocks.2.hook_resid_pre does not depend on it": {"points": later, "of": inside["of"], "cotangent": last},
        "and no logits|reads no": {"points": later, "of": inside["of"], "cotangent": last, "position": 1},
    }.items():
        with pytest.raises(GradientError, match=message):
            shipped.gradients(PROMPT, **given)
    with pytest.raises(GradientError, match="the loss reads every position"):
        shipped.integrated_gradients(PROMPT, metric="loss", position=1)
    for message, given in {
        "the loss reads every position": {"name": "loss", "position": -1},
        "has numbers for every position": {"name": "cotangent", "cotangent": whole, "position": -1},
        "and no logits": {"name": "cotangent", "cotangent": 1 * np.ones(1), "of": "hook_embed", "position": -1},
    }.items():
        with pytest.raises(GradientError, match=message):
            HookSpec().set_metric(**given)


def test_the_answer_is_the_most_probable_token_of_each_row(shipped):
    texts = [PROMPT, "The capital of Italy is"]
    cache = shipped.gradients(texts, "hook_embed", "probability")
    np.testing.assert_allclose(cache.metric, softmax(cache.output()[:, 0], axis=-1).max(axis=-1), rtol=1e-5)


def test_what_has_no_gradient_is_refused_before_anything_runs(shipped):
    cases = {
        "a rank changes in steps": lambda: shipped.gradients(PROMPT, "hook_embed", "rank"),
        "cotangent= takes its derivative": lambda: shipped.gradients(PROMPT, "hook_embed", lambda logits: logits.max()),
        "needs versus=": lambda: shipped.gradients(PROMPT, "hook_embed", "logit_diff", 7),
        "token 7 and itself": lambda: shipped.gradients(PROMPT, "hook_embed", "logit_diff", 7, 7),
        "2 tokens for 1 rows": lambda: shipped.gradients(PROMPT, "hook_embed", "logit", [7, 8]),
        "attn.hook_z has one": lambda: shipped.gradients(PROMPT, "blocks.1.attn.hook_result", "logit", 7),
        "is that of a metric": lambda: shipped.forward(PROMPT, HookSpec().gradient("hook_embed")),
        "has no effect: the spec asks for no gradient": lambda: shipped.forward(
            PROMPT, HookSpec().set_metric("loss", rules="relp")
        ),
        "reads no versus": lambda: shipped.gradients(PROMPT, "hook_embed", "probability", 7, 9),
        "did you mean 'logit_diff'": lambda: shipped.gradients(PROMPT, "hook_embed", "logit_dif", 7),
        "and must be": lambda: shipped.gradients(PROMPT, "hook_embed", cotangent=np.ones(3)),
        "computes no metric": lambda: shipped.generate(
            PROMPT, max_new_tokens=1, hooks=HookSpec().gradient("hook_embed").set_metric("loss")
        ),
        "logits of all tokens": lambda: shipped.forward(
            PROMPT, HookSpec().gradient("hook_embed").set_metric("logit", answer=7), logits=Logits(token_ids=[7])
        ),
    }
    for message, call in cases.items():
        with pytest.raises(GradientError, match=message):
            call()


def test_a_cache_with_gradients_is_saved_and_loaded(shipped, tmp_path):
    cache = shipped.gradients(PROMPT, ["hook_embed", "blocks.1.hook_mlp_out"], "logit", 7)
    again = type(cache).load(cache.save(tmp_path / "cache.safetensors"))
    assert [*again.grad] == [*cache.grad]
    np.testing.assert_array_equal(again.grad["mlp_out", -3], cache.grad["mlp_out", 1])
    np.testing.assert_array_equal(again.metric, cache.metric)


def test_a_spec_with_gradients_is_saved_and_loaded(shipped, tmp_path):
    spec = HookSpec().gradient("blocks.*.attn.hook_z", positions=-1).set_metric("kl", reference=np.arange(471.0))
    spec.save(tmp_path / "spec.safetensors")
    again = HookSpec.load(tmp_path / "spec.safetensors")
    assert again.sha256 == spec.sha256
    found, expected = (shipped.forward(PROMPT, one).grad for one in (again, spec))
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_value_inside_is_differentiated_times_numbers(shipped):
    """The chain rule at a hook point: the gradient by what comes before is that of its value times its gradient."""
    of, before = "blocks.2.hook_resid_pre", "blocks.0.hook_resid_mid"
    whole = shipped.gradients(PROMPT, [before, of], "logit", 7).grad
    inner = shipped.gradients(PROMPT, before, cotangent=whole[of], of=of)
    np.testing.assert_allclose(inner.grad[before], whole[before], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(inner.metric, (inner[of] * whole[of]).sum(axis=(1, 2)), rtol=1e-4)
    by_function = shipped.gradients(PROMPT, before, cotangent=lambda value: value, of=of)
    np.testing.assert_allclose(by_function.metric, (inner[of] ** 2).sum(axis=(1, 2)), rtol=1e-5)
    spec = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero())
    changed = shipped.gradients(PROMPT, before, cotangent=1.0, of=of, hooks=spec)
    np.testing.assert_allclose(changed.metric, changed[of].sum(axis=(1, 2)), rtol=1e-4)
    for message, call in {
        "give them as cotangent=": lambda: shipped.gradients(PROMPT, before, of=of),
        "value at blocks.2.hook_resid_pre is": lambda: shipped.gradients(PROMPT, before, cotangent=np.ones(3), of=of),
        "does not depend on it": lambda: shipped.gradients(PROMPT, "blocks.3.hook_mlp_out", cotangent=1.0, of=of),
    }.items():
        with pytest.raises(GradientError, match=message):
            call()


def test_the_state_of_a_recurrent_model_tells_which_write_it_keeps(recurrent):
    ids = [5, 6, 7, 8]
    state = "blocks.1.rwkv.hook_state"
    found = recurrent.gradients(ids, "blocks.1.rwkv.hook_v", cotangent=1.0, of=state)
    moved = []
    direction = np.random.default_rng(0).normal(size=found.grad["v", 1].shape).astype(np.float32)
    for sign in (1, -1):
        spec = HookSpec().capture(state).intervene("blocks.1.rwkv.hook_v", Intervention.Add(sign * 0.01 * direction))
        moved.append(float(recurrent.forward(ids, spec)[state].sum()))
    np.testing.assert_allclose((found.grad["v", 1] * direction).sum(), (moved[0] - moved[1]) / 0.02, rtol=1e-3)


@pytest.mark.parametrize("error", ["kept", "dropped"])
def test_features_of_an_autoencoder_have_the_gradients_of_torch(models, references, error):
    """Through the splice and before it; the gradient of what the error term hides is that of the model itself."""
    inputs, model, hook = batch("left"), models("llama"), "blocks.0.hook_resid_post"
    random, width, features = np.random.default_rng(0), model.hidden_size, 24
    shapes = {"W_enc": (width, features), "b_enc": (features,), "W_dec": (features, width), "b_dec": (width,)}
    weights = {name: random.normal(size=shape, scale=0.2).astype(np.float32) for name, shape in shapes.items()}
    sae = SAE(Config("standard", subtracts_bias=True, hook=hook), weights)
    seed = random.normal(size=(*inputs.ids.shape, VOCAB)) * inputs.real[..., None]
    w = {name: torch.from_numpy(array).double() for name, array in weights.items()}

    def spliced(value, keep):
        acts = keep(sae.acts, torch.relu((value - w["b_dec"]) @ w["W_enc"] + w["b_enc"]))
        clean = torch.relu((value - w["b_dec"]) @ w["W_enc"] + w["b_enc"])
        kept = value - (clean @ w["W_dec"] + w["b_dec"]) if error == "kept" else 0
        return acts @ w["W_dec"] + w["b_dec"] + kept

    exact = by_autograd(references("llama"), inputs, seed, splices={hook: spliced})
    hooks = [sae.acts, "blocks.0.mlp.hook_act", "blocks.0.hook_resid_mid", "hook_embed"]
    spec = sae.spec(error).gradient(hooks).set_metric("cotangent", cotangent=seed)
    grad = model.forward(inputs.ids, spec, attention_mask=inputs.mask).grad
    assert grad[sae.acts].shape == (*inputs.ids.shape, features)
    assert {name: off for name in hooks if (off := worst(grad[name], exact[name])) > 5e-6} == {}


def test_the_estimate_says_what_opening_a_graph_with_gradients_takes(shipped):
    """Packed weights are there twice; the nodes are those of the graph that is opened."""
    spec = HookSpec().gradient("blocks.*.attn.hook_z").set_metric("logit", answer=7)
    packed, mapped = (MIModel(shipped.hooked, Options(prepack=prepack)) for prepack in (True, False))
    large, small = (model.estimate(spec, 1, 5) for model in (packed, mapped))
    assert large.graph - small.graph == 2 * packed.variants.weights
    assert large.opening > small.opening > 0
    nodes = len(onnx.load_from_string(mapped.compile_graph(spec).model).graph.node)
    assert small.graph == SESSION + NODE * nodes
    assert small.total == shipped.estimate(HookSpec().capture("blocks.*.attn.hook_z"), 1, 5).total
    assert "opened in" in repr(large)
    assert mapped.estimate(HookSpec().capture("hook_embed"), 1, 5).opening == 0
