"""The tokenizer of a GGUF file as `tokenizer.json`, with what transformers and chat templates read beside it.

Two kinds are known: byte-level BPE (`gpt2`), whose pre-tokenizer the file names, and SentencePiece (`llama`), whose
merges follow from the scores of its pieces. What llama.cpp assumes where a file says nothing is assumed here.

A file names its pre-tokenizer (`tokenizer.ggml.pre`) and holds no rule. Each name stands for regular expressions that
cut one after the other, every match and every gap a piece: those of the tokenizers that the names come from;
llama.cpp's own differ where its engine lacks a class or a flag.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from exporters.gguf.facts import special_ids
from exporters.gguf.header import Header
from mionnx.errors import MIError, boundary, nearest
from mionnx.graph.hooked_model import INPUT_NAMES

KEYS_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # llama.cpp's kinds; the last three match a text as they are
SPACE = "\u2581"  # SentencePiece's
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
BY_PLACE = ("gemma", "gemma2", "gemma3")  # scores that do not order the merges; the vocabulary itself is in order
_ALPHABET = bytes_to_unicode()  # GPT-2's: a character for each byte
_SPELLED = frozenset(_ALPHABET.values())
_NO_STRIP = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's tokens those that take no white space after them along

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_REST_OF_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Cut:
    """A pre-tokenizer."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a piece that is in the vocabulary is one token, whatever its merges give
    begins: bool = False  # a text begins with the BOS token where the file does not say

    def build(self) -> PreTokenizer:
        """The `tokenizers` pre-tokenizer, bytes spelled in GPT-2's alphabet."""
        cuts = [Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return PreTokenizers([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


GPT2 = Cut((_WORDS,))
DIGITS = Cut((r"\p{N}", _WORDS))
LLAMA3 = Cut((rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, begins=True)
QWEN2 = Cut((rf"{_SHORT}|{_WORD}|\p{{N}}|{_REST}",))
_MARKED = QWEN2.patterns[0].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
QWEN35 = Cut((_MARKED,))
TEKKEN = Cut((rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST_OF_CASED}",), whole_words=True, begins=True)
GPT4O = Cut((rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_REST_OF_CASED}",))
DEFAULT = Cut((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))

CUTS: dict[str, Cut] = {
    "default": DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "a.x-4.0", "exaone4"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Cut(LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), QWEN2),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "falcon": Cut((r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, "[0-9][0-9][0-9]")),
}


class _NoTokenizerError(MIError):
    """The reason why a tokenizer cannot be built."""


def write_tokenizer(header: Header, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, or warn of a kind that is unknown."""
    facts = {
        key.removeprefix(KEYS_PREFIX): value for key, value in header.metadata.items() if key.startswith(KEYS_PREFIX)
    }
    facts |= {key: header.metadata.get(f"general.{key}", "") for key in ("architecture", "name")}
    facts["special"] = special_ids(header)
    try:
        tokenizer, ends = _build(facts)
    except _NoTokenizerError as error:
        warnings.warn(f"{header.file}: no tokenizer, give token ids instead of text: {error}", stacklevel=2)
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config["model_input_names"] = [*INPUT_NAMES]  # the class's own are those of BERT
    config |= {f"{name}_token": text for name in NAMES if (text := _special(facts, name)) is not None}
    config |= {f"add_{name}_token": added for name, added in ends.items()}
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")


def _build(facts: dict[str, Any]) -> tuple[Tokenizer, dict[str, bool]]:
    """The tokenizer, and whether a text begins with BOS and ends with EOS."""
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    kind, tokens = facts.get("model"), facts.get("tokens")
    if not isinstance(kind, str) or kind not in builders:
        raise _NoTokenizerError(f"its vocabulary is of the kind {kind!r}; known are {', '.join(builders)}")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise _NoTokenizerError("its metadata hold no list of tokens")
    with boundary(_NoTokenizerError, "its metadata are damaged"):
        for key in ("token_type", "scores"):
            if key in facts and len(facts[key]) != len(tokens):
                raise _NoTokenizerError(f"it has {len(tokens)} tokens and {len(facts[key])} {key}")
        tokenizer, begins = builders[kind](facts)
        _add_tokens(tokenizer, tokens, facts)
        ends = {"bos": bool(facts.get("add_bos_token", begins)), "eos": bool(facts.get("add_eos_token", False))}
        _add_ends(tokenizer, facts, ends)
    return tokenizer, ends


def _byte_level(facts: dict[str, Any]) -> tuple[Tokenizer, bool]:
    cut = _cut(facts.get("pre"))
    tokens = facts["tokens"]
    kinds = facts.get("token_type", [NORMAL] * len(tokens))
    vocabulary = {
        # tokens that match a text as they are stand outside of the alphabet of bytes
        _bytes_spelled(token) if kind == NORMAL else token: index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, _pairs(facts["merges"]), ignore_merges=cut.whole_words))
    tokenizer.pre_tokenizer = cut.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.begins and "bos" in facts["special"]


def _cut(name: str | None) -> Cut:
    if name is None:
        warnings.warn("the file names no pre-tokenizer: llama.cpp's default is taken, as it does", stacklevel=2)
        return CUTS["default"]
    if name not in CUTS:
        raise _NoTokenizerError(f"its pre-tokenizer {name!r} is none of {', '.join(sorted(CUTS))}{nearest(name, CUTS)}")
    return CUTS[name]


def _bytes_spelled(token: str) -> str:
    """A token of a byte-level vocabulary in its alphabet, where it is not in it already."""
    return token if _SPELLED.issuperset(token) else "".join(_ALPHABET[byte] for byte in token.encode())


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    cuts = ((merge, merge.index(" ", 1)) for merge in merges)  # from 1 on: the left piece may itself begin with a space
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]


def _sentence_piece(facts: dict[str, Any]) -> tuple[Tokenizer, bool]:
    by_place = facts["architecture"] in BY_PLACE
    tokens = [_spaces_spelled(token) if by_place else token for token in facts["tokens"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranks = range(len(tokens), 0, -1) if by_place else facts["scores"]
    merges = _pairs(facts["merges"]) if "merges" in facts else _merges(vocabulary, ranks)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=_special(facts, "unk"), fuse_unk=True, byte_fallback=True)
    )
    prefixed = bool(facts.get("add_space_prefix", True))
    spaces = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    ends = [decoders.Strip(" ", 1, 0)] if prefixed else []  # the space that the normalizer has put ahead
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer, True


def _spaces_spelled(token: str) -> str:
    """A token of spaces, which Gemma's files hold as spaces, in SentencePiece's spelling."""
    return token.replace(" ", SPACE) if token and not token.strip(" ") else token


def _merges(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges by SentencePiece's scores: the best piece first, by its longest left part."""
    ranked = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-float(scores[index]), -cut, cut - len(token), index, left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], facts: dict[str, Any]) -> None:
    """Make tokens of control and of the user ones that are found in a text as they are."""
    kinds, spelled = facts.get("token_type", ()), tokenizer.get_vocab(with_added_tokens=False)
    strips = any(name in str(facts["name"]).lower() for name in ("phi-3", "phi3"))
    added: dict[bool, list[AddedToken]] = {True: [], False: []}
    for token, kind in zip(tokens, kinds, strict=False):
        # Gemma's runs of spaces stand in the vocabulary as SentencePiece spells them, and merges make them of a text.
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token in spelled:
            special = kind != USER_DEFINED
            rstrip = strips and token not in _NO_STRIP
            added[special].append(AddedToken(token, normalized=False, special=special, rstrip=rstrip))
    tokenizer.add_special_tokens(added[True])
    tokenizer.add_tokens(added[False])


def _special(facts: dict[str, Any], name: str) -> str | None:
    number = facts["special"].get(NAMES[name])
    return None if number is None else facts["tokens"][number]


def _add_ends(tokenizer: Tokenizer, facts: dict[str, Any], ends: dict[str, bool]) -> None:
    """Let texts begin with BOS and end with EOS, as far as the file wants it."""
    texts = {name: _special(facts, name) for name, added in ends.items() if added}
    absent = [name.upper() for name, text in texts.items() if text is None]
    if absent:
        raise _NoTokenizerError(f"texts take a token {absent[0]}, and the file names none")
    if texts:
        single = [*([texts["bos"]] if "bos" in texts else []), "$A", *([texts["eos"]] if "eos" in texts else [])]
        numbers = [(text, facts["special"][NAMES[name]]) for name, text in texts.items()]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)
