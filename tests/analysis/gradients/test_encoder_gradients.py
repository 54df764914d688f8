"""Token attributions and metrics at a mask of an encoder, beside autograd in transformers written out."""

import numpy as np
import pytest
import torch

from mionnx import GradientError

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


def test_attributions_to_the_token_of_a_mask(text_encoder):
    model, reference = text_encoder("masked_lm")
    ids, types = inputs_of(model, TEXT)
    at, token = int((ids[0] == 4).nonzero()[0]), model.tokenizer.token_to_id("music")
    found = model.integrated_gradients(TEXT, metric="log_probability", answer=token, steps=STEPS)
    expected = integrated(reference, ids, types, lambda logits: logits[0, at].log_softmax(-1)[token])
    assert np.abs(found.scores() - expected).max() < 1e-6 + 1e-4 * np.abs(expected).max()


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
    for head in ("masked_lm", "classes"):
        with pytest.raises(GradientError, match=r"log_probability.* position='mask'"):
            text_encoder(head)[0].gradients("it [MASK]", "hook_embed", metric="loss")
