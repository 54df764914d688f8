"""Text to tokens and back, with the offsets of every token in the text."""

import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from mionnx.errors import InputError, ModelError, TokenizerError, boundary
from mionnx.graph.folder_file import LARGEST_BESIDE, files_beside, read_json
from mionnx.inputs.world_tokenizer import Encoding as WorldEncoding
from mionnx.inputs.world_tokenizer import WorldTokenizer, find_vocabulary
from mionnx.machine import memory
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.caller import caller_level
from mionnx.machine.typed import typed

TOKENIZER_FILE = "tokenizer.json"
PROBE = "a"  # a text that has tokens
FACTOR = 2**14  # by which all rules of a part of a tokenizer together may multiply a text
ADDED = 2**20  # bytes that they may add to it
SLOW_LENGTH = 2**16  # characters of a text that takes so long that Ctrl-C may come meanwhile: some 0.05 s
TAKEN = 80  # bytes that the library takes for a character, at the least: 84 to 270 with world-llama and SmolLM2
WORDS_NAMED = 5  # unknown words that a warning names
STEP = 0.1  # seconds after which Ctrl-C is heard where waiting for a lock does not hear it, as on Windows


class Decoder(Protocol):
    """A tokenizer, as far as it turns tokens into text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""


@dataclass(frozen=True, repr=False)
@typed(InputError)
class Tokens(Brief):
    """A tokenised text.

    Attributes:
        ids: [seq], int64.
        offsets: per token (start, end) in characters of the text; (0, 0) for tokens that the tokenizer added.
        pieces: per token its text as it is decoded, " capital".
        type_ids: [seq], of a pair of texts: 0 for tokens of the first, 1 for those of the second; None for one text.
            The text is then that of both, a line each.
    """

    text: str
    ids: NDArray[np.int64]
    offsets: list[tuple[int, int]]
    pieces: list[str]
    type_ids: NDArray[np.int64] | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.ids)

    def _facts(self) -> Iterator[str]:
        yield from (spelled(self.text), count(len(self), "token"))

    def _lines(self) -> Iterator[str]:
        yield " ".join(f"{piece!r}({token})" for piece, token in zip(self.pieces, self.ids.tolist(), strict=True))

    def positions_of(self, part: str, occurrence: int | None = None) -> list[int]:
        """The positions of the tokens that make up a part of the text.

        Args:
            part: a substring of the text.
            occurrence: which occurrence, 0-based, negative from the last; needed if there are several.

        Raises:
            TokenizerError: the text does not contain the part, or does so more than once and none was chosen, or no
                token covers it (white space).

        Example:
            model.tokenize("The capital of France is").positions_of("France")  # [3]
        """
        return self._find(part, occurrence, [(0, len(self.text))], repr(self.text))

    def _find(self, part: str, occurrence: int | None, ranges: Sequence[tuple[int, int]], where: str) -> list[int]:
        """The positions of a part that lies in one of some ranges of characters."""
        inside = [i for start, end in ranges for i in range(start, end - len(part) + 1)] if part else []
        starts = [i for i in inside if self.text.startswith(part, i)]
        if not starts:
            raise TokenizerError(f"{part!r} does not occur in {where}")
        if occurrence is None and len(starts) > 1:
            raise TokenizerError(f"{part!r} occurs {len(starts)} times in {where}: choose with occurrence=")
        if occurrence is not None and not -len(starts) <= occurrence < len(starts):
            raise TokenizerError(f"{part!r} occurs {len(starts)} times in {where}, there is no occurrence {occurrence}")
        start = starts[occurrence or 0]
        tokens = self._covering([(start, start + len(part))])
        if not tokens:
            raise TokenizerError(f"{part!r} in {where} is covered by no token")
        return tokens

    def _covering(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """The positions of the tokens that have a character in one of some ranges."""
        return [
            i
            for i, (first, last) in enumerate(self.offsets)
            if any(first < end and last > start for start, end in ranges)
        ]


def load_tokenizer(folder: Path) -> Tokenizer | WorldTokenizer:
    """Load `tokenizer.json` of a model's folder, or the vocabulary of RWKV's World models."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        vocabulary = find_vocabulary(folder)
        if vocabulary is None:
            raise TokenizerError(
                f"{folder} has neither a tokenizer.json nor a rwkv_vocab*.txt: give token ids instead of text"
            )
        return WorldTokenizer.from_file(vocabulary)
    try:
        files_beside(folder, [TOKENIZER_FILE])
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    with boundary(TokenizerError, f"{path} is damaged"):
        tokenizer = Tokenizer.from_file(str(path))
        # A file saved while they were on holds them; transformers switches both off in every call.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        check_growth(tokenizer, path)
        _check_post_processor(tokenizer, path)
    return tokenizer


