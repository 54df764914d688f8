"""Token attributions and metrics at a mask of an encoder, beside autograd in transformers written out."""

import numpy as np
import pytest
import torch

from mionnx import GradientError, HookSpec, Logits

TEXT, PAIR = "the man plays the [MASK] on stage.", ("where does ann live?", "ann lives in rome now")
STEPS = 6


def inputs_of(model, *texts):
    tokens = model.tokenize(*texts)
    ids = np.asarray(tokens.ids)[None]
    types = np.zeros_like(ids) if tokens.type_ids is None else np.asarray(tokens.type_ids)[None]
    return torch.from_numpy(ids), torch.from_numpy(types)


def at_words(reference, function):
    """A hook behind the table of words: the value that embeddings of positions and types are added to."""
    table = reference.bert.embeddings.word_embeddings
    return table.register_forward_hook(lambda _module, _inputs, output: function(output))


def integrated(reference, ids, types, metric):
    """Integrated gradients by words from their mean, midpoint rule, as captum's LayerIntegratedGradients sums them."""
    value = reference.bert.embeddings.word_embeddings(ids).detach()
    start = value.mean(1, keepdim=True).expand_as(value)
    total = torch.zeros_like(value)
    for step in range(STEPS):
        point = (start + (step + 0.5) / STEPS * (value - start)).requires_grad_(True)
        handle = at_words(reference, lambda _, point=point: point)
        number = metric(reference(input_ids=ids, token_type_ids=types).logits)
        handle.remove()
        total += torch.autograd.grad(number, point)[0]
    return ((value - start) * total / STEPS).sum(-1)[0].numpy()


@pytest.mark.parametrize("metric", ["logit_diff", "probability"])
def test_attributions_of_a_pairs_tokens_to_its_label(metric, text_encoder):
    model, reference = text_encoder("classes")
    reads = {"answer": "good"} | ({"versus": "bad"} if metric == "logit_diff" else {})
    pair = model.tokenize(*PAIR)
    found = model.integrated_gradients(pair, metric=metric, steps=STEPS, **reads)
    formula = {
        "logit_diff": lambda logits: logits[0, 2] - logits[0, 0],
        "probability": lambda logits: logits[0].softmax(-1)[2],
    }[metric]
    expected = integrated(reference, *inputs_of(model, *PAIR), formula)
    assert np.abs(found.scores() - expected).max() < 1e-6 + 1e-4 * np.abs(expected).max()
    assert np.count_nonzero(expected) == len(pair)
    finer = model.integrated_gradients(pair, metric=metric, steps=100, **reads)
    assert abs(finer.gap) < 2e-3 * np.abs(expected).sum()


@pytest.mark.slow
def test_attributions_to_the_token_of_a_mask(text_encoder):
    model, reference = text_encoder("masked_lm")
    ids, types = inputs_of(model, TEXT)
    at, token = int((ids[0] == 4).nonzero()[0]), model.tokenizer.token_to_id("music")
    found = model.integrated_gradients(TEXT, metric="log_probability", answer=token, steps=STEPS)
    expected = integrated(reference, ids, types, lambda logits: logits[0, at].log_softmax(-1)[token])
    assert np.abs(found.scores() - expected).max() < 1e-6 + 1e-4 * np.abs(expected).max()


@pytest.mark.slow
def test_the_log_probability_at_a_mask_is_the_masked_loss(text_encoder):
    model, reference = text_encoder("masked_lm")
    ids, types = inputs_of(model, TEXT)
    token = model.tokenizer.token_to_id("music")
    labels = torch.where(ids == 4, token, -100)
    words = {}
    handle = at_words(reference, lambda output: words.setdefault("value", output))
    loss = reference(input_ids=ids, token_type_ids=types, labels=labels).loss
    handle.remove()
    (expected,) = torch.autograd.grad(loss, words["value"])
    found = model.gradients(TEXT, "hook_embed", metric="log_probability", answer=token)
    assert found.metric[0] == pytest.approx(-loss.item(), abs=1e-5)
    assert np.abs(found.grad["hook_embed"] + expected.numpy()).max() < 1e-6


