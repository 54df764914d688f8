"""Text to tokens and back, with the offsets of every token in the text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mionnx.errors import InputError, ModelError, TokenizerError
from mionnx.graph.folder_file import check_regular
from mionnx.inputs.text_growth import check_growth
from mionnx.inputs.world_tokenizer import WorldTokenizer, find_vocabulary
from mionnx.machine.brief import Brief, count, spelled
from mionnx.machine.typed import typed

LARGEST = 2**30  # bytes of a tokenizer.json


@dataclass(frozen=True, repr=False)
@typed(InputError)
class Tokens(Brief):
    """A tokenised text.

    Attributes:
        text: the text.
        ids: [seq], int64.
        offsets: per token (start, end) in characters of the text; (0, 0) for tokens that the tokenizer added.
        pieces: per token the tokenizer's own spelling of it.
    """

    text: str
    ids: NDArray[np.int64]
    offsets: list[tuple[int, int]]
    pieces: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def _facts(self) -> Iterator[str]:
        yield from (spelled(self.text), count(len(self), "token"))

    def _lines(self) -> Iterator[str]:
        yield " ".join(f"{piece}({token})" for piece, token in zip(self.pieces, self.ids.tolist(), strict=True))

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
        found = self._covering([(start, start + len(part))])
        if not found:
            raise TokenizerError(f"{part!r} in {where} is covered by no token")
        return found

    def _covering(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """The positions of the tokens that have a character in one of some ranges."""
        return [
            i
            for i, (first, last) in enumerate(self.offsets)
            if any(first < end and last > start for start, end in ranges)
        ]


def load_tokenizer(folder: Path) -> Tokenizer | WorldTokenizer:
    """Load `tokenizer.json` of a model's folder, or the vocabulary of RWKV's World models.

    Raises:
        TokenizerError: there is none, or it is damaged.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        vocabulary = find_vocabulary(folder)
        if vocabulary is None:
            raise TokenizerError(
                f"{folder} has neither a tokenizer.json nor a rwkv_vocab*.txt: give token ids instead of text"
            )
        return WorldTokenizer.from_file(vocabulary)
    try:
        check_regular(path, LARGEST)
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} is damaged: {error}") from error
    check_growth(tokenizer, path)
    return tokenizer


def token_id(tokenizer: Tokenizer | WorldTokenizer, text: str) -> int:
    """The id of a text that is one token, white space around it aside.

    Raises:
        InputError: it is none, or several, or the tokenizer makes another text of it, as of an unknown word.
    """
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) != 1:
        raise InputError(f"{text!r} is {len(ids)} tokens, not one")
    found = tokenizer.decode(ids, skip_special_tokens=False)
    if found.strip() != text.strip():
        raise InputError(f"{text!r} is not in the vocabulary: the tokenizer makes {found!r} of it")
    return int(ids[0])


def tokenize(tokenizer: Tokenizer | WorldTokenizer, text: str, add_special_tokens: bool = True) -> Tokens:
    """Tokenise one text, with the special tokens that the tokenizer adds if asked for.

    Raises:
        TokenizerError: the text has no tokens.
    """
    encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not encoding.ids:
        raise TokenizerError(f"the prompt {text!r} is empty: it has no tokens")
    return Tokens(text, np.array(encoding.ids, np.int64), list(encoding.offsets), list(encoding.tokens))
