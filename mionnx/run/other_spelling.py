"""A warning where the answer `"Mary"` was given and the model means `" Mary"`."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError, TokenizerError
from mionnx.machine.caller import caller_level
from mionnx.run.open_model import OpenModel
from mionnx.run.tokenizing import token_id


class OtherSpellingWarning(UserWarning):
    """The model gives more to a token's other spelling, with or without a space."""


def other_spelling(model: OpenModel, text: str) -> tuple[str, int] | None:
    """Find the same word with a space before it, or without.

    Returns:
        its text and id; None if it is no token of its own.
    """
    other = text[1:] if text.startswith(" ") else f" {text}"
    try:
        other_id, token = token_id(model, other), token_id(model, text)
    except (InputError, TokenizerError):
        return None
    return None if other_id == token else (other, other_id)


def has_text(tokens: Any) -> bool:
    """Whether tokens, given once or once for each row, hold a text."""
    return isinstance(tokens, str) or (isinstance(tokens, Sequence) and any(map(has_text, tokens)))


def warn_of_spelling(model: OpenModel, what: str, token: Any, logits: NDArray[Any]) -> None:
    """Warn if the other spelling of a token has the larger logit.

    Args:
        what: the argument, "answer" or "versus".
        logits: [vocab], where the next token is predicted.
    """
    other = other_spelling(model, token) if isinstance(token, str) else None
    if other is not None and logits[other[1]] > logits[token_id(model, token)]:
        warnings.warn(
            f"{what}={token!r} is another token than {other[0]!r}, to which the model gives more here: "
            f"{what}={other[0]!r} may be meant; an id is taken without this question",
            OtherSpellingWarning,
            stacklevel=caller_level(),
        )


def warn_of_spellings(model: OpenModel, arguments: dict[str, Any], logits: NDArray[Any]) -> None:
    """Warn of tokens that are given once for all rows, or once for each.

    Args:
        arguments: argument -> tokens.
        logits: [rows, vocab].
    """
    for what, tokens in arguments.items():
        several = isinstance(tokens, Sequence | np.ndarray) and not isinstance(tokens, str)
        for row, one in enumerate(logits):
            warn_of_spelling(model, what, tokens[row] if several else tokens, one)
