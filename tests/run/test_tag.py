"""Words and spans of `tag`, beside transformers' pipeline and the words of the tokenizers library."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TokenClassificationPipeline

from mionnx.inputs.tokens import Tokens
from mionnx.run.encoder_texts import tokens_of
from mionnx.run.spans import _spans, _words

TEXTS = [
    "ann plays unlikely music in rome, paris.",
    "ann lives in 东京 now",  # each an unknown word
    "हिन्दी भाषा",
    "カタカナ und ภาษาไทย",
    "don't (rome) x😀y €5",
    "शक्\u200dति",
]


def parts(tokens: Tokens, prefix: str | None = None) -> list[str]:
    ends = [(tokens.offsets[word[0]][0], tokens.offsets[word[-1]][1]) for word in _words(tokens, prefix)]
    return [tokens.text[start:end].strip() for start, end in ends]


def tokens_by(tokenizer: Tokenizer, text: str) -> Tokens:
    encoding = tokenizer.encode(text)
    return Tokens(text, np.array(encoding.ids), encoding.offsets, encoding.tokens)


@pytest.mark.filterwarnings("ignore:not in the vocabulary")
def test_tags_are_those_of_transformers_pipeline(text_encoder):
    """By the label of the first piece of each word; Chinese characters are words, which were run into one."""
    model, reference = text_encoder("token_classes")
    file = model.hooked.folder / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), unk_token="[UNK]", model_max_length=16)
    pipeline = TokenClassificationPipeline(model=reference, tokenizer=tokenizer, aggregation_strategy="first")
    found = model.tag(TEXTS)
    for row, text in enumerate(TEXTS):
        own = [n for n, of in enumerate(found.rows) if of == row]
        expected = pipeline(text)
        assert [(found.labels[n], found.starts[n], found.ends[n]) for n in own] == [
            (one["entity_group"], one["start"], one["end"]) for one in expected
        ]
        assert np.allclose([found.probabilities[n] for n in own], [one["score"] for one in expected], atol=5e-5)
    (tokens,) = tokens_of(model, [TEXTS[1]])
    assert parts(tokens, "##") == ["ann", "lives", "in", "东", "京", "now"]


@pytest.mark.parametrize("text", TEXTS)
def test_words_of_pieces_are_those_of_the_tokenizers_library(text):
    """Combining marks, joiners and signs stay inside the words that the tokenizer made."""
    letters = sorted({*text} - {" "})
    vocabulary = ["[UNK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoding = tokenizer.encode(text)
    expected = [[n for n, of in enumerate(encoding.word_ids) if of == word] for word in {*encoding.word_ids}]
    assert _words(tokens_by(tokenizer, text), "##") == sorted(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("don't (rome) 12th", ["don", "'", "t", "(", "rome", ")", "12th"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("e\u0301a na\u00efve", ["e\u0301a", "na\u00efve"]),
        ("शक्\u200dति", ["शक्\u200dति"]),
        ("abc东京 서울은", ["abc", "东", "京", "서울은"]),
        ("カタ ภาษ", ["カ", "タ", "ภ", "า", "ษ"]),
        ("ไม่", ["ไ", "ม่"]),
    ],
)
def test_words_of_bytes_are_runs_of_letters_and_single_characters_without_spaces(text, words):
    """Several tokens of one character are one word: each of its bytes was a word of its own."""
    pieces = {piece: n for n, piece in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = tokens_by(tokenizer, text)
    assert len(tokens) == len(text.encode())
    assert parts(tokens) == words


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("O B-PER I-PER E-PER S-PER", "PER a b c|PER d|PER e"),
        ("O B-PER I-PER L-PER U-PER", "PER a b c|PER d|PER e"),
        ("O B-PER M-PER E-PER S-PER", "PER a b c|PER d|PER e"),
        ("O B-PER I-PER L-LOC U-LOC", "PER a b|L-LOC c|U-LOC d e"),  # no marks, but names of their own
    ],
)
def test_the_first_and_last_words_of_spans_are_read_by_their_marks(labels, expected):
    """Of five words, which have the second label to the fourth, and the last one twice."""
    tokens = Tokens("a b c d e", np.arange(5), [(n, n + 1) for n in range(0, 9, 2)], [*"abcde"])
    spans = _spans(0, tokens, np.eye(5)[[1, 2, 3, 4, 4]], labels.split(), 0.0, None)
    assert "|".join(f"{one.label} {one.text}" for one in spans) == expected
