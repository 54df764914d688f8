"""A text while it is generated: printed, or handed to a streamer or a function."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, TokenizerError
from mionnx.inputs.token_rows import read_array
from mionnx.inputs.tokens import Decoder, decode
from mionnx.machine.typed import typed


class Streamer(Protocol):
    """A receiver of generated tokens; transformers' streamers have the same methods."""

    def put(self, value: NDArray[np.int64]) -> None:
        """The prompts' ids [batch, seq] first, then each step's new ids [batch]."""

    def end(self) -> None:
        """No more tokens follow."""


@typed(InputError)
class TextStreamer:
    """Print the continuation of one prompt, token by token.

    Args:
        write: called with each new piece of text; it is printed if left out.

    Example:
        model.generate("The capital of France is", streamer=TextStreamer(model.tokenizer))
    """

    def __init__(self, tokenizer: Decoder, write: Callable[[str], Any] | None = None) -> None:
        if not _has(tokenizer, "decode"):
            raise InputError(f"tokenizer must have decode(ids), as model.tokenizer has, got {type(tokenizer).__name__}")
        self.tokenizer, self.write = tokenizer, write or (lambda text: print(text, end="", flush=True))
        self._ids: list[int] | None = None
        self._written = ""

    def put(self, value: NDArray[np.int64]) -> None:
        """The prompt's ids [1, seq], and then each new token's, [1]."""
        ids = read_array("ids", value)
        if ids.ndim not in (1, 2) or (ids.size and ids.dtype.kind not in "iu"):
            raise InputError(f"a TextStreamer is given ids [1] or [1, seq], got {ids.dtype} {list(ids.shape)}")
        if len(ids) != 1:
            raise InputError(f"a TextStreamer prints one text, but {len(ids)} are generated")
        if self._ids is None:
            self._ids = []  # the prompt is not printed
            return
        self._ids.append(int(ids.flat[0]))
        text = decode(self.tokenizer, self._ids)
        if not text.endswith("\ufffd"):  # else a part of a character, of which the rest may follow
            self._flush(text)

    def end(self) -> None:
        """No more tokens follow: what was held back is written."""
        self._flush(decode(self.tokenizer, self._ids or []))
        self._ids, self._written = None, ""

    def _flush(self, text: str) -> None:
        if len(text) > len(self._written):
            self.write(text[len(self._written) :])
            self._written = text


class TokenCallback(TextStreamer):
    """Call a function with each new token: its id, and the text that it completes; "" within a character."""

    def __init__(self, tokenizer: Decoder, function: Callable[[int, str], Any]) -> None:
        self._pieces: list[str] = []
        super().__init__(tokenizer, self._pieces.append)
        self.function = function
        self._last = 0

    def put(self, value: NDArray[np.int64]) -> None:
        is_prompt = self._ids is None
        super().put(value)
        if not is_prompt:
            self._last = int(value[0])
            self._call()

    def end(self) -> None:
        super().end()  # what never becomes a whole character comes with the last id
        if self._pieces:
            self._call()

    def _call(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        self.function(self._last, text)


def make_streamer(target: Any, tokenizer: Decoder | None, rows: int) -> Streamer | None:
    """The streamer of a generation: an object with `put` and `end`, or made of a function of (text) or (id, text)."""
    if target is None or (not isinstance(target, type) and all(_has(target, name) for name in ("put", "end"))):
        return target
    if isinstance(target, type) or not callable(target) or inspect.iscoroutinefunction(target):
        raise InputError(
            f"streamer={target!r} is neither a streamer, with put(ids) and end(), nor a function of each piece of text "
            "or of (id, text)"
        )
    values = _positional(target)
    if rows != 1:
        raise InputError(f"a function as streamer is told of one text, but {rows} are generated: give put and end")
    if tokenizer is None:
        raise TokenizerError("the model has no tokenizer to make texts of tokens: give a streamer with put and end")
    return TokenCallback(tokenizer, target) if values == 2 else TextStreamer(tokenizer, target)


def _has(receiver: Any, method: str) -> bool:
    return callable(getattr(receiver, method, None))


def _positional(function: Callable[..., Any]) -> int:
    """Number of values that a function needs, 1 or 2; 1 of an unknown signature."""
    try:
        entries = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return 1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [entry for entry in entries if entry.kind in kinds]
    needed = sum(entry.default is entry.empty for entry in places)
    open_ended = any(entry.kind is inspect.Parameter.VAR_POSITIONAL for entry in entries)
    keywords = [one.name for one in entries if one.kind is one.KEYWORD_ONLY and one.default is one.empty]
    if needed > 2 or keywords or not (places or open_ended):
        raise InputError(f"streamer={function!r} must take a piece of text, or a token's id and its text")
    return max(needed, 1)
