"""Text encoders beside transformers in eager mode: every hook point, an edit at each, every head, any padding."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_texts import make_tokenizer
from encoders import (
    PADDINGS,
    REPRESENTATIVE,
    encoder_batch,
    encoder_config,
    graph_values,
    heads_of_family,
    make_encoder,
    plain_outputs,
    real_difference,
    run_encoder,
    usual_head,
)
from transformers import ElectraForPreTraining
from transformers.cache_utils import EncoderDecoderCache

from exporters.transformers import export
from exporters.transformers.config import native_config
from exporters.transformers.encoder_families import ENCODERS
from exporters.transformers.families import layout_in
from exporters.transformers.heads import TaskHead
from mionnx import ExportError, GradientError, HookError, HookSpec, InputError, Intervention, MIModel

TOLERANCE = 5e-5
HEADS = ("classes", "token_classes", "span", "none")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Family and head -> its hooked model, the same in torch for taps, and once more without any."""
    models = {}

    def find(family: str, head: str | None = None):
        head = head or usual_head(family)
        if (family, head) not in models:
            folder: Path = tmp_path_factory.mktemp(f"{family}-{head}")
            reference = make_encoder(family, folder / "checkpoint", head)
            plain = type(reference).from_pretrained(folder / "checkpoint", attn_implementation="eager").eval()
            export(folder / "checkpoint", folder / "hooked")
            models[family, head] = MIModel.from_pretrained(folder / "hooked", threads=1), reference, plain
        return models[family, head]

    return find


def marked(families, fast=REPRESENTATIVE):
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in families]


each = pytest.mark.parametrize("family", marked(sorted(ENCODERS)))


@each
@pytest.mark.slow_beyond(1)
def test_every_hook_point_equals_eager(family, made):
    model, reference, _ = made(family)
    for padding in PADDINGS:
        inputs = encoder_batch(padding)
        expected, found = run_encoder(reference, inputs).values, graph_values(model, inputs)
        assert {*expected} == {*model.hooked.metadata.hooks}
        off = {name: real_difference(name, found[name], expected[name], inputs["attention_mask"]) for name in expected}
        assert {name: value for name, value in off.items() if not value < TOLERANCE} == {}


@each
@pytest.mark.slow
def test_what_each_head_adds_is_what_attention_adds_without_its_bias(family, made):
    """Also where layers share their weights, and the file has them under the name of one."""
    model = made(family)[0]
    if family == "mobilebert":  # inside of whose bottlenecks attention adds to no stream of the model's width
        assert "blocks.0.hook_attn_out" not in model.hooked.metadata.hooks
        with pytest.raises(HookError, match="no hook point"):
            model.forward([1, 2], HookSpec().capture("blocks.0.attn.hook_result"))
        with pytest.raises(HookError, match=r"what attention adds to the stream, .* has no blocks.0.hook_attn_out"):
            model.path_patch([1, 2], [1, 3], answer=7, metric="logit", position=0)
        return
    found = model.forward(encoder_batch("none")["input_ids"], HookSpec().capture(["*.hook_result", "*.hook_attn_out"]))
    for layer in range(model.num_layers):
        whole, heads = found["attn_out", layer], found["result", layer].sum(2)
        if family not in ("esmc", "ibert"):  # which scale or round what attention adds
            assert np.ptp(whole - heads, axis=(0, 1)).max() < 1e-5 * max(1, np.abs(whole).max())


@each
def test_logits_streams_and_patterns_are_those_of_untouched_transformers(family, made):
    model, reference, plain = made(family)
    offset = layout_in(reference).offset or 0
    for padding in PADDINGS:
        inputs = encoder_batch(padding)
        mask, values = inputs["attention_mask"], graph_values(model, inputs)
        # its own positions are columns, or those of the text: the same where texts begin in the first column
        for positions in (offset, None) if padding != "left" else (offset,):
            expected = plain_outputs(plain, inputs, positions)
            main = expected[0].numpy()
            assert np.abs(values[model.hooked.metadata.output] - main)[mask.astype(bool)].max() < TOLERANCE
            for layer, state in enumerate(expected.hidden_states[: model.num_layers]):
                name = f"blocks.{layer}.hook_resid_pre"
                assert real_difference(name, values[name], state.numpy(), mask) < TOLERANCE, name
            for layer, pattern in enumerate(expected.attentions):
                name = f"blocks.{layer}.attn.hook_pattern"
                assert real_difference(name, values[name], pattern.numpy(), mask) < TOLERANCE, name


