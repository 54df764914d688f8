"""Verbs of a model that turn texts into tokens."""

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import ArrayLike
from tokenizers import Tokenizer

from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs import tokens
from mionnx.inputs.world_tokenizer import WorldTokenizer

Prompt = str | Sequence[str] | tokens.Tokens | Sequence[tokens.Tokens] | ArrayLike


class Tokenizing(Protocol):
    """A model with a tokenizer: what the verbs here need of `Runner`."""

    hooked: HookedModel

    @property
    def tokenizer(self) -> Tokenizer | WorldTokenizer:
        """The tokenizer of the model's folder."""

    def tokenize(self, text: str) -> tokens.Tokens:
        """Tokenise a text."""


def tokenizer(model: Tokenizing) -> Tokenizer | WorldTokenizer:
    """The tokenizer: a `tokenizers.Tokenizer`, or a `WorldTokenizer` for an RWKV World model.

    Raises:
        TokenizerError: the model has none.
    """
    return tokens.load_tokenizer(model.hooked.folder)


def tokenize(model: Tokenizing, text: str) -> tokens.Tokens:
    """Tokenise a text: ids, offsets, and `positions_of` for a substring's tokens.

    Example:
        model.tokenize("The capital of France is").positions_of("France")  # [3]
    """
    return tokens.tokenize(model.tokenizer, text)


def token_id(model: Tokenizing, text: str) -> int:
    """The id of a text that is one token.

    Raises:
        InputError: it is none, or several, or the tokenizer makes another text of it, as of an unknown word.
    """
    return tokens.token_id(model.tokenizer, text)


def ids(model: Tokenizing, prompt: Prompt) -> Any:
    """Tokenise the texts of a prompt; what holds no text is left as it is."""
    if isinstance(prompt, str):
        return model.tokenize(prompt)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(entry, str) for entry in prompt):
        return [model.tokenize(str(text)) for text in prompt]
    return prompt


def known(model: Tokenizing, token: int) -> int:
    """Check a token's id.

    Raises:
        InputError: the id is outside the vocabulary.
    """
    size = model.hooked.metadata.sizes.vocab_size
    if not 0 <= token < size:
        raise InputError(f"token {token}; the vocabulary is 0 to {size - 1}")
    return int(token)