def check_growth(tokenizer: Tokenizer, path: Path) -> None:
    """Refuse a tokenizer of which a part makes a text longer without bound."""
    # Each `Replace` may make a text longer, and those of a sequence multiply: 28 that make two letters of one make
    # 256 MB of a letter, in a call that nothing interrupts.
    for name in ("normalizer", "decoder", "post_processor"):
        part = getattr(tokenizer, name)
        factor, added = (1, 0) if part is None else _growth(json.loads(part.__getstate__()), 1, 0)
        if factor > FACTOR or added > ADDED:
            raise TokenizerError(
                f"the {name} of {path} makes a text up to {factor:,} times as long, and {added:,} bytes longer: "
                f"refused beyond {FACTOR:,} times and {ADDED:,} bytes"
            )


def _growth(rule: Any, factor: int, added: int) -> tuple[int, int]:
    """The length of a text of n bytes after a rule, factor * n + added, from that before it."""
    if not isinstance(rule, dict):
        return factor, added
    for one in [*rule.get("normalizers", []), *rule.get("decoders", []), *rule.get("processors", [])]:
        factor, added = _growth(one, factor, added)
    kind = rule.get("type")
    if kind == "Replace":
        content, pattern = len(rule["content"].encode()), rule["pattern"]
        matched = len(pattern.get("String", "").encode())
        # what a regular expression matches may be empty, and then it stands before every byte
        more = max(1, -(-content // matched)) if matched else content + 1
        return factor * more, added * more + content
    if kind == "Prepend":
        return factor, added + len(rule["prepend"].encode())
    if kind == "TemplateProcessing":
        texts = sum("Sequence" in piece for piece in rule["single"])
        return factor * max(1, texts), added * max(1, texts)
    return factor, added


def _check_post_processor(tokenizer: Tokenizer, path: Path) -> None:
    """Refuse a post-processor that drops the text: every prompt would be the same tokens."""
    processor, tokenizer.post_processor = tokenizer.post_processor, None
    try:
        bare = tokenizer.encode(PROBE)
    except Exception:  # the library's own class: a vocabulary without this text and a token for unknown ones
        return
    finally:
        tokenizer.post_processor = processor
    encoding = tokenizer.post_process(bare)
    if not {*bare.ids} <= {*encoding.ids}:  # special tokens may be added, none of the text's may go
        raise TokenizerError(
            f"the post_processor of {path} drops the text: of {' '.join(bare.tokens)} it makes "
            f"{' '.join(encoding.tokens) or 'nothing'}"
        )


def copy_tokenizer(file: Path, target: Path) -> None:
    """Copy a `tokenizer.json` without truncation and padding: other clients would obey them."""
    try:
        table = read_json(file, LARGEST_BESIDE)
    except ModelError:
        table = None  # no tokenizer: copied as it is
    settings = {key for key in ("truncation", "padding") if isinstance(table, dict) and table.get(key) is not None}
    if settings:
        target.write_text(json.dumps({**table, **dict.fromkeys(settings)}, ensure_ascii=False), encoding="utf-8")
    else:
        shutil.copyfile(file, target)


def encode(
    tokenizer: Tokenizer | WorldTokenizer, text: str, add_special_tokens: bool = True
) -> Encoding | WorldEncoding:
    """Tokenise one text, which may have no tokens; Ctrl-C is heard meanwhile."""
    # Only what memory does not hold is refused by its letters: rules may drop letters, and an unknown word of any
    # length is one token, so that the length of a text bounds no number of tokens.
    if len(text) > SLOW_LENGTH and (need := TAKEN * len(text)) > (free := memory.available()):
        raise InputError(
            f"a text of {len(text):,} characters needs {memory.format_bytes(need)} or more to be tokenised, and "
            f"{memory.format_bytes(free)} of memory are free: give it in pieces"
        )
    with boundary(TokenizerError, f"the tokenizer fails on the text {spelled(text)}"):
        if len(text) > SLOW_LENGTH and isinstance(tokenizer, Tokenizer):
            return _encode_apart(tokenizer, text, add_special_tokens)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _encode_apart(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> Encoding:
    """Tokenise a text in a thread; the calling one stays in Python, where an exception can reach it."""
    future: Future[Encoding] = Future()

    def work() -> None:
        try:  # `encode` keeps all other threads of Python waiting, and a batch of one text does not
            future.set_result(tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0])
        except BaseException as error:  # Rust's panics too
            future.set_exception(error)

    # a daemon: nothing stops the library, which goes on with the text after Ctrl-C
    Thread(target=work, name="mionnx tokens", daemon=True).start()
    while not future.done():
        wait([future], timeout=STEP)
    return future.result()


def decode(tokenizer: Decoder, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of tokens."""
    with boundary(TokenizerError, f"the tokenizer does not decode the tokens {spelled([*ids])}"):
        # A streamer's own tokenizer may know of no special tokens.
        return tokenizer.decode([*ids]) if skip_special_tokens else tokenizer.decode([*ids], skip_special_tokens=False)


def token_id(tokenizer: Tokenizer | WorldTokenizer, text: str) -> int:
    """The id of a text that is one token, white space around it aside."""
    ids = encode(tokenizer, text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise InputError(f"{text!r} is {len(ids)} tokens, not one")
    text_of_ids = decode(tokenizer, ids, skip_special_tokens=False)
    if text_of_ids.strip() != text.strip():
        raise InputError(f"{text!r} is not in the vocabulary: the tokenizer makes {text_of_ids!r} of it")
    return int(ids[0])


def encode_pair(tokenizer: Tokenizer | WorldTokenizer, first: str, second: str) -> Encoding:
    """Tokenise two texts as one input, with the special tokens between them."""
    if isinstance(tokenizer, WorldTokenizer):
        raise TokenizerError("this tokenizer has no pairs of texts")
    with boundary(TokenizerError, f"the tokenizer fails on the texts {spelled(first)} and {spelled(second)}"):
        return tokenizer.encode(first, second)


def _offsets(encoding: Encoding | WorldEncoding, second: int) -> list[tuple[int, int]]:
    """Offsets of each token in both texts together, of which the second begins at a character."""
    texts = getattr(encoding, "sequence_ids", None)
    if texts is None or not second:
        return list(encoding.offsets)
    places = zip(encoding.offsets, texts, strict=True)
    return [(start + second, end + second) if text == 1 else (start, end) for (start, end), text in places]


def tokenize(
    tokenizer: Tokenizer | WorldTokenizer, text: str, add_special_tokens: bool = True, pair: str | None = None
) -> Tokens:
    """Tokenise a text, or two as one input, with the special tokens that the tokenizer adds or without them."""
    full_text = text if pair is None else f"{text}\n{pair}"
    encoding = encode(tokenizer, text, add_special_tokens) if pair is None else encode_pair(tokenizer, text, pair)
    if not encoding.ids:
        raise TokenizerError(f"the prompt {spelled(text)} is empty: it has no tokens")
    # each distinct token once: long texts repeat theirs
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in {*encoding.ids}}
    pieces = [texts[token] for token in encoding.ids]
    types = None if pair is None else np.array(encoding.type_ids, np.int64)  # type: ignore[union-attr]
    offsets = _offsets(encoding, len(full_text) - len(pair) if pair is not None else 0)
    return Tokens(full_text, np.array(encoding.ids, np.int64), offsets, pieces, type_ids=types)


class UnknownWordWarning(UserWarning):
    """Words outside the vocabulary: the model reads its token for unknown words instead."""


class UnknownWords:
    """Warns of unknown words, the first time that a model is given some."""

    def __init__(self, tokenizer: Tokenizer | WorldTokenizer, model: str) -> None:
        self.token: str | None = None  # where the tokenizer knows every text
        self._id: int | None = None
        if not isinstance(tokenizer, WorldTokenizer) and (token := _unknown_token(tokenizer)) is not None:
            self.token, self._id = token, tokenizer.token_to_id(token)
        self.model = model
        self._warned = False

    def look(self, tokens: Tokens) -> None:
        """Warn of the unknown words of a text; one that the text itself spells `<unk>` is none."""
        if self._warned or self._id is None or self._id not in tokens.ids:
            return
        spans = (span for token, span in zip(tokens.ids.tolist(), tokens.offsets, strict=True) if token == self._id)
        words = [*dict.fromkeys(tokens.text[slice(*span)].strip() for span in spans)]
        words = [word for word in words if word and word != self.token]
        if words:
            self._warned = True
            more = f" and {len(words) - WORDS_NAMED} more" if len(words) > WORDS_NAMED else ""
            warnings.warn(
                f"not in the vocabulary of {self.model}: {', '.join(map(repr, words[:WORDS_NAMED]))}{more}; the model "
                f"reads {self.token} instead (said once for a model)",
                UnknownWordWarning,
                stacklevel=caller_level(),
            )


def _unknown_token(tokenizer: Tokenizer) -> str | None:
    """The token that a tokenizer writes for unknown words."""
    if type(tokenizer.model).__name__ != "Unigram":
        return getattr(tokenizer.model, "unk_token", None)
    model = json.loads(tokenizer.to_str())["model"]  # the library shows it nowhere else
    return None if model.get("unk_id") is None else str(model["vocab"][model["unk_id"]][0])