@each
def test_an_edit_at_every_hook_point_equals_the_same_in_torch(family, made):
    model, reference, _ = made(family)
    inputs = encoder_batch("left")
    inputs["token_type_ids"] = np.zeros_like(inputs["token_type_ids"])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    values = graph_values(model, inputs)
    names = [name for name in model.hooked.metadata.hooks if values[name].dtype.kind == "f"]  # no experts' numbers
    for name in names[::6] if family in REPRESENTATIVE else names:
        expected = run_encoder(reference, inputs, (name, 0.5)).logits[mask.astype(bool)]
        spec = HookSpec().intervene(name, Intervention.Scale(0.5))
        found = model.forward(ids, spec, attention_mask=mask).output()[mask.astype(bool)]
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max()), name


HEADED = [
    *((family, head) for family in ("bert", "modernbert", "roberta") for head in HEADS),
    *(("deberta", "classes"), ("luke", "token_classes"), ("splinter", "span")),
    *(("xlm", "classes"), ("flaubert", "span"), ("squeezebert", "token_classes"), ("convbert", "classes")),
    *(("mobilebert", "classes"), ("mobilebert", "none")),
]


@pytest.mark.parametrize(
    ("family", "head"),
    [pytest.param(*one, marks=() if one == ("bert", "classes") else pytest.mark.slow) for one in HEADED],
)
def test_every_head_is_that_of_transformers(family, head, made):
    model, reference, plain = made(family, head)
    assert model.hooked.metadata.head == head
    assert head in {*heads_of_family(family)}
    for padding in PADDINGS:
        inputs = encoder_batch(padding)
        mask, values = inputs["attention_mask"].astype(bool), graph_values(model, inputs)
        tapped = run_encoder(reference, inputs).values
        assert {*tapped} == {*model.hooked.metadata.hooks}
        expected = plain_outputs(plain, inputs, layout_in(reference).offset or 0)
        main = expected[0].numpy() if head != "span" else np.stack([expected[0].numpy(), expected[1].numpy()], -1)
        found = values[model.hooked.metadata.output]
        if head == "classes" and padding == "left":  # transformers reads column 0 there, which is padding
            main = graph_values(model, right(inputs))[model.hooked.metadata.output]
        real = slice(None) if head == "classes" else mask
        assert np.abs(found[real] - main[real]).max() < TOLERANCE


@pytest.mark.slow
def test_norms_before_each_half_of_flaubert(tmp_path, monkeypatch):
    """transformers asks its new cache for a layer, which it cannot give, and nothing reads."""
    monkeypatch.setattr(EncoderDecoderCache, "__getitem__", lambda cache, _: cache, raising=False)
    reference = make_encoder("flaubert", tmp_path / "checkpoint", pre_norm=True)
    plain = type(reference).from_pretrained(tmp_path / "checkpoint", attn_implementation="eager").eval()
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    assert not {f"blocks.0.hook_resid_{name}_sum" for name in ("mid", "post")} & {*model.hooked.metadata.hooks}
    for padding in PADDINGS:
        inputs = encoder_batch(padding)
        mask, values = inputs["attention_mask"].astype(bool), graph_values(model, inputs)
        expected = plain_outputs(plain, inputs, 0, attentions=False)
        assert np.abs(values["hook_logits"] - expected.logits.numpy())[mask].max() < TOLERANCE
        for layer, state in enumerate(expected.hidden_states[:-1]):
            assert np.abs(values[f"blocks.{layer}.hook_resid_pre"] - state.numpy())[mask].max() < TOLERANCE
        for name, tapped in run_encoder(reference, inputs).values.items():
            assert real_difference(name, values[name], tapped, inputs["attention_mask"]) < TOLERANCE, name


