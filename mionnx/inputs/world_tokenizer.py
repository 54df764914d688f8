"""The tokenizer of RWKV's World models: greedy longest match over a vocabulary of byte strings.

The `tokenizers` library has no model that does this: its WordPiece takes the longest piece of a word, but looks for it
from the end of the whole text backwards, which takes the cube of the text's length where words have no bounds.

The vocabulary file has one token a line: its id, the token as a Python string or bytes literal, and its length in
bytes, separated by spaces. Token 0 is the end of a text and has no bytes.
"""

import ast
from dataclasses import dataclass, field
from pathlib import Path

from mionnx.errors import ModelError, TokenizerError
from mionnx.graph.folder_file import files_beside

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Encoding:
    """A tokenised text; the names are those of the `tokenizers` library."""

    ids: list[int]
    # Per token (start, end) in characters; a token of a part of a character covers that character.
    offsets: list[tuple[int, int]]
    tokens: list[str]  # each as text, bytes that are no text by themselves as \x escapes


@dataclass
class _Node:
    """A node of the trie: the token that ends here, and the node after each next byte."""

    token: int | None = None
    next: dict[int, "_Node"] = field(default_factory=dict)


class WorldTokenizer:
    """Greedy longest match over bytes, with the methods of `tokenizers.Tokenizer`."""

    def __init__(self, vocabulary: dict[int, bytes]) -> None:
        self._bytes = vocabulary
        self._root = _Node()
        for token, text in vocabulary.items():
            node = self._root
            for byte in text:
                node = node.next.setdefault(byte, _Node())
            node.token = token

    @classmethod
    def from_file(cls, path: Path) -> "WorldTokenizer":
        """Read a vocabulary file."""
        try:
            with path.open(encoding="utf-8") as file:
                return cls(dict(_entry(line, number, path) for number, line in enumerate(file, 1) if line.strip("\n")))
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read the vocabulary {path}: {error}") from error

    def get_vocab_size(self) -> int:
        """Number of tokens, the end of text included."""
        return max(self._bytes, default=0) + 1  # ids need not be without gaps

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Tokenise a text; `add_special_tokens` is there because the library has it, and adds none."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text is no valid Unicode: {error}") from error
        # byte -> the character that it is a part of
        characters = [i for i, character in enumerate(text) for _ in range(len(character.encode()))]
        ids, offsets, start = [], [], 0
        while start < len(data):
            token, end = self._longest(data, start)
            ids.append(token)
            offsets.append((characters[start], characters[end - 1] + 1))
            start = end
        return Encoding(ids, offsets, [self.id_to_token(token) for token in ids])

    def _longest(self, data: bytes, start: int) -> tuple[int, int]:
        node, longest = self._root, None
        for end in range(start, len(data)):
            if data[end] not in node.next:
                break
            node = node.next[data[end]]
            if node.token is not None:
                longest = node.token, end + 1
        if longest is None:
            raise TokenizerError(f"the vocabulary has no token for the byte {data[start]:#04x} at byte {start}")
        return longest

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8, as half a character, become U+FFFD."""
        parts = [b"" if token == 0 and skip_special_tokens else self._of(token) for token in ids]
        return b"".join(parts).decode(errors="replace")

    def id_to_token(self, token: int) -> str:
        """One token as text."""
        return self._of(token).decode(errors="backslashreplace")

    def _of(self, token: int) -> bytes:
        if token == 0:
            return END_OF_TEXT.encode()
        if token not in self._bytes:
            raise TokenizerError(f"token {token} is not in the vocabulary (0 to {self.get_vocab_size() - 1})")
        return self._bytes[token]


def _entry(line: str, number: int, path: Path) -> tuple[int, bytes]:
    try:
        token, rest = line.rstrip("\n").split(" ", 1)
        # split from both ends: the literal may have spaces
        literal, length = rest.rsplit(" ", 1)
        value = ast.literal_eval(literal)  # a literal, never code
        data = value.encode() if isinstance(value, str) else value
        if not isinstance(data, bytes) or not data or len(data) != int(length) or int(token) <= 0:
            raise ValueError("id, token and length do not go together")
        return int(token), data
    except (ValueError, SyntaxError, AttributeError) as error:
        raise TokenizerError(f"{path}, line {number}: no entry of a World vocabulary: {error}") from error


def find_vocabulary(folder: Path) -> Path | None:
    """The World vocabulary in a model's folder: `rwkv_vocab*.txt`, or a `vocab.txt` that is one."""
    try:
        files = files_beside(folder, ["rwkv_vocab*.txt", "vocab.txt"])
    except ModelError as error:
        raise TokenizerError(str(error)) from error
    return next((path for path in files if _is_vocabulary(path)), None)


def _is_vocabulary(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            _entry(file.readline(), 1, path)
    except (OSError, UnicodeDecodeError, TokenizerError):
        return False
    return True
