"""Prompts as tokenizers give them: what a pass on them computes is what it computes on the text."""

import numpy as np
import pytest

from mionnx import InputError
from mionnx.inputs.token_rows import read_rows

TEXTS = ["The capital of France is", "three four five", "one two"]


@pytest.fixture(scope="module")
def fast(shipped):
    """The tokenizer that ships, as transformers' own class."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=shipped.tokenizer, pad_token="<pad>")


FORMS = {
    "lists": {},
    "tensors": {"return_tensors": "pt", "padding": True},
    "arrays": {"return_tensors": "np", "padding": True},
    "padded lists, token types": {"padding": True, "return_token_type_ids": True},
    "left": {"return_tensors": "pt", "padding": True, "padding_side": "left"},
    "annotated": {"return_special_tokens_mask": True, "return_offsets_mapping": True, "return_length": True},
}


def last(cache, mask):
    """The logits of each row's last token."""
    ends = np.array([np.flatnonzero(row)[-1] for row in mask])
    return cache.output()[np.arange(len(ends)), ends]


@pytest.mark.parametrize("form", FORMS)
def test_an_encoding_runs_as_its_texts(shipped, fast, form):
    expected = shipped.forward(TEXTS).output()[:, -1]
    encoding = fast(TEXTS, **FORMS[form])
    mask = [list(map(int, row)) for row in encoding["attention_mask"]]
    width = max(map(len, mask))
    mask = [[0] * (width - len(row)) + row for row in mask]
    named = {key: encoding[key] for key in encoding if key in ("input_ids", "attention_mask", "token_type_ids")}
    for found in (shipped.forward(encoding), shipped.forward(dict(encoding)), shipped.forward(**named)):
        assert np.abs(last(found, mask) - expected).max() < 2e-5
    assert np.abs(expected[0] - shipped.forward(TEXTS[1]).output()[0, -1]).max() > 0.1


@pytest.mark.parametrize("form", ["lists", "left"])
def test_every_verb_takes_an_encoding(shipped, fast, form):
    encoding = fast(TEXTS, **FORMS[form])
    texts = shipped.generate(TEXTS, max_new_tokens=3).new_texts
    assert shipped.generate(encoding, max_new_tokens=3).new_texts == texts
    assert shipped.generate(**encoding, max_new_tokens=3).new_texts == texts
    expected = shipped.forward(TEXTS).output()[:, -1]
    seen = []
    hooks = [("blocks.1.hook_resid_post", lambda value, hook: seen.append(value.shape))]
    for found in (
        shipped(**encoding),
        shipped.run_with_hooks(**encoding, fwd_hooks=hooks),
        shipped.run_with_cache(**encoding)[0],
        shipped.run_with_cache(encoding, "blocks.0.hook_resid_post")[0],
    ):
        assert np.abs(found[:, -1] - expected).max() < 2e-5
    assert len(seen) == 1


def test_readers_of_one_prompt_take_an_encoding(shipped, fast):
    text = TEXTS[0]
    for given in (fast(text), fast(text, return_tensors="pt"), shipped.tokenizer.encode(text)):
        assert shipped.logit_lens(given, k=2).best(-1, -1) == shipped.logit_lens(text, k=2).best(-1, -1)
        assert shipped.track_race(given, 2) == shipped.track_race(text, 2)
        assert np.array_equal(shipped.attention(given).patterns, shipped.attention(text).patterns)
        assert shipped.attribute(given).tokens == shipped.attribute(text).tokens
        assert shipped.capture_residuals(given, [1])[1].tolist() == shipped.capture_residuals(text, [1])[1].tolist()
        assert shipped.verify(given, ["ort-cpu", "ort-cpu:none"], points="hook_embed", greedy=0, local=False).agrees
    other = "The capital of Germany is"
    sweep = shipped.patch_sweep(fast(text), fast(other, return_tensors="np"), "resid_mid", over=("layer", "position"))
    expected = shipped.patch_sweep(text, other, "resid_mid", over=("layer", "position"))
    assert np.array_equal(sweep.normalized, expected.normalized)


