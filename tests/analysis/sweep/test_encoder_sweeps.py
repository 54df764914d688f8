"""Sweeps of an encoder that norms between additions, beside hooks in transformers, cell by cell and by autograd."""

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

A, B = "the man plays the guitar on stage.", "the woman plays the music on stage."
LABELS = {"answer": "good", "versus": "bad"}
SITES = {"resid_pre": ("layer", "position"), "z": ("layer", "head"), "mlp_out": ("layer",)}


@contextmanager
def hooked(modules, function):
    with ExitStack() as stack:
        for layer, module in enumerate(modules):

            def hook(_, inputs, output, layer=layer):
                first = output[0] if isinstance(output, tuple) else output
                changed = function(layer, first)
                return (changed, *output[1:]) if isinstance(output, tuple) else changed

            stack.callback(module.register_forward_hook(hook).remove)
        yield


def modules_of(reference, site):
    """The modules of transformers' BERT whose outputs are a site's values."""
    layers = reference.bert.encoder.layer
    return {
        "resid_pre": [reference.bert.embeddings, *layers[:-1]],
        "z": [layer.attention.self for layer in layers],
        "mlp_out": [layer.output.dense for layer in layers],
    }[site]


class Torch:
    """The difference of two labels' logits, or the mask's of two tokens, in transformers."""

    def __init__(self, model, reference, at, answer, versus):
        self.model, self.reference, self.at, self.pair = model, reference, at, (answer, versus)
        self.heads = reference.config.num_attention_heads

    def metric(self, text):
        tokens = self.model.tokenize(text)
        logits = self.reference(input_ids=torch.from_numpy(np.asarray(tokens.ids)[None])).logits[0]
        logits = logits if self.at is None else logits[self.at]
        return logits[self.pair[0]] - logits[self.pair[1]]

    def values(self, text, site):
        """The values of all layers, and the metric's gradient by them."""
        values = {}

        def keep(layer, value):
            values[layer] = value
            value.requires_grad_(True)
            value.retain_grad()
            return value

        with hooked(modules_of(self.reference, site), keep):
            metric = self.metric(text)
            gradients = torch.autograd.grad(metric, [values[layer] for layer in sorted(values)])
        return [values[layer].detach() for layer in sorted(values)], gradients

    def cells(self, shape, site):
        """Each cell's index, layer, and where it is along [batch, seq, hidden]."""
        for cell in np.ndindex(*shape):
            where = torch.ones(1, 1, 1, dtype=torch.bool)
            if site == "resid_pre":
                where = (torch.arange(shape[1]) == cell[1])[None, :, None]
            elif site == "z":
                width = self.reference.config.hidden_size // self.heads
                where = (torch.arange(self.heads).repeat_interleave(width) == cell[1])[None, None]
            yield cell, cell[0], where

    def patched(self, text, site, layer, where, value):
        with (
            torch.no_grad(),
            hooked(
                modules_of(self.reference, site),
                lambda number, own: torch.where(where, value, own) if number == layer else own,
            ),
        ):
            return float(self.metric(text))


@pytest.fixture(params=["classes", "masked_lm"])
def setting(request, text_encoder):
    """A model, the same in torch, two texts, and what is read."""
    model, reference = text_encoder(request.param)
    if request.param == "classes":
        return model, Torch(model, reference, None, 2, 0), A, B, LABELS
    texts = [text.replace("stage", "[MASK]") for text in (A, B)]
    at = int(np.flatnonzero(np.asarray(model.tokenize(texts[0]).ids) == 4)[0])
    tokens = [model.tokenizer.token_to_id(word) for word in ("paris", "music")]
    return model, Torch(model, reference, at, *tokens), *texts, {"answer": tokens[0], "versus": tokens[1]}


@pytest.mark.parametrize("site", SITES)
def test_patches_ablations_and_their_estimates_are_those_of_torch(setting, site):
    model, oracle, clean, corrupted, reads = setting
    swept = model.patch_sweep(clean, corrupted, site, over=SITES[site], **reads)
    ablated = model.ablation_sweep(clean, site, over=SITES[site], metric="logit_diff", **reads)
    estimated = model.attribute_patch(clean, corrupted, site, over=SITES[site], **reads)
    own, _ = oracle.values(clean, site)
    others, gradients = oracle.values(corrupted, site)
    before = float(oracle.metric(corrupted).detach())
    for cell, layer, where in oracle.cells(swept.values.shape, site):
        exact = oracle.patched(corrupted, site, layer, where, own[layer])
        assert swept.values[cell] == pytest.approx(exact, abs=2e-5)
        zero = oracle.patched(clean, site, layer, where, torch.zeros(()))
        assert ablated.values[cell] == pytest.approx(zero, abs=2e-5)
        first_order = float((gradients[layer] * (own[layer] - others[layer]) * where).sum())
        assert estimated.values[cell] - before == pytest.approx(first_order, abs=2e-5)
    assert np.abs(swept.values - before).max() > 2e-4
    assert np.abs(ablated.values - float(oracle.metric(clean).detach())).max() > 2e-4
