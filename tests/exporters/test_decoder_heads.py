"""Decoders with classes, tags and spans beside transformers: every hook point, padding on either side, edits, verbs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from encoder_texts import make_tokenizer
from encoders import PADDINGS, encoder_batch, graph_values, plain_outputs, real_difference, run_encoder
from families import single_threaded
from tiny_configs import tiny_config
from transformers import AutoConfig, PreTrainedModel

from exporters.transformers import export
from exporters.transformers.heads import TaskHead
from mionnx import HookSpec, InputError, Intervention, MIModel

TOLERANCE = 5e-5
PADDING_TOKEN = 0
FAMILIES = ("falcon", "gemma3_text", "gpt2", "llama", "mistral", "modernbert-decoder", "openai-gpt", "opt", "qwen3")
MODULES = ("gpt2", "llama")  # two ways to name them
HEADS = [
    *((family, "classes") for family in FAMILIES),
    *((family, head) for family in MODULES for head in ("token_classes", "span")),
]
FAST = ("llama", "classes")


@dataclass
class Case:
    """A hooked model, the same in torch for taps, and once more without any."""

    model: MIModel
    reference: PreTrainedModel
    plain: PreTrainedModel


def make_headed(family: str, head: str, folder: Path, **changes) -> PreTrainedModel:
    """Save a small random decoder with a head."""
    single_threaded()
    torch.manual_seed(0)
    sizes = {**tiny_config(family), "num_labels": 2 if head == "span" else 3, "pad_token_id": PADDING_TOKEN}
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    model = TaskHead(head).model_class(config)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Family and head -> its models, made once."""
    known = {}

    def find(family: str, head: str = "classes", **changes) -> Case:
        key = family, head, *changes.items()
        if key not in known:
            folder = tmp_path_factory.mktemp(f"{family}-{head}")
            reference = make_headed(family, head, folder / "checkpoint", **changes)
            plain = type(reference).from_pretrained(folder / "checkpoint", attn_implementation="eager").eval()
            export(folder / "checkpoint", folder / "hooked")
            known[key] = Case(MIModel.from_pretrained(folder / "hooked", threads=1), reference, plain)
        return known[key]

    return find


def main_output(plain: PreTrainedModel, inputs: dict[str, np.ndarray], head: str) -> np.ndarray:
    """transformers' own output."""
    output = plain_outputs(plain, inputs, 0)
    if head != "span":
        return output.logits.numpy()
    return np.stack([output.start_logits.numpy(), output.end_logits.numpy()], -1)


@pytest.mark.parametrize(
    ("family", "head"), [pytest.param(*one, marks=() if one == FAST else pytest.mark.slow) for one in HEADS]
)
def test_a_head_of_a_decoder_is_that_of_transformers(family, head, case):
    own = case(family, head)
    metadata = own.model.hooked.metadata
    assert (metadata.head, metadata.direction) == (head, "left")
    assert len(metadata.labels) == (2 if head == "span" else 3)
    assert {"blocks.0.attn.hook_k", "blocks.0.attn.hook_v"} <= {*metadata.hooks}
    for padding in PADDINGS:
        inputs = encoder_batch(padding)
        mask, values = inputs["attention_mask"], graph_values(own.model, inputs)
        expected = run_encoder(own.reference, inputs).values
        assert {*expected} == {*metadata.hooks}
        off = {name: real_difference(name, values[name], expected[name], mask) for name in expected}
        assert {name: value for name, value in off.items() if not value < TOLERANCE} == {}
        real = slice(None) if head == "classes" else mask.astype(bool)
        main = main_output(own.plain, inputs, head)
        assert np.abs(values[metadata.output][real] - main[real]).max() < TOLERANCE, padding


@pytest.mark.parametrize("padding_token", [pytest.param(None, marks=pytest.mark.slow), 7])
@pytest.mark.slow
def test_the_token_that_is_read_is_that_of_transformers(padding_token, case):
    """The last one that is no padding by the mask, nor the token for padding, which a text may end with."""
    own = case("llama", pad_token_id=padding_token)
    texts = [[5, 6, 8, 9, 10], [11, 12, 13], [14, 15, 16, 7, 7]]
    found = own.model.forward(texts).output()
    for row, text in enumerate(texts):
        with torch.no_grad():
            assert np.abs(own.plain(torch.tensor([text])).logits.numpy()[0] - found[row]).max() < TOLERANCE
    if padding_token is not None:
        direction = np.random.default_rng(0).normal(size=own.model.hidden_size)
        spec = HookSpec().intervene("blocks.1.hook_resid_post", Intervention.Add(direction, positions=2))
        assert np.abs(own.model.forward(texts[2], spec).output()[0] - found[2]).max() > 1e-2