@pytest.mark.slow
def test_tokens_that_were_replaced_are_told_as_electra_does(tmp_path):
    torch.manual_seed(0)
    reference = ElectraForPreTraining(encoder_config("electra")).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(tmp_path / "checkpoint")
    make_tokenizer(tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "hooked")
    model = MIModel.from_pretrained(tmp_path / "hooked", threads=1)
    metadata = model.hooked.metadata
    assert (metadata.head, metadata.labels, metadata.activation) == ("token_classes", ["replaced"], "sigmoid")
    assert metadata.hooks["hook_token_logits"] == ["batch", "seq", 1]
    for padding in PADDINGS:
        inputs = encoder_batch(padding)
        mask, values = inputs["attention_mask"].astype(bool), graph_values(model, inputs)
        expected = plain_outputs(reference, inputs, 0).logits.numpy()
        assert np.abs(values["hook_token_logits"][..., 0] - expected)[mask].max() < TOLERANCE
    text = "the man plays a guitar on the stage ."
    with torch.no_grad():
        shares = reference(torch.tensor([model.tokenizer.encode(text).ids])).logits[0, 1:-1].sigmoid().numpy()
    spans = model.tag(text)
    words = [text.split()[number] for number in np.flatnonzero(shares >= 0.5)]
    assert " ".join(spans.parts).split() == words
    assert 0 < len(words) < len(shares)
    ids = inputs["input_ids"][0]
    for metric, error in (("probability", GradientError), ("kl", GradientError)):
        reads = {"answer": "replaced"} if metric == "probability" else {"reference": np.zeros(1, np.float32)}
        with pytest.raises(error, match="choices that exclude one another"):
            model.gradients(ids, "hook_embed", metric=metric, position=3, **reads)
    with pytest.raises(InputError, match="choices that exclude one another"):
        model.patch_sweep(ids, ids[::-1].copy(), answer="replaced", metric="probability", position=3)
    spec = HookSpec().intervene("blocks.0.hook_mlp_out", Intervention.Scale(0.5))
    with pytest.raises(InputError, match="do not exclude one another"):
        model.compile(spec, tmp_path / "out", layout="optimum")


def right(inputs):
    """The same texts padded on the right."""
    order = np.argsort(1 - inputs["attention_mask"], 1, kind="stable")
    return {name: np.take_along_axis(array, order, 1) for name, array in inputs.items()}


def test_what_a_normed_block_adds_up_to(made):
    model, _, _ = made("bert")
    values = graph_values(model, encoder_batch("none"))
    for layer in range(model.num_layers):
        at = {name: values[f"blocks.{layer}.hook_{name}"] for name in ("resid_pre", "attn_out", "resid_mid", "mlp_out")}
        assert np.allclose(values[f"blocks.{layer}.hook_resid_mid_sum"], at["resid_pre"] + at["attn_out"], atol=1e-6)
        assert np.allclose(values[f"blocks.{layer}.hook_resid_post_sum"], at["resid_mid"] + at["mlp_out"], atol=1e-6)
    last = values["blocks.0.hook_resid_post"]
    assert np.array_equal(last, values["blocks.1.hook_resid_pre"])


def test_the_metadata_say_what_the_model_is_for(made):
    metadata = made("bert")[0].hooked.metadata
    assert (metadata.direction, metadata.head, metadata.labels, metadata.activation) == ("both", "masked_lm", [], "")
    metadata = made("bert", "classes")[0].hooked.metadata
    assert (metadata.head, metadata.activation) == ("classes", "softmax")
    assert metadata.labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert TaskHead("span").labels(made("bert")[1].config) == ["start", "end"]


def test_a_class_of_transformers_needs_no_code_of_the_checkpoint(tmp_path):
    table = encoder_config("nomic_bert").to_dict() | {"auto_map": {"AutoModel": "modeling.NomicBertModel"}}
    for name, refused in (("NomicBertModel", False), ("NomicBertForMaskedLM", False), ("OtherModel", True)):
        (tmp_path / "config.json").write_text(json.dumps({**table, "architectures": [name]}))
        if refused:
            with pytest.raises(ExportError, match="brings code of its own for the architecture 'OtherModel'"):
                native_config(tmp_path)
        else:
            assert native_config(tmp_path).model_type == "nomic_bert"


@pytest.mark.slow
def test_embeddings_narrower_than_the_stream_are_known(made):
    for family in ("albert", "electra"):
        metadata = made(family)[0].hooked.metadata
        assert (metadata.sizes.hidden_size, metadata.sizes.embedding_size) == (32, 16)
        assert metadata.hooks["hook_embed"][-1] == 16
        assert metadata.hooks["blocks.0.hook_resid_pre"][-1] == 32


def test_layers_of_a_window_on_both_sides_are_said(made):
    model = made("modernbert")[0]
    assert [layer.sliding_window for layer in model.hooked.metadata.attention] == [None, 5, None]
    pattern = graph_values(model, encoder_batch("none"))["blocks.1.attn.hook_pattern"]
    away = np.abs(np.subtract.outer(np.arange(pattern.shape[2]), np.arange(pattern.shape[3])))
    assert not pattern[:, :, away >= 5].any()
    assert pattern[:, :, away < 5].all()
