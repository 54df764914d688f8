"""Encoders in 4 and 8 bits and in float16: every hook point beside transformers, embeddings, and what is refused."""

import numpy as np
import pytest
import torch
from encoder_texts import make_text_encoder
from encoders import run_encoder
from quantised_reference import with_numbers

from mionnx import HookSpec, InputError, Intervention, MIModel
from mionnx.machine.softmax import log_softmax

TEXTS = ["the man plays the guitar on stage.", "it rains", "a good day for music and for paris, france"]
PAIR = ("where does ann live?", "ann lives in rome now")
TOLERANCE = 5e-5
HEADS = ("masked_lm", "classes", "token_classes", "span", "embedding", "none")
SOME_SLOW = [pytest.param(head, marks=[pytest.mark.slow] * (head in ("token_classes", "span"))) for head in HEADS]


@pytest.fixture(scope="module")
def blocks(text_encoder, tmp_path_factory):
    """(head, bits) -> the quantised model."""
    made = {}

    def find(head: str, bits: int) -> MIModel:
        if (head, bits) not in made:
            folder = tmp_path_factory.mktemp("encoder") / "blocks"
            made[head, bits] = MIModel.from_pretrained(
                text_encoder(head)[0].quantise(folder, bits=bits, block_size=16), threads=1
            )
        return made[head, bits]

    return find


def inputs_of(model: MIModel, *texts: str) -> dict[str, np.ndarray]:
    tokens = model.tokenize(*texts)
    ids = np.asarray(tokens.ids)[None]
    types = np.zeros_like(ids) if tokens.type_ids is None else np.asarray(tokens.type_ids)[None]
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
        "token_type_ids": types,
    }


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("head", ["masked_lm", "classes"])
def test_every_hook_point_is_that_of_transformers_with_the_same_numbers(head, bits, blocks, tmp_path):
    model = blocks(head, bits)
    reference = with_numbers(make_text_encoder(head, tmp_path), model.hooked)
    expected = run_encoder(reference, inputs_of(model, *PAIR))
    names = [point.name for point in model.hook_points() if not point.derived]
    found = model.forward([PAIR], HookSpec().capture("*"))
    assert {*names} <= {*expected.values}
    off = {name: np.abs(found[name] - expected.values[name]).max() for name in names if "scores" not in name}
    assert {name: distance for name, distance in off.items() if not distance < TOLERANCE} == {}
    edit = HookSpec().intervene("blocks.0.hook_resid_mid", Intervention.Scale(0.5))
    changed = run_encoder(reference, inputs_of(model, *PAIR), ("blocks.0.hook_resid_mid", 0.5))
    assert np.abs(model.forward([PAIR], edit).output() - changed.logits).max() < TOLERANCE
    assert np.abs(changed.logits - expected.logits).max() > 1e-3


@pytest.mark.parametrize("head", SOME_SLOW)
def test_8_bits_stay_near_the_floats(head, text_encoder, blocks):
    whole, small = text_encoder(head)[0], blocks(head, 8)
    assert small.hooked.metadata.weight_dtype == "int8"
    assert [*small.hooked.metadata.hooks] == [*whole.hooked.metadata.hooks]
    one, other = (model.forward(TEXTS[0]).output() for model in (whole, small))
    assert 0 < np.abs(one - other).max() < 0.02 * np.abs(one).max()


def test_embeddings_keep_their_angles(text_encoder, blocks):
    whole = text_encoder("embedding")[0].embed(TEXTS)
    cosines = {bits: (whole * blocks("embedding", bits).embed(TEXTS)).sum(-1).min() for bits in (4, 8)}
    assert cosines[8] > 0.9999
    assert cosines[4] > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("head", ["masked_lm", "classes", "span"])
