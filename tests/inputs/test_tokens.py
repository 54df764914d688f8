"""Tokens of a text, and positions of a part of it."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from repository import REPOSITORY
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from mionnx import InputError, TokenizerError
from mionnx.inputs.tokens import SLOW_LENGTH, encode, tokenize
from mionnx.machine import memory


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


LONG_TEXT = "The capital of France is Zürich 😀.  " * 4000


def test_a_long_text_has_the_tokens_of_the_library_s_own_call(shipped):
    own = shipped.tokenizer.encode(LONG_TEXT)
    found = encode(shipped.tokenizer, LONG_TEXT)
    assert len(LONG_TEXT) > SLOW_LENGTH
    assert (found.ids, found.offsets) == (own.ids, own.offsets)
    plain = shipped.tokenizer.encode(LONG_TEXT, add_special_tokens=False)
    assert encode(shipped.tokenizer, LONG_TEXT, add_special_tokens=False).ids == plain.ids


def test_threads_tokenise_long_texts_at_once(shipped):
    texts = [f"{word} " * SLOW_LENGTH for word in ("The", "capital", "of", "France")]
    with ThreadPoolExecutor() as pool:
        found = [*pool.map(partial(encode, shipped.tokenizer), texts)]
    assert [{*one.ids} for one in found] == [{*shipped.tokenizer.encode(text).ids} for text in texts]


def test_what_the_library_raises_for_a_long_text_is_one_refusal():
    with pytest.raises(TokenizerError, match=r"the tokenizer fails on the text .*WordLevel"):
        encode(Tokenizer(WordLevel({"a": 0}, "<unk>")), "b" * (SLOW_LENGTH + 1))


def test_an_empty_long_prompt_is_not_spelled_out():
    tokenizer = Tokenizer(WordLevel({"a": 0}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    with pytest.raises(TokenizerError, match="is empty") as refused:
        tokenize(tokenizer, " " * (SLOW_LENGTH + 1))
    assert len(str(refused.value)) < 500


def test_a_text_whose_tokens_memory_does_not_hold_is_refused_at_once(shipped, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 2**20)
    with pytest.raises(InputError, match=r"a text of 144,000 characters needs 11\.0 MiB or more .* 1\.0 MiB .*pieces"):
        shipped.tokenize(LONG_TEXT)


@pytest.mark.skipif(sys.platform == "win32", reason="a signal that Windows has not")
def test_ctrl_c_is_heard_while_ten_million_characters_are_tokenised():
    """FINDINGS part 1, defect 7: it was heard after 58 s."""
    program = (
        "import signal, time\nfrom mionnx import MIModel\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in a background job
        "model = MIModel.from_pretrained('world-llama'); text = 'The capital of France is ' * 400_000\n"
        "model.tokenize('The'); print('begun', flush=True)\n"
        "try:\n    model.tokenize(text); print('ended')\n"
        "except KeyboardInterrupt:\n    print(time.time(), flush=True)"
    )
    known = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=known) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        time.sleep(0.5)
        sent = time.time()
        process.send_signal(signal.SIGINT)
        assert float(process.stdout.readline()) - sent < 10  # at once; the machine of the tests has other work
        process.kill()