def test_encodings_of_the_tokenizers_library(shipped):
    encodings = shipped.tokenizer.encode_batch(TEXTS)
    assert np.array_equal(shipped.forward(encodings).output(), shipped.forward(TEXTS).output())
    assert np.array_equal(shipped.forward(encodings[1]).output(), shipped.forward(TEXTS[1]).output())
    mixed = [encodings[0], shipped.tokenize(TEXTS[1]), {"input_ids": encodings[2].ids}]
    assert np.array_equal(shipped.forward(mixed).output(), shipped.forward(TEXTS).output())
    for encoding in encodings:
        encoding.pad(6, pad_id=0)  # on the right, as the library does by itself
    found = shipped.forward(encodings)
    mask = [encoding.attention_mask for encoding in encodings]
    assert np.abs(last(found, mask) - shipped.forward(TEXTS).output()[:, -1]).max() < 2e-5


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_tensors_of_ids(shipped, dtype):
    torch = pytest.importorskip("torch")
    rows = [torch.tensor(shipped.tokenize(text).ids).to(getattr(torch, dtype)) for text in TEXTS]
    assert np.array_equal(shipped.forward(rows).output(), shipped.forward(TEXTS).output())
    assert np.array_equal(shipped.forward(rows[0]).output(), shipped.forward(TEXTS[0]).output())
    assert np.array_equal(shipped.forward(list(rows[0])).output(), shipped.forward(TEXTS[0]).output())
    mask = torch.ones(1, 5, dtype=torch.bool)
    assert np.array_equal(
        shipped.forward(rows[0][None], attention_mask=mask).output(), shipped.forward(TEXTS[0]).output()
    )
    with pytest.raises(InputError, match="integers, got float32"):
        shipped.forward(rows[0].float())


def test_an_encoding_continues_a_cache(shipped, fast):
    first = shipped.forward(fast("The capital of"), use_cache=True)
    rest = shipped.forward(**fast("France is", return_tensors="np"), cache=first.kv_cache)
    assert np.abs(rest.output()[0, -1] - shipped.forward(TEXTS[0]).output()[0, -1]).max() < 2e-5
    whole = shipped.forward(
        {"input_ids": fast("France is")["input_ids"], "attention_mask": [1] * 5}, cache=first.kv_cache
    )
    assert np.array_equal(whole.output(), rest.output())


WRONG = {
    "a chat": ([{"role": "user", "content": "hello"}], r"tokenize_chat\(messages\)"),
    "no ids": ({"ids": [3]}, "'input_ids'; this one has"),
    "other inputs": ({"input_ids": [3], "labels": [3]}, "'labels', which the model does not read"),
    "a typo": ({"input_ids": [3], "atention_mask": [1]}, "did you mean 'attention_mask'"),
    "token types": ({"input_ids": [3, 4], "token_type_ids": [0, 1]}, "token_type_ids holds other numbers than 0"),
    "a short mask": ({"input_ids": [3, 4], "attention_mask": [1]}, r"must be \[1, 2\]"),
    "padding counted": ({"input_ids": [[3, 4], [5]], "attention_mask": [[1, 1], [1, 1]]}, "row 1, column 0"),
    "text among ids": (["a", [3]], "texts or ids, not both"),
    "two rows in one": ([{"input_ids": [[3], [4]]}], "one row, got 2"),
    "nested": ([[[3, 4]], [[5, 6]]], r"each row of tokens must be \[seq\]"),
    "a nested mask": (
        {"input_ids": [[3, 4], [5]], "attention_mask": [[[1], [1]], [[1]]]},
        r"row of attention_mask must be \[seq\]",
    ),
    "floats": ({"input_ids": [0.5]}, "integers, got float64"),
    "none": ({"input_ids": []}, "empty"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_prompts_that_are_refused(shipped, wrong):
    given, says = WRONG[wrong]
    with pytest.raises(InputError, match=says):
        shipped.forward(given)


def test_a_prompt_and_a_mask_are_given_once(shipped):
    with pytest.raises(InputError, match="given twice, by itself and with the ids"):
        shipped.forward({"input_ids": [3, 4], "attention_mask": [1, 1]}, attention_mask=[0, 1])
    with pytest.raises(InputError, match="both tokens and input_ids"):
        shipped.generate([3, 4], input_ids=[3, 4])
    same = shipped.forward({"input_ids": [3, 4], "attention_mask": [0, 1]}, attention_mask=[[0, 1]])
    assert np.array_equal(same.output()[:, 1], shipped.forward([4]).output()[:, 0])
    assert read_rows({"input_ids": [[3], [4, 5]]}).mask.tolist() == [[0, 1], [1, 1]]
