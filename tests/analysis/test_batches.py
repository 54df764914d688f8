"""Verbs over lists of prompts: in batches, each prompt gets what it gets alone, in the order given."""

import numpy as np
import pytest

from mionnx import HookCache, HookSpec, InputError, Intervention, Logits, MIError

TOLERANCE = 5e-5
TEXTS = [
    "The capital of France is",
    "Paris",
    "The capital of Germany is Berlin . The capital of Japan is",
    "Paris is the capital of",
    "The capital of Kenya is",
]
STEER = HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Scale(1.5))
SIZES = pytest.mark.parametrize("size", [2, "auto"])
MODELS = pytest.mark.parametrize("name", ["shipped", "recurrent"])


def near(one, other) -> bool:
    return one.shape == other.shape and bool(np.allclose(one, other, atol=TOLERANCE, rtol=TOLERANCE))


@SIZES
@MODELS
def test_lenses(request, name, size):
    model = request.getfixturevalue(name)
    for asked in ({}, {"positions": -1, "token_ids": ["Paris"]}):
        lenses = model.logit_lens(TEXTS, STEER, k=3, layers=[1, 3], batch_size=size, **asked)
        for text, lens in zip(TEXTS, lenses, strict=True):
            alone = model.logit_lens(text, STEER, k=3, layers=[1, 3], **asked)
            assert lens.tokens == alone.tokens
            assert np.array_equal(lens.answers, alone.answers)
            assert near(lens.top_probs, alone.top_probs)
            assert near(lens.readout.log_probs, alone.readout.log_probs)
            assert near(lens.probability_of("Berlin"), alone.probability_of("Berlin"))
    assert len(model.logit_lens(TEXTS[:1])) == 1
    with pytest.raises(InputError, match="batch_size"):
        model.logit_lens(np.zeros(model.hidden_size, np.float32), batch_size=2)


@SIZES
def test_attributions(shipped, size):
    answers = ["Paris", ".", "Tokyo", "France", "Nairobi"]
    made = shipped.attribute(TEXTS, answers, "Berlin", batch_size=size)
    for text, answer, one in zip(TEXTS, answers, made, strict=True):
        alone = shipped.attribute(text, answer, "Berlin")
        assert (one.answer, one.versus, one.tokens) == (alone.answer, alone.versus, alone.tokens)
        assert (one.position, one.labels) == (alone.position, alone.labels)
        assert near(one.values, alone.values)
    assert shipped.attribute(TEXTS[0], batch_size=size).answer == shipped.attribute(TEXTS[0]).answer
    with pytest.raises(InputError, match="answer= has 2 tokens for 5 prompts"):
        shipped.attribute(TEXTS, ["Paris", "."], batch_size=size)


@SIZES
@MODELS
def test_attention_patterns(request, name, size):
    model = request.getfixturevalue(name)
    made = model.attention(TEXTS, layers=[0, 2], hooks=STEER, batch_size=size)
    for text, one in zip(TEXTS, made, strict=True):
        alone = model.attention(text, layers=[0, 2], hooks=STEER)
        assert (one.tokens, one.layers) == (alone.tokens, alone.layers)
        assert near(one.patterns, alone.patterns)


def test_steering(shipped):
    others = ["Berlin is the capital of", "The capital of France", "Paris", "The", "Kenya is"]
    one, other = (shipped.contrast(TEXTS, others, batch_size=size) for size in (1, "auto"))
    assert near(one.vectors, other.vectors)
    norms = [shipped.calibrate(one, TEXTS, batch_size=size).stream_norms for size in (1, 3, "auto")]
    assert near(norms[0], norms[1])
    assert near(norms[0], norms[2])
    doses = [shipped.dose_response(TEXTS, one[2], [0, 1, 3], target="Berlin", batch_size=size) for size in (1, 4)]
    assert near(doses[0].probabilities, doses[1].probabilities)
    at = [[-1], [0], [2, 3], [1], [-2]]
    doses = [shipped.dose_response(TEXTS, one[2], [0, 2], positions=at, batch_size=size) for size in (1, 4)]
    assert near(doses[0].probabilities, doses[1].probabilities)


@SIZES
def test_gradients(shipped, size):
    point = "blocks.1.hook_resid_post"
    texts = [text for text in TEXTS if len(text.split()) > 1]
    for asked in ({}, {"metric": "logit_diff", "answer": ["Paris", "Tokyo", ".", "Nairobi"], "versus": "Berlin"}):
        made = shipped.gradients(texts, point, batch_size=size, hooks=STEER, **asked)
        assert isinstance(made, HookCache)
        for row, text in enumerate(texts):
            own = {key: value[row] if isinstance(value, list) else value for key, value in asked.items()}
            alone = shipped.gradients(text, point, hooks=STEER, **own)
            length = alone.grad[point].shape[1]
            assert near(made.metric[[row]], alone.metric)
            assert near(made.grad[point][[row], -length:], alone.grad[point])
    losses = shipped.gradients(texts, point, "loss", batch_size=size)
    assert near(losses.metric, np.concatenate([shipped.gradients(text, point, "loss").metric for text in texts]))
    seeded = shipped.gradients(texts, point, cotangent=np.tanh, batch_size=size)
    alone = shipped.gradients(texts[1], point, cotangent=np.tanh).grad[point]
    assert near(seeded.grad[point][[1], -alone.shape[1] :], alone)
    one, other = (shipped.gradient_times_input(texts, answer="Paris", batch_size=each) for each in (None, size))
    assert all(near(a.scores, b.scores) for a, b in zip(one.texts, other.texts, strict=True))


