"""Direct attribution of a masked language model: the token at the mask, or at a position that is named."""

import json

import numpy as np
import pytest
from encoder_texts import make_tokenizer
from encoders import make_encoder

from exporters.transformers import export
from mionnx import InputError, MIModel

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
