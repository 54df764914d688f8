"""Tokens of a text, and positions of a part of it."""

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from mionnx import TokenizerError
from mionnx.inputs.tokens import tokenize


class TestTokens:
    words = ("<unk>", "the", "cat", "saw", "catalogue")

    def tokens(self, text: str):
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(self.words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = WhitespaceSplit()
        return tokenize(tokenizer, text)

    def test_positions_of_a_part(self):
        tokens = self.tokens("the cat saw the catalogue")
        assert tokens.ids.tolist() == [1, 2, 3, 1, 4]
        assert tokens.positions_of("saw the") == [2, 3]
        assert tokens.positions_of("cat", 0) == [1]
        assert tokens.positions_of("cat", -1) == [4]

    @pytest.mark.parametrize(("part", "occurrence"), [("dog", None), ("cat", None), ("cat", 2), ("", None)])
    def test_parts_that_are_not_there_or_not_one(self, part, occurrence):
        with pytest.raises(TokenizerError, match="occur"):
            self.tokens("the cat saw the catalogue").positions_of(part, occurrence)

    def test_an_empty_prompt(self):
        with pytest.raises(TokenizerError, match="empty"):
            self.tokens("  ")


def test_text_without_a_tokenizer(models):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        models("llama").forward("The capital of France is")


def test_a_token_is_spelled_as_it_is_decoded():
    """FINDINGS, part 2, 16: 'Ġcapital', where the lens says ' capital'."""
    tokenizer = Tokenizer(WordLevel({"The": 0, "Ġcapital": 1, "<unk>": 2}, "<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found = tokenize(tokenizer, "The capital")
    assert found.pieces == ["The", " capital"]
    assert "' capital'(1)" in str(found)