def test_the_loss_of_several_masks_is_that_of_transformers(text_encoder):
    """The mean over a row's masks, of rows of unequal length and numbers of masks, in one batch or in several."""
    model, reference = text_encoder("masked_lm")
    texts = ["the man [MASK] the [MASK] on stage.", "it [MASK]"]
    hidden = [["plays", "music"], ["rains"]]
    expected, losses = [], []
    for text, tokens in zip(texts, hidden, strict=True):
        ids, types = inputs_of(model, text)
        labels = torch.full_like(ids, -100)
        labels[ids == 4] = torch.tensor([model.tokenizer.token_to_id(token) for token in tokens])
        words = {}
        handle = at_words(reference, lambda output, words=words: words.setdefault("value", output))
        loss = reference(input_ids=ids, token_type_ids=types, labels=labels).loss
        handle.remove()
        expected.append(torch.autograd.grad(loss, words["value"])[0][0].numpy())
        losses.append(loss.item())
    for size in (None, 1):
        found = model.gradients(texts, "hook_embed", metric="loss", answer=hidden, batch_size=size)
        assert found.metric == pytest.approx(losses, abs=1e-5)
        for row, gradient in enumerate(expected):
            assert np.abs(found.grad["hook_embed"][row, : len(gradient)] - gradient).max() < 1e-6
    one = model.gradients(texts[1], "hook_embed", metric="loss", answer="rains")
    assert one.metric[0] == pytest.approx(losses[1], abs=1e-5)
    saliency = model.integrated_gradients(texts[1], metric="loss", answer="rains", steps=100)
    assert abs(saliency.gap) < 1e-3


@pytest.mark.parametrize(
    ("head", "text", "answer", "message"),
    [
        ("masked_lm", "it [MASK]", None, "give them as answer="),
        ("masked_lm", "it rains", "rains", "row 0 has no mask"),
        ("masked_lm", "it [MASK] [MASK]", [["rains"]], "row 0 has 2 masks, and answer 1 tokens"),
        ("masked_lm", "it [MASK] [MASK]", ["rains", "now"], "2 tokens for 1 rows"),
        ("classes", "it rains", None, "log_probability"),
    ],
)
def test_a_loss_without_its_tokens_is_refused(head, text, answer, message, text_encoder):
    with pytest.raises(GradientError, match=message):
        text_encoder(head)[0].gradients(text, "hook_embed", metric="loss", answer=answer)


def test_hidden_tokens_are_saved_with_a_spec_and_not_compiled(text_encoder, tmp_path):
    model, _ = text_encoder("masked_lm")
    spec = HookSpec().gradient("hook_embed").set_metric("loss", answer=[["plays", "music"]])
    spec.save(tmp_path / "spec.safetensors")
    again, text = HookSpec.load(tmp_path / "spec.safetensors"), "the man [MASK] the [MASK] on stage."
    one, other = (model.forward(text, each).metric for each in (spec, again))
    assert one == other
    with pytest.raises(GradientError, match="masks of one call"):
        model.compile(spec, tmp_path / "compiled")
    with pytest.raises(GradientError, match="reads one answer of a row"):
        HookSpec().set_metric("logit", answer=[["plays", "music"]])


def test_a_decoder_reads_no_answer_for_its_loss(shipped):
    with pytest.raises(GradientError, match="own next tokens"):
        shipped.gradients("The capital of France is", "hook_embed", metric="loss", answer="Paris")


def test_gradients_by_the_logits_of_tags_stand_at_the_tag_that_is_read(text_encoder):
    """One by one, in one batch, and captured beside: the value has a row for each token, whichever the metric reads."""
    model, _ = text_encoder("token_classes")
    texts, hook, spec = ["the man plays", "it rains now on the stage"], "hook_token_logits", HookSpec()
    reads = {"metric": "logit", "answer": 1, "position": 1, "hooks": spec.capture(hook)}
    together, apart = (model.gradients(texts, hook, batch_size=size, **reads) for size in (None, 1))
    assert together[hook].shape == together.grad[hook].shape
    assert np.array_equal(together.grad[hook], apart.grad[hook])
    assert np.argwhere(model.gradients(texts, hook, **reads | {"hooks": None}).grad[hook]).tolist() == [
        [0, 1, 1],
        [1, 1, 1],
    ]
    part = model.forward(texts, spec, logits=Logits(positions=1))
    assert np.array_equal(part[hook], model.forward(texts, spec)[hook])