def test_a_budget_bounds_the_kl_of_the_heads_predictions(head, text_encoder, tmp_path):
    whole, _ = text_encoder(head)
    entry = MIModel.from_pretrained(whole.quantise(tmp_path / "all", budget=1e3, texts=TEXTS))
    free = entry.hooked.metadata.quantised["budget"]["kl"]
    small = MIModel.from_pretrained(whole.quantise(tmp_path / "made", budget=free / 3, texts=TEXTS), threads=1)
    told = small.hooked.metadata.quantised["budget"]
    divergences = []
    for text in TEXTS:
        one, other = (model.forward(text).output().astype(np.float64) for model in (whole, small))
        axis = 1 if head == "span" else -1  # a start and an end are chosen among tokens
        first, second = log_softmax(one, axis=axis), log_softmax(other, axis=axis)
        divergences.append((np.exp(first) * (first - second)).sum(axis).ravel())
    kl = np.concatenate(divergences).mean()
    assert told["kl"] == pytest.approx(kl, rel=1e-3)
    assert kl <= free / 3
    matrices = small.verify(TEXTS[0], ["ort-cpu"], other=whole).matrices
    assert matrices[0].kl > 0


def test_importance_is_measured_on_texts_that_are_given(text_encoder, blocks, tmp_path):
    for head in ("embedding", "none"):  # a pooler beside the stream has no share in it
        whole, _ = text_encoder(head)
        made = whole.quantise(tmp_path / head, block_size=16, importance=TEXTS)
        one, other = (model.forward(TEXTS[0]).output() for model in (whole, MIModel.from_pretrained(made)))
        assert 0 < np.abs(one - other).max() < 0.2 * np.abs(one).max()


def test_what_has_no_meaning_is_refused_by_name(text_encoder, blocks, tmp_path):
    masked, embedding = text_encoder("masked_lm")[0], text_encoder("embedding")[0]
    for call, message in (
        (lambda: masked.quantise(tmp_path / "x", importance=True), "writes no text to measure on: give importance="),
        (lambda: masked.quantise(tmp_path / "x", budget=0.1), "writes no text to measure on: give texts="),
        (lambda: embedding.quantise(tmp_path / "x", budget=0.1, texts=TEXTS), r"budget= .* vectors \(embedding\)"),
        (lambda: text_encoder("none")[0].quantise(tmp_path / "x", budget=0.1, texts=TEXTS), "last_hidden_state"),
        (
            lambda: blocks("embedding", 4).verify(TEXTS[0], ["ort-cpu"], other=embedding, matrices=True),
            "'embedding' gives no probabilities",
        ),
    ):
        with pytest.raises(InputError, match=message):
            call()
    assert not [*tmp_path.iterdir()]
    lost = blocks("embedding", 4).verify(TEXTS[0], ["ort-cpu"], other=embedding)
    assert not lost.matrices
    assert len(lost.besides[0].layers) == 2


@pytest.mark.slow
def test_a_checkpoint_opens_in_float16(text_encoder):
    whole, _ = text_encoder("embedding")
    source = whole.hooked.folder.parent / "checkpoint"
    half = MIModel.from_pretrained(source, dtype="float16", threads=1)
    assert half.hooked.metadata.dtype == "float16"
    assert [*half.hooked.metadata.hooks] == [*whole.hooked.metadata.hooks]
    assert np.diag(whole.similarity(whole.embed(TEXTS), half.embed(TEXTS))).min() > 0.9999
    with pytest.raises(InputError, match="in float32 already"):
        MIModel.from_pretrained(whole.hooked.folder, dtype="float16")


@pytest.mark.slow
def test_minilm_in_blocks_embeds_as_the_floats_do():
    pytest.importorskip("all_minilm_l6_v2")
    torch.set_num_threads(1)
    whole = MIModel.from_pretrained("minilm", threads=1)
    own = whole.embed(TEXTS)
    for dtype, least in (("int8", 0.999), ("int4", 0.95)):
        small = MIModel.from_pretrained("minilm", dtype=dtype, threads=1)
        assert [*small.hooked.metadata.hooks] == [*whole.hooked.metadata.hooks]
        cosines = (own * small.embed(TEXTS)).sum(-1)
        print(dtype, cosines.min())
        assert least < cosines.min() < 1 - 1e-6
