"""Printing a text while it is generated."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError


class Decoder(Protocol):
    """A tokenizer, as far as it turns tokens into text."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""


class Streamer(Protocol):
    """A receiver of generated tokens; transformers' streamers have the same methods."""

    def put(self, value: NDArray[np.int64]) -> None:
        """The prompts' ids [batch, seq] first, then each step's new ids [batch]."""

    def end(self) -> None:
        """No more tokens follow."""


class TextStreamer:
    """Print the continuation of one prompt, token by token.

    Args:
        tokenizer: of the model.
        write: called with each new piece of text; it is printed if left out.

    Example:
        model.generate("The capital of France is", streamer=TextStreamer(model.tokenizer))
    """

    def __init__(self, tokenizer: Decoder, write: Callable[[str], Any] | None = None) -> None:
        self.tokenizer, self.write = tokenizer, write or (lambda text: print(text, end="", flush=True))
        self._ids: list[int] | None = None
        self._written = ""

    def put(self, value: NDArray[np.int64]) -> None:
        """The prompt's ids [1, seq], and then each new token's, [1].

        Raises:
            InputError: several rows, which cannot be printed at once.
        """
        if len(value) != 1:
            raise InputError(f"a TextStreamer prints one text, but {len(value)} are generated")
        if self._ids is None:
            self._ids = []  # the prompt is not printed
            return
        self._ids.append(int(value[0]))
        text = self.tokenizer.decode(self._ids)
        if not text.endswith("\ufffd"):  # else a part of a character, of which the rest may follow
            self._flush(text)

    def end(self) -> None:
        """No more tokens follow: what was held back is written."""
        self._flush(self.tokenizer.decode(self._ids or []))
        self._ids, self._written = None, ""

    def _flush(self, text: str) -> None:
        if len(text) > len(self._written):
            self.write(text[len(self._written) :])
            self._written = text
