"""Commands on encoders print what their verbs give."""

import json

import numpy as np
from command_line import LLAMA, mionnx, succeeded
from repository import REPOSITORY

from mionnx import MIModel

BERT = REPOSITORY / "models" / "world-bert"
TEXTS = ("The capital of France is <mask> .", "<mask> is the capital of Japan .")


def test_masks_of_several_texts_are_filled(tmp_path):
    page = tmp_path / "masks.html"
    facts = json.loads(succeeded("fill-mask", BERT, *TEXTS, "--k", "2", "--json", "--html", page))
    expected = MIModel.from_pretrained(BERT).fill_mask(TEXTS, k=2)
    assert facts == json.loads(expected.to_json())
    assert expected.top == ["Paris", "Tokyo"]
    assert "Paris" in page.read_text()
    assert "Paris" in succeeded("fill-mask", BERT, TEXTS[0])


def test_another_head_is_named():
    refused = mionnx("fill-mask", LLAMA, TEXTS[0])
    assert refused.returncode == 1
    assert "world-llama predicts the next token" in refused.stderr
    assert "has the head 'masked_lm'" in mionnx("similarity", BERT, "a", "b").stderr


def test_labels_tags_and_answers(text_encoder):
    text, context = "ann plays music in rome", "ann lives in rome now"
    for command, head, verb in (("classify", "classes", "classify"), ("tag", "token_classes", "tag")):
        model, _ = text_encoder(head)
        facts = json.loads(succeeded(command, model.hooked.folder, text, context, "--json"))
        assert facts == json.loads(getattr(model, verb)([text, context]).to_json())
    model, _ = text_encoder("span")
    question = "where does ann live?"
    facts = json.loads(succeeded("answer-span", model.hooked.folder, question, context, "--k", "2", "--json"))
    assert facts == json.loads(model.answer_span(question, context, k=2).to_json())


def test_texts_beside_others(text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    texts, others = ("the man plays", "it rains"), ("a good day", "music", "paris")
    beside = [word for other in others for word in ("--beside", other)]
    numbers = json.loads(succeeded("similarity", model.hooked.folder, *texts, *beside, "--json"))
    assert np.allclose(numbers, model.similarity(texts, others))
    page = tmp_path / "pairs.html"
    succeeded("attribute-similarity", model.hooked.folder, *texts, "--steps", "2", "--html", page)
    assert "rains" in page.read_text()


def test_embeddings_are_printed_and_written(text_encoder, tmp_path):
    model, _ = text_encoder("embedding")
    texts, target = ("the man plays", "it rains"), tmp_path / "vectors.npy"
    facts = json.loads(succeeded("embed", model.hooked.folder, *texts, "--save", target, "--json"))
    expected = model.embed(texts)
    assert np.allclose(facts, expected, atol=1e-6)
    assert np.array_equal(np.load(target), expected)
    assert np.load(target).dtype == np.float32
    assert "the man plays" in succeeded("embed", model.hooked.folder, *texts, "--max-length", "4")
    refused = mionnx("embed", model.hooked.folder, *texts, "--save", tmp_path / "absent" / "vectors.npy")
    assert refused.returncode == 1
    assert "absent" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.npy"]


def test_commands_of_predictions_read_the_mask():
    facts = json.loads(succeeded("run", BERT, TEXTS[1], "--zero", "blocks.1.hook_mlp_out", "--json"))
    assert facts["baseline"][0][0] == "Tokyo"
    assert "position 0" in succeeded("lens", BERT, TEXTS[1])
    for arguments, why in {
        ("run", BERT, "The capital of France is Paris ."): "has no mask tokens",
        ("demo", "--model", BERT): "the worked examples are of decoders",
    }.items():
        refused = mionnx(*arguments)
        assert refused.returncode == 1
        assert why in refused.stderr.replace("\n", " ")
