"""A `tokenizer.json` of strangers: what it holds besides the rules of a text, and rules that fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from mionnx import HookSpec, Intervention, MIModel, TokenizerError
from mionnx.inputs.tokens import copy_tokenizer, load_tokenizer, tokenize

TEXT = "The capital of France is"
TRUNCATIONS = [
    None,
    *(
        {"direction": direction, "max_length": length, "strategy": strategy, "stride": 0}
        for direction in ("Left", "Right")
        for length, strategy in ((3, "LongestFirst"), (1, "OnlyFirst"))
    ),
]
PADDINGS = [
    None,
    *(
        {"strategy": strategy, "direction": direction, "pad_to_multiple_of": multiple, **WITH}
        for strategy in ("BatchLongest", {"Fixed": 128}, {"Fixed": 10**9})  # the last aborts the process, if in force
        for direction in ("Left", "Right")
        for multiple in (None, 8)
        for WITH in ({"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"},)
    ),
]
DROPS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<eos>", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}},
}
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.fixture
def changed(copy: Path) -> Callable[..., Path]:
    """A copy of world-llama with other entries in its tokenizer.json."""

    def change(**entries: Any) -> Path:
        file = copy / "tokenizer.json"
        table = json.loads(file.read_text())
        model = table["model"] | entries.get("model", {})
        file.write_text(json.dumps({**table, **entries, "model": model}))
        return copy

    return change


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_truncation_and_padding_are_switched_off_as_transformers_does(changed, truncation):
    """Part 4, 1: prompts were cut, or ended in padding that was attended to."""
    for padding in PADDINGS:
        folder = changed(truncation=truncation, padding=padding)
        ids = tokenize(load_tokenizer(folder), TEXT).ids.tolist()
        oracle = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        assert ids == oracle(TEXT)["input_ids"] == [3, 4, 5, 39, 6]


def test_a_model_whose_tokenizer_cuts_answers_as_the_others(changed, shipped):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    model = MIModel.from_pretrained(changed(truncation=truncation))
    assert model.generate(TEXT, max_new_tokens=1).texts == shipped.generate(TEXT, max_new_tokens=1).texts


def test_a_post_processor_that_drops_the_text_is_noticed(changed):
    with pytest.raises(TokenizerError, match=r"post_processor of .*drops the text: of a it makes <eos>"):
        tokenize(load_tokenizer(changed(post_processor=DROPS)), TEXT)


def test_rules_that_panic_are_one_sentence(changed):
    """Part 4, 10: Rust's panics are no Exception."""
    with pytest.raises(TokenizerError, match=r"fails on the text 'aaa.*retry-limit"):
        tokenize(load_tokenizer(changed(pre_tokenizer=BACKTRACKING)), "a" * 40 + "!")


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, r"tokenizer\.json is damaged: .*Pre"),
        ({"model": {"unk_token": "<none>"}}, r"fails on the text 'Hello world': WordLevel error: Missing"),
    ],
)
def test_what_the_library_raises_is_one_sentence(changed, entries, sentence):
    with pytest.raises(TokenizerError, match=sentence):
        tokenize(load_tokenizer(changed(**entries)), "Hello world")


def test_a_decoder_that_panics_is_one_sentence(changed):
    decoder = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "a"}
    model = {"vocab": {"<unk>": 0, "a" * 40 + "!": 1}}
    model = MIModel.from_pretrained(changed(decoder=decoder, model=model))
    with pytest.raises(TokenizerError, match=r"does not decode the tokens \[1\]"):
        model.to_string([1])


def test_half_a_surrogate_in_a_chat_is_one_sentence(shipped):
    """Part 1, 9."""
    template = "{{ messages[0].content }}"
    with pytest.raises(TokenizerError, match=r"character 1 of what the chat template makes is half of a pair"):
        shipped.tokenize_chat([{"role": "user", "content": "a\ud800"}], chat_template=template)


def test_a_copy_for_other_clients_neither_cuts_nor_pads(changed, tmp_path):
    folder, cut = changed(truncation=TRUNCATIONS[1], padding=PADDINGS[1]), tmp_path / "cut"
    copy_tokenizer(folder / "tokenizer.json", cut)
    assert Tokenizer.from_file(str(cut)).encode(TEXT).ids == [3, 4, 5, 39, 6]
    copy_tokenizer(changed(truncation=None, padding=None) / "tokenizer.json", whole := tmp_path / "whole")
    assert whole.read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_compiled_folder_has_that_copy(changed, tmp_path):
    model = MIModel.from_pretrained(changed(truncation=TRUNCATIONS[1], padding=PADDINGS[1]))
    model.compile(HookSpec().intervene("blocks.1.hook_mlp_out", Intervention.Zero()), tmp_path / "compiled")
    assert Tokenizer.from_file(str(tmp_path / "compiled" / "tokenizer.json")).encode(TEXT).ids == [3, 4, 5, 39, 6]
