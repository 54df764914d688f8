"""Rules of a tokenizer.json that make a text longer are bounded; those that tokenizers have are not in the way."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import LLAMA
from tokenizers import Tokenizer

from mionnx.errors import TokenizerError
from mionnx.inputs.tokens import check_growth, load_tokenizer, tokenize

Rules = list[dict[str, Any]]


def replaces(pattern: dict[str, str], content: str, times: int) -> Rules:
    return [{"type": "Replace", "pattern": pattern, "content": content}] * times


def written(folder: Path, part: str, rules: Rules) -> Path:
    table = json.loads((LLAMA / "tokenizer.json").read_text())
    table[part] = {"type": "Sequence", f"{part}s": rules} if part != "post_processor" else rules[0]
    (folder / "tokenizer.json").write_text(json.dumps(table))
    return folder


TEXT = {"Sequence": {"id": "A", "type_id": 0}}
GROWING: dict[str, tuple[str, Rules]] = {
    "normalizer": ("normalizer", replaces({"String": "a"}, "aa", 28)),
    "decoder": ("decoder", replaces({"String": "a"}, "aa", 28)),
    "regular expression": ("normalizer", replaces({"Regex": "(?=a)"}, "a", 28)),
    "any text": ("normalizer", replaces({"Regex": ""}, "x" * 1000, 2)),
    "empty": ("decoder", replaces({"String": ""}, "x" * 1000, 2)),
    "nested": ("normalizer", [{"type": "Sequence", "normalizers": replaces({"String": "a"}, "a" * 100, 4)}]),
    "prepended": ("normalizer", [{"type": "Prepend", "prepend": "x" * 2**21}]),
    "prepended, then doubled": (
        "normalizer",
        [{"type": "Prepend", "prepend": "a" * 1000}, *replaces({"String": "a"}, "aa", 12)],
    ),
    "template": (
        "post_processor",
        [{"type": "TemplateProcessing", "single": [TEXT] * 20_000, "pair": [TEXT], "special_tokens": {}}],
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_text_that_grows_without_bound_is_refused(name, tmp_path):
    """Finding 8: a file of 2 kB, and a call that nothing interrupts."""
    part, rules = GROWING[name]
    begun = time.process_time()
    with pytest.raises(TokenizerError, match=rf"the {part} of .*tokenizer\.json makes a text up to"):
        load_tokenizer(written(tmp_path, part, rules))
    assert time.process_time() - begun < 5


USUAL: dict[str, tuple[str, Rules]] = {
    "llama": ("normalizer", [{"type": "Prepend", "prepend": "▁"}, *replaces({"String": " "}, "▁", 1)]),
    "albert": (
        "normalizer",
        [*replaces({"String": "``"}, '"', 1), *replaces({"String": "''"}, '"', 1), {"type": "NFKD"}],
    ),
    "clip": ("normalizer", [{"type": "NFC"}, *replaces({"Regex": r"\s+"}, " ", 1), {"type": "Lowercase"}]),
    "decoder": ("decoder", [*replaces({"String": "▁"}, " ", 1), {"type": "ByteFallback"}, {"type": "Fuse"}]),
}


@pytest.mark.parametrize("name", USUAL)
def test_rules_that_tokenizers_have_are_taken(name, tmp_path):
    assert len(tokenize(load_tokenizer(written(tmp_path, *USUAL[name])), "France").ids)


def test_a_text_of_the_largest_growth_that_is_taken_is_tokenised_at_once(tmp_path):
    tokenizer = Tokenizer.from_file(str(LLAMA / "tokenizer.json"))
    check_growth(tokenizer, tmp_path)
    doubled = load_tokenizer(written(tmp_path, "normalizer", replaces({"String": "a"}, "aa", 14)))
    begun = time.process_time()
    doubled.encode("a")
    assert time.process_time() - begun < 5
