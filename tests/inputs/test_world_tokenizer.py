"""The World tokenizer against the `rwkv` package's own, on the package's vocabulary."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rwkv.rwkv_tokenizer import TRIE_TOKENIZER
from rwkv_checkpoints import write

from exporters.rwkv import export
from mionnx import HookSpec, MIModel, StateKnockoutSpec, TokenizerError
from mionnx.inputs.world_tokenizer import WorldTokenizer, find_vocabulary

VOCABULARY = Path(find_spec("rwkv").origin).parent / "rwkv_vocab_v20230424.txt"


@pytest.fixture(scope="module")
def ours() -> WorldTokenizer:
    return WorldTokenizer.from_file(VOCABULARY)


@pytest.fixture(scope="module")
def theirs() -> TRIE_TOKENIZER:
    return TRIE_TOKENIZER(str(VOCABULARY))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@pytest.mark.slow_beyond(1)
def test_every_text(ours, theirs, text):
    encoding = ours.encode(text)
    assert encoding.ids == theirs.encode(text)
    assert ours.decode(encoding.ids) == text
    end = 0
    for start, stop in encoding.offsets:  # in order, without holes; parts of one character share its place
        assert start in (end, end - 1)
        assert start < stop
        end = stop
    assert end == len(text)


def test_parts_of_characters(ours):
    text = "a🎉b"
    encoding = ours.encode(text)
    party = [i for i, (start, stop) in enumerate(encoding.offsets) if (start, stop) == (1, 2)]
    assert len(party) > 1
    assert ours.decode(encoding.ids[: party[-1]]).startswith("a\ufffd")
    assert ours.decode(encoding.ids[party[0] : party[-1] + 1]) == "🎉"
    assert "\\x" in encoding.tokens[party[0]]


def test_special_tokens_and_sizes(ours):
    assert ours.decode([0, 33]) == ours.decode([33])
    assert ours.decode([0], skip_special_tokens=False) == "<|endoftext|>"
    assert ours.get_vocab_size() == 65530
    with pytest.raises(TokenizerError, match="65530 is not in the vocabulary"):
        ours.decode([65530])
    with pytest.raises(TokenizerError, match="Unicode"):
        ours.encode("\ud800")


@pytest.mark.parametrize("line", ["1 'a' 2", "x 'a' 1", "1 a 1", "1 'a'", "0 'a' 1", "1 3 1", "1 __import__('os') 1"])
def test_a_damaged_vocabulary(tmp_path, line):
    (tmp_path / "rwkv_vocab.txt").write_text(f"2 'b' 1\n{line}\n")
    with pytest.raises(TokenizerError, match="line 2"):
        WorldTokenizer.from_file(tmp_path / "rwkv_vocab.txt")


def test_a_text_runs_through_a_model_with_a_world_vocabulary(tmp_path):
    folder = tmp_path / "checkpoint"
    write("7-pth", folder)
    lines = [f"{i + 1} {bytes([32 + i])!r} 1" for i in range(95)] + ["96 ' cat' 4", "97 'sat' 3"]
    (folder / "rwkv_vocab_v1.txt").write_text("\n".join(lines) + "\n")
    export(folder, tmp_path / "hooked")
    assert find_vocabulary(tmp_path / "hooked") == tmp_path / "hooked" / "rwkv_vocab_v1.txt"
    model = MIModel.from_pretrained(tmp_path / "hooked")
    tokens = model.tokenize("a cat sat")
    assert tokens.pieces == ["a", " cat", " ", "sat"]
    assert tokens.positions_of("cat") == [1]
    assert model.token_id(" cat") == 96
    spec = HookSpec().set_state_knockout(StateKnockoutSpec().positions(tokens.positions_of("cat")))
    assert model.forward("a cat sat", spec).output().shape == (1, 4, 101)
