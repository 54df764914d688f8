"""Words that become `<unk>`: a warning that names them, once for a model, at the caller's line."""

import warnings

import pytest
from repository import REPOSITORY
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import WhitespaceSplit

from mionnx import MIModel, UnknownWordWarning
from mionnx.inputs.tokens import UnknownWords, tokenize


@pytest.fixture
def world() -> MIModel:
    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


READERS = {
    "forward": lambda model, text: model.forward(text),
    "a list": lambda model, text: model.forward(["The capital of France is", text]),
    "generate": lambda model, text: model.generate(text, max_new_tokens=1),
    "to_str_tokens": lambda model, text: model.to_str_tokens(text),
    "run_with_cache": lambda model, text: model.run_with_cache(text, "hook_embed"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_model_says_once_which_words_it_does_not_know(world, reader):
    with pytest.warns(UnknownWordWarning, match="world-llama: 'Hello', 'wörld'; the model reads <unk>") as said:
        READERS[reader](world, "Hello capital wörld")
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        READERS[reader](world, "Hello again")


def test_texts_that_are_known_or_spell_the_token_are_not_warned_about(world):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.forward("The capital of France is")
        world.forward("The capital of <unk> is")
    with pytest.warns(UnknownWordWarning, match=": 'Xyz'; "):
        world.forward("The <unk> of Xyz is")


def test_a_world_tokenizer_knows_every_byte():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7").to_tokens("The capital of")


def word_level() -> Tokenizer:
    return Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))


def word_piece() -> Tokenizer:
    return Tokenizer(models.WordPiece({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))


def unigram() -> Tokenizer:
    return Tokenizer(models.Unigram([("[UNK]", 0.0), ("cat", -1.0)], unk_id=0))


def pairs() -> Tokenizer:
    letters = {letter: i for i, letter in enumerate("cat", 1)}
    return Tokenizer(models.BPE({"[UNK]": 0, **letters}, [], unk_token="[UNK]", fuse_unk=True))


@pytest.mark.parametrize("make", [word_level, word_piece, unigram, pairs])
def test_every_kind_of_tokenizer(make):
    tokenizer = make()
    tokenizer.pre_tokenizer = WhitespaceSplit()
    words = UnknownWords(tokenizer, "toy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        words.look(tokenize(tokenizer, "cat cat"))
    with pytest.warns(UnknownWordWarning, match=r"of toy: 'dog'; the model reads \[UNK\]"):
        words.look(tokenize(tokenizer, "cat dog"))


def test_a_long_list_is_cut():
    tokenizer = word_level()
    tokenizer.pre_tokenizer = WhitespaceSplit()
    with pytest.warns(UnknownWordWarning, match="'a', 'b', 'd', 'e', 'f' and 2 more;"):
        UnknownWords(tokenizer, "toy").look(tokenize(tokenizer, "a b a d e f g h cat"))


def test_a_tokenizer_without_such_a_token():
    tokenizer = Tokenizer(models.BPE({"c": 0}, []))
    assert UnknownWords(tokenizer, "toy").token is None