@pytest.mark.slow
def test_an_edit_at_every_hook_point_equals_the_same_in_torch(case):
    own, inputs = case("llama"), encoder_batch("left")
    for name in own.model.hooked.metadata.hooks:
        expected = run_encoder(own.reference, inputs, (name, 0.5)).logits
        spec = HookSpec().intervene(name, Intervention.Scale(0.5))
        found = own.model.forward(inputs["input_ids"], spec, attention_mask=inputs["attention_mask"]).output()
        assert np.abs(found - expected).max() < TOLERANCE * max(1.0, np.abs(expected).max()), name


def test_sweeps_and_gradients_of_a_class(case):
    own = case("llama")
    clean, corrupted = [5, 6, 8, 9, 10], [5, 60, 8, 9, 10]
    swept = own.model.patch_sweep(clean, corrupted, "hook_resid_pre", answer="LABEL_2", versus="LABEL_0")
    lead = own.model.forward([clean, corrupted]).output()
    runs = lead[:, 2] - lead[:, 0]
    assert np.abs([swept.clean - runs[0], swept.corrupted - runs[1]]).max() < TOLERANCE
    donor = own.model.forward(clean, HookSpec().capture("blocks.1.hook_resid_pre"))["resid_pre", 1]
    spec = HookSpec().intervene("blocks.1.hook_resid_pre", Intervention.Replace(donor[:, 1], positions=1))
    patched = own.model.forward(corrupted, spec).output()[0]
    assert swept.values[1, 1] == pytest.approx(float(patched[2] - patched[0]), abs=TOLERANCE)
    point = "blocks.0.hook_resid_pre"
    found = own.model.gradients(clean, [point], metric="logit_diff", answer="LABEL_2", versus="LABEL_0")
    embedded = own.plain.model.embed_tokens(torch.tensor([clean])).detach().requires_grad_(True)
    logits = own.plain.model(inputs_embeds=embedded).last_hidden_state[:, -1] @ own.plain.score.weight.T
    (expected,) = torch.autograd.grad(logits[0, 2] - logits[0, 0], embedded)
    assert np.abs(found.grad[point] - expected.numpy()).max() < TOLERANCE


def test_what_continues_a_text_is_refused_by_the_head(case):
    with pytest.raises(InputError, match="no meaning for a model with the head 'classes'"):
        case("llama").model.generate([5, 6, 8], max_new_tokens=2)
    with pytest.raises(InputError, match="reads a stream as tokens"):
        case("llama").model.attribute([5, 6, 8])


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A decoder with classes that reads words, and the same in torch."""
    folder = tmp_path_factory.mktemp("reader")
    reference = make_headed("llama", "classes", folder / "checkpoint")
    make_tokenizer(folder / "checkpoint")
    export(folder / "checkpoint", folder / "hooked")
    return MIModel.from_pretrained(folder / "hooked", threads=1), reference


@pytest.mark.slow
def test_texts_and_pairs_are_classified_as_transformers_does(reader):
    model, reference = reader
    texts = ["a man plays", "it rains on the guitar .", ("where does ann live ?", "ann lives in rome now")]
    found = model.classify(texts)
    for row, text in enumerate(texts):
        ids = model.tokenizer.encode(*text).ids if isinstance(text, tuple) else model.tokenizer.encode(text).ids
        with torch.no_grad():
            shares = run_plain(reference, ids).softmax(-1).numpy()
        assert found.choices[row] == tuple(f"LABEL_{n}" for n in np.argsort(-shares))
        assert np.abs(found.probabilities[row] - np.sort(shares)[::-1]).max() < TOLERANCE


def run_plain(reference: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """transformers' logits of the classes of one text."""
    reference.config._attn_implementation = "eager"
    return reference(torch.tensor([ids])).logits[0]


@pytest.mark.slow
def test_what_leaves_reads_the_last_token_in_a_client(reader, tmp_path):
    model, _ = reader
    spec = HookSpec().intervene("blocks.0.hook_mlp_out", Intervention.Scale(0.5))
    texts = ["a man", "it rains on the guitar"]
    folder = model.compile(spec, tmp_path / "out", layout="optimum")
    expected = model.forward(texts, spec).output()
    rows = [model.tokenize(text).ids for text in texts]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    for left in (False, True):
        ids = np.zeros([2, max(map(len, rows))], np.int64)
        mask = np.zeros_like(ids)
        for row, own in enumerate(rows):
            place = slice(-len(own), None) if left else slice(len(own))
            ids[row, place], mask[row, place] = own, 1
        found = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
        assert np.abs(found - expected).max() < TOLERANCE
