"""Streamers: each token as it comes, and only whole characters."""

import numpy as np
import pytest
from families import VOCAB

from mionnx import InputError, MIModel, TextStreamer, TokenizerError
from mionnx.inputs.world_tokenizer import WorldTokenizer
from mionnx.run.decoding import Passes
from mionnx.run.streamer import make_streamer


def prompts(rows: int, seq: int = 7, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask; of several rows the first ones are padded on the left."""
    ids = np.random.default_rng(seed).integers(3, VOCAB, (rows, seq))
    mask = np.ones_like(ids)
    for row in range(rows - 1):
        mask[row, : 3 - row] = 0
    return ids, mask


def lists(rows: list[np.ndarray]) -> list[list[int]]:
    return [row.tolist() for row in rows]


class Recorder:
    def __init__(self) -> None:
        self.puts: list[list] = []
        self.ended = False

    def put(self, value: np.ndarray) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_is_told_of_every_token(models):
    model, (ids, _) = models("gpt2"), prompts(2)
    streamer = Recorder()
    found = model.generate(ids, max_new_tokens=5, eos_token_id=[], streamer=streamer)
    assert streamer.puts[0] == ids.tolist()
    assert np.array(streamer.puts[1:]).T.tolist() == lists(found.new_ids)
    assert streamer.ended


@pytest.fixture(scope="module")
def world() -> MIModel:
    from repository import REPOSITORY

    return MIModel.from_pretrained(REPOSITORY / "models" / "world-llama")


@pytest.fixture(scope="module")
def world_rwkv() -> MIModel:
    from repository import REPOSITORY

    return MIModel.from_pretrained(REPOSITORY / "models" / "world-rwkv7")


def test_the_streamer_prints_what_is_returned(world, world_rwkv):
    for model in (world, world_rwkv):
        pieces: list[str] = []
        found = model.generate(
            "The capital of France is", max_new_tokens=6, streamer=TextStreamer(model.tokenizer, pieces.append)
        )
        assert "".join(pieces) == found.new_texts[0]
        assert len(pieces) > 1


def test_a_streamer_holds_back_parts_of_a_character(tmp_path):
    """A character of several byte tokens is written once it is whole; what never becomes whole, at the end."""
    vocabulary = tmp_path / "rwkv_vocab_bytes.txt"
    vocabulary.write_text("".join(f"{byte + 1} {bytes([byte])!r} 1\n" for byte in range(256)))
    tokenizer = WorldTokenizer.from_file(vocabulary)
    ids = tokenizer.encode("a é東").ids
    assert len(ids) == 7
    pieces: list[str] = []
    streamer = TextStreamer(tokenizer, pieces.append)
    for token in [1, *ids]:
        streamer.put(np.array([token]))
    streamer.end()
    assert pieces == ["a", " ", "é", "東"]
    for token in [1, *ids[:3]]:
        streamer.put(np.array([token]))
    streamer.end()
    assert pieces[4:] == ["a", " ", "\ufffd"]


def test_a_function_is_told_of_each_piece_of_text(world):
    pieces: list[str] = []
    tokens: list[tuple[int, str]] = []
    prompt = "The capital of France is"
    found = world.generate(prompt, max_new_tokens=6, streamer=pieces.append)
    assert "".join(pieces) == found.new_texts[0]
    assert len(pieces) > 1
    world.generate(prompt, max_new_tokens=6, streamer=lambda token, text: tokens.append((token, text)))
    assert [token for token, _ in tokens] == found.new_ids[0].tolist()
    assert "".join(text for _, text in tokens) == found.new_texts[0]
    assert all(isinstance(token, int) for token, _ in tokens)


def test_print_is_a_streamer(world, capsys):
    world.generate("The capital of France is", max_new_tokens=2, streamer=print)
    assert capsys.readouterr().out == "Paris\n .\n"


def test_a_function_of_ids_gets_whole_characters(tmp_path):
    vocabulary = tmp_path / "rwkv_vocab_bytes.txt"
    vocabulary.write_text("".join(f"{byte + 1} {bytes([byte])!r} 1\n" for byte in range(256)))
    tokenizer = WorldTokenizer.from_file(vocabulary)
    ids, told = tokenizer.encode("é東").ids[:4], []
    streamer = make_streamer(lambda token, text: told.append((token, text)), tokenizer, 1)
    for token in [1, *ids]:
        streamer.put(np.array([token]))
    streamer.end()
    assert told == [(ids[0], ""), (ids[1], "é"), (ids[2], ""), (ids[3], ""), (ids[3], "\ufffd")]


async def later(text: str) -> None: ...


WRONG = {
    "a number": 3,
    "a class": TextStreamer,
    "put alone": type("Half", (), {"put": print})(),
    "a coroutine": later,
    "of three": lambda one, two, three: None,
    "of none": lambda: None,
    "by keyword": lambda *, text: None,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_streamer_is_refused_before_anything_runs(world, wrong, monkeypatch):
    monkeypatch.setattr(Passes, "_pass", lambda self: pytest.fail("the prompt ran"))
    with pytest.raises(InputError, match="streamer="):
        world.generate("The capital of France is", streamer=WRONG[wrong])
    with pytest.raises(InputError, match="one text, but 2"):
        world.generate(["The capital of France is"] * 2, streamer=print)


def test_a_function_needs_a_tokenizer(models):
    with pytest.raises(TokenizerError, match="no tokenizer"):
        models("llama").generate([3, 4], streamer=print)
