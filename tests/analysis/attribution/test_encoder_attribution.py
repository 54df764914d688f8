"""Direct attribution of a masked language model: the token at the mask, or at a position that is named."""

import json
from copy import deepcopy
from math import sqrt
from types import MethodType

import numpy as np
import pytest
import torch
from encoder_texts import make_tokenizer
from encoders import make_encoder

from exporters.transformers import export
from mionnx import HookSpec, InputError, Intervention, MIModel, ModelError

TEXTS = ["the man plays the [MASK] on stage.", "a [MASK] plays"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An encoder whose stream is a sum, with a tokenizer that has a mask token."""
    folder = tmp_path_factory.mktemp("eurobert")
    make_encoder("eurobert", folder / "checkpoint")
    make_tokenizer(folder / "checkpoint")
    (folder / "checkpoint" / "tokenizer_config.json").write_text(json.dumps({"mask_token": "[MASK]"}))
    export(folder / "checkpoint", folder / "hooked")
    return MIModel.from_pretrained(folder / "hooked", threads=1)


@pytest.mark.slow
def test_the_mask_is_what_is_read_where_nothing_is_said(model):
    each = model.attribute(TEXTS)
    for text, one in zip(TEXTS, each, strict=True):
        ids = model.tokenize(text).ids
        at = [*ids].index(model.hooked.mask_token)
        assert one.position == at
        logits = model.forward(text).output()[0, at]
        assert one.total == pytest.approx(float(logits.max()), abs=5e-5)
        named = model.attribute(text, position=at)
        assert (named.answer, named.labels) == (one.answer, one.labels)
        assert np.abs(named.values - one.values).max() < 5e-5
        assert np.ptp(model.forward(text).output()[0].max(-1)) > 1e-3  # other positions have other logits


@pytest.mark.parametrize("verb", ["attribute", "track_token", "track_race"])
def test_a_text_without_one_mask_asks_for_the_position(verb, model):
    options = {"token": "music"} if verb == "track_token" else {}
    for text in ("the man plays", "the [MASK] plays [MASK]"):
        with pytest.raises(InputError, match="mask tokens"):
            getattr(model, verb)(text, **options)
        getattr(model, verb)(text, position=2, **options)


def test_a_token_is_followed_at_the_mask(model):
    at = [*model.tokenize(TEXTS[0]).ids].index(model.hooked.mask_token)
    found, named = model.track_token(TEXTS[0], "music"), model.track_token(TEXTS[0], "music", position=at)
    assert np.array_equal(found, named)
    assert model.track_race(TEXTS[0]) == model.track_race(TEXTS[0], position=at)
    logits = model.forward(TEXTS[0]).output()[0, at].astype(np.float64)
    expected = np.exp(logits - logits.max())[model.token_id("music")] / np.exp(logits - logits.max()).sum()
    assert found[-1] == pytest.approx(expected, rel=1e-4)


class FrozenBert:
    """BERT in torch with its norms' scales and its activation's factors for constants, and each addition a leaf."""

    def __init__(self, reference):
        self.model, self.leaves = deepcopy(reference).double(), {}
        for norm in self.model.modules():
            if isinstance(norm, torch.nn.LayerNorm):
                norm.forward = MethodType(frozen_norm, norm)
        curve = self.model.cls.predictions.transform.transform_act_fn
        curve.forward = lambda x: x * ((1 + torch.erf(x / sqrt(2))) / 2).detach()
        self.leaf("embed", self.model.bert.embeddings.LayerNorm)
        for i, layer in enumerate(self.model.bert.encoder.layer):
            self.leaf(f"z{i}", layer.attention.self)
            self.leaf(f"{i}_mlp_out", layer.output.dense)

    def leaf(self, name, module):
        """Let nothing but the stream lead back from the output of a module."""

        def cut(_module, _inputs, output):
            value = (output[0] if isinstance(output, tuple) else output).detach().requires_grad_()
            self.leaves[name] = value
            return (value, *output[1:]) if isinstance(output, tuple) else value

        module.register_forward_hook(cut)

    def contributions(self, ids, at, answer, versus):
        logits = self.model(input_ids=torch.tensor([ids])).logits[0, at]
        logit = logits[answer] - logits[versus]
        logit.backward()
        found = {}
        for name, value in self.leaves.items():
            each = (value * value.grad).sum(1)[0]
            if not name.startswith("z"):
                found[name] = each.sum()
                continue
            layer = self.model.bert.encoder.layer[int(name[1:])]
            found |= {f"L{name[1:]}H{head}": share.sum() for head, share in enumerate(each.reshape(4, -1))}
            bias = layer.attention.output.dense.bias
            found[f"{name[1:]}_attn_bias"] = bias @ bias.grad
        layers = self.model.bert.encoder.layer
        biases = [norm.bias for layer in layers for norm in (layer.attention.output.LayerNorm, layer.output.LayerNorm)]
        return {name: value.item() for name, value in found.items()} | {
            "norm_bias": sum(bias @ bias.grad for bias in biases).item(),
            "logit": logit.item(),
        }


def frozen_norm(norm, x):
    scale = (x.var(-1, keepdim=True, unbiased=False) + norm.eps).sqrt().detach()
    return (x - x.mean(-1, keepdim=True)) / scale * norm.weight + (0 if norm.bias is None else norm.bias)


def test_parts_pass_the_norms_between_additions_as_torch_passes_them(text_encoder):
    bert, reference = text_encoder("masked_lm")
    at, (answer, versus) = [*bert.tokenize(TEXTS[0]).ids].index(4), (11, 17)
    found = bert.attribute(TEXTS[0], answer, versus)
    expected = FrozenBert(reference).contributions(bert.tokenize(TEXTS[0]).ids.tolist(), at, answer, versus)
    assert found.position == at
    assert found.logit == pytest.approx(expected.pop("logit"), abs=1e-5)
    assert {*found.labels} - {*expected} == {"head_bias"}
    largest = max(map(abs, expected.values()))
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=2e-5 * largest)
    assert min(abs(found.heads).ravel()) > 1e-4
    assert found.total == pytest.approx(found.logit, abs=1e-6)
    alone = bert.attribute(TEXTS[0], answer)
    assert alone.total == pytest.approx(float(bert.forward(TEXTS[0]).output()[0, at, answer]), abs=1e-4)
    stream = HookSpec().intervene("blocks.0.hook_resid_mid", Intervention.Scale(1.5))
    with pytest.raises(ModelError, match="an intervention changes the stream itself"):
        bert.attribute(TEXTS[0], answer, hooks=stream)
    zeroed = bert.attribute(
        TEXTS[0], answer, hooks=HookSpec().intervene("blocks.1.attn.hook_z", Intervention.Zero(heads=2))
    )
    assert zeroed["L1H2"] == 0


@pytest.mark.slow
def test_parts_of_a_stream_that_is_a_sum_pass_the_transform_of_the_head_as_torch_passes_them(tmp_path):
    """ModernBERT: the final norm and the head's with their scales for constants, its activation with its factor."""
    reference = make_encoder("modernbert", tmp_path / "checkpoint").double()
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model, ids = MIModel.from_pretrained(tmp_path / "hooked", threads=1), [7, 11, 5, 9, 23]
    at, answer, versus = 2, 11, 17
    for norm in (reference.model.final_norm, reference.head.norm):
        norm.forward = MethodType(frozen_norm, norm)
    reference.head.act.forward = lambda x: x * ((1 + torch.erf(x / sqrt(2))) / 2).detach()
    streams = []
    reference.model.final_norm.register_forward_pre_hook(
        lambda _, inputs: streams.append(inputs[0]) or inputs[0].retain_grad()
    )
    logits = reference(input_ids=torch.tensor([ids])).logits[0, at]
    (logits[answer] - logits[versus]).backward()
    direction = streams[0].grad[0, at].numpy()
    found = model.attribute(ids, answer, versus, position=at)
    cache = model.forward([ids], HookSpec().capture("*"))
    parts = {"embed": cache["blocks.0.hook_resid_pre"][0, at]}
    for i in range(model.num_layers):
        parts |= {f"L{i}H{head}": one for head, one in enumerate(cache["result", i][0, at])}
        parts[f"{i}_mlp_out"] = cache["mlp_out", i][0, at]
    expected = {name: float(part @ direction) for name, part in parts.items()}
    assert {name: found[name] for name in parts} == pytest.approx(expected, abs=1e-5)
    assert found.total == pytest.approx(float(logits[answer] - logits[versus]), abs=1e-5)
    assert max(map(abs, expected.values())) > 1e-2


def test_rules_that_freeze_norms_freeze_those_between_additions(text_encoder):
    """Gradients by every stream of the logit at the mask, beside autograd with the scales for constants."""
    bert, reference = text_encoder("masked_lm")
    ids = bert.tokenize(TEXTS[0]).ids
    frozen, streams = deepcopy(reference).double(), {}
    for norm in frozen.modules():
        if isinstance(norm, torch.nn.LayerNorm):
            norm.forward = MethodType(frozen_norm, norm)
    for i, layer in enumerate(frozen.bert.encoder.layer):
        layer.register_forward_pre_hook(lambda _, inputs, i=i: streams.setdefault(i, inputs[0]).retain_grad())
    frozen(input_ids=torch.from_numpy(ids)[None]).logits[0, [*ids].index(4), 11].backward()
    for i, stream in streams.items():
        name = f"blocks.{i}.hook_resid_pre"
        found, plain = (
            bert.gradients(TEXTS[0], name, answer=11, rules=rules).grad[name] for rules in ("frozen_norm", "gradient")
        )
        assert np.abs(found - stream.grad.numpy()).max() < 1e-5 * max(1, np.abs(found).max())
        assert np.abs(found - plain).max() > 1e-3 * np.abs(found).max()