@SIZES
@MODELS
def test_functions(request, name, size):
    model = request.getfixturevalue(name)

    def mute(value, hook):
        hook.ctx["rows"] = hook.ctx.get("rows", 0) + len(value)
        value[..., :5] = 0
        value[..., 5] += np.array(hook.rows, np.float32)[:, None]
        seen.append(hook.ctx["rows"])

    def clear(value, hook):
        value[..., :5] = 0

    seen: list[int] = []
    hooks = [("blocks.1.hook_resid_post", mute)]
    logits = model.run_with_hooks(TEXTS, hooks, batch_size=size)
    assert seen[-1] == len(TEXTS)
    again, caches = model.run_with_cache(TEXTS, "blocks.2.hook_mlp_out", fwd_hooks=hooks, batch_size=size)
    whole = model.run_with_hooks(TEXTS, hooks)
    for row, text in enumerate(TEXTS):
        own = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Add(float(row) * np.eye(128)[5]))
        alone, cache = model.run_with_cache(
            text, "blocks.2.hook_mlp_out", hooks=own, fwd_hooks=[("blocks.1.hook_resid_post", clear)]
        )
        assert near(whole[[row], -alone.shape[1] :], alone)
        assert near(logits[[row], -alone.shape[1] :], alone)
        assert near(again[[row], -alone.shape[1] :], alone)
        assert near(caches["mlp_out", 2][[row], -alone.shape[1] :], cache["mlp_out", 2])
    with pytest.raises(MIError, match="shape"):
        model.run_with_hooks(TEXTS, [("hook_embed", lambda value, hook: value[:, :1, :3])], batch_size=size)


@SIZES
def test_losses(shipped, size):
    for hooks in ([], [("blocks.1.hook_resid_post", lambda value, hook: value * 0.5)]):
        whole, made = (shipped.run_with_hooks(TEXTS, hooks, "loss", batch_size=each) for each in (None, size))
        assert np.isclose(whole, made, atol=TOLERANCE)
        whole, made = (shipped.run_with_hooks(TEXTS, hooks, "loss per token", batch_size=each) for each in (None, size))
        assert np.allclose(whole, made, atol=TOLERANCE, equal_nan=True)
    assert np.isclose(shipped(TEXTS, "loss", batch_size=size), shipped(TEXTS, "loss"), atol=TOLERANCE)
    logits, loss = shipped(TEXTS, "both", batch_size=size)
    assert near(logits[[0], -5:], shipped(TEXTS[0]))
    assert np.isclose(loss, shipped(TEXTS, "loss"), atol=TOLERANCE)
    with pytest.raises(InputError, match="two tokens"):
        shipped(["Paris", "The"], "loss", batch_size=size)


@pytest.mark.parametrize("size", [1, 2, "auto"])
def test_an_effect_that_only_some_rows_can_show(shipped, size):
    """Behind the last layer a change at the fourth token is read in the texts that end there, however rows are run."""
    texts = [*(text for text in TEXTS if len(text.split()) > 3), "The capital of France"]
    late = Intervention.Add(np.linspace(-1, 1, 128, dtype=np.float32), positions=[3])
    spec = HookSpec().intervene("blocks.3.hook_resid_post", late)
    last = Logits(positions=-1)
    one, other = (shipped.forward(texts, spec, logits=last, batch_size=each).output() for each in (None, size))
    assert near(one, other)
    one, other = (shipped.logit_lens(texts, spec, positions=-1, batch_size=each) for each in (None, size))
    assert all(near(a.readout.log_probs, b.readout.log_probs) for a, b in zip(one, other, strict=True))
    one, other = (shipped.generate(texts, spec, max_new_tokens=2, batch_size=each) for each in (None, size))
    assert one.texts == other.texts
    asked = {"points": "blocks.1.hook_resid_post", "answer": "Paris", "hooks": spec}
    one, other = (shipped.gradients(texts, **asked, batch_size=each).metric for each in (None, size))
    assert near(one, other)
    nowhere = [text for text in texts if len(text.split()) > 4]
    with pytest.raises(MIError, match="changes nothing"):
        shipped.forward(nowhere, spec, logits=last, batch_size=size)
