"""Verbs of a model that turn texts into tokens; a warning of `"Mary"` where the model means `" Mary"`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tokenizers import Encoding

from mionnx.errors import InputError, TokenizerError, nearest
from mionnx.inputs import chat_tokens, tokens
from mionnx.inputs.chat_template import Message, load_chat_template
from mionnx.inputs.token_rows import IDS, TYPES
from mionnx.machine.caller import caller_level
from mionnx.machine.typed import typed
from mionnx.run.open_model import OpenModel

One = tokens.Tokens | Encoding | Mapping[Any, Any]
Prompt = str | Sequence[str] | One | Sequence[One] | ArrayLike
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@typed()
def tokenize(model: OpenModel, text: str, pair: str | None = None) -> tokens.Tokens:
    """Tokenise a text: ids, offsets, and `positions_of` for a substring's tokens.

    Words that become `<unk>` are warned about once for a model (`UnknownWordWarning`).

    Args:
        pair: a second text, of an encoder that reads two: a question's context, a query's document.

    Example:
        model.tokenize("The capital of France is").positions_of("France")  # [3]
    """
    encoded = tokens.tokenize(model.tokenizer, text, pair=pair)
    if not model.hooked.has_token_types:  # as transformers leaves them out for such a family
        encoded = replace(encoded, type_ids=None)
    model.unknown_words.look(encoded)
    return encoded


@typed()
def tokenize_chat(
    model: OpenModel,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    variables: Message | None = None,
) -> chat_tokens.ChatTokens:
    """Tokenise a chat with the model's own template; `positions_of` by message and role.

    The ids [seq] are those of transformers' `apply_chat_template`. The template comes with the checkpoint and is not
    trusted: it runs in a process of its own, in jinja2's sandbox, with bounded time and memory.

    Args:
        messages: {"role": "user", "content": TEXT} each; other keys are given to the template as they are.
        add_generation_prompt: end with the beginning of the assistant's next message; if left out, where the last
            message is not the assistant's.
        continue_final_message: end inside the last message, to have the model go on with it.
        chat_template: jinja2 in place of the model's own template.
        variables: what else the template reads, {"enable_thinking": False} for one.

    Raises:
        InputError: messages without a role, or options that exclude one another.
        TokenizerError: no template, or one that refuses the messages, fails, or takes too long.

    Example:
        chat = model.tokenize_chat([{"role": "user", "content": "What is the capital of France?"}])
        chat.positions_of("France", message=0), model.generate(chat).new_texts
    """
    template = model.chat_template if chat_template is None else load_chat_template(model.hooked.folder, chat_template)
    encoded = chat_tokens.tokenize_chat(
        model.tokenizer, template, messages, add_generation_prompt, continue_final_message, variables or {}
    )
    model.unknown_words.look(encoded)
    return encoded


@typed()
def token_id(model: OpenModel, text: str) -> int:
    """The id of a text that is one token.

    Raises:
        InputError: it is none, or several, or the tokenizer makes another text of it, as of an unknown word.
    """
    return tokens.token_id(model.tokenizer, text)


def ids(model: OpenModel, prompt: Prompt) -> Any:
    """Tokenise the texts of a prompt; what holds no text is left as it is."""
    if isinstance(prompt, str):
        return tokenize(model, prompt)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(entry, str) for entry in prompt):
        return [tokenize(model, str(text)) for text in prompt]
    if isinstance(prompt, list) and prompt and all(map(is_pair, prompt)):
        return [tokenize(model, *pair) for pair in prompt]
    return prompt


def is_pair(entry: Any) -> bool:
    """Whether an entry of a list of prompts is two texts that are read together."""
    return isinstance(entry, tuple) and len(entry) == 2 and all(isinstance(text, str) for text in entry)


@typed()
def check_token(model: OpenModel, token: int) -> int:
    """Check a token's id."""
    size = model.hooked.metadata.sizes.vocab_size
    if not 0 <= token < size:
        raise InputError(f"token {token}; the vocabulary is 0 to {size - 1}")
    return int(token)


def answer_id(model: OpenModel, answer: str) -> int:
    """The column of an answer in the main output: of a label by its name, else of a token."""
    labels = model.hooked.metadata.labels
    if not labels:
        return token_id(model, answer)
    if answer not in labels:
        raise InputError(f"no label {answer!r}; there are {', '.join(labels)}{nearest(answer, labels)}")
    return labels.index(answer)


def check_answer(model: OpenModel, column: int) -> int:
    """Check the number of an answer: of a label, or of a token."""
    labels = model.hooked.metadata.labels
    if labels and not 0 <= column < len(labels):
        raise InputError(f"label {column}; there are 0 to {len(labels) - 1}: {', '.join(labels)}")
    return int(column) if labels else check_token(model, column)


def takes_encoding(verb: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a verb take its prompt as `verb(model, **encoding)` too: `input_ids`, and `token_type_ids` of zeros."""

    @wraps(verb)
    def call(*arguments: Any, **named: Any) -> Result:
        encoding = {key: named.pop(key) for key in (IDS, TYPES) if key in named}
        if not any(value is not None for value in encoding.values()):
            return verb(*arguments, **named)
        if len(arguments) > 1 or first in named:
            raise InputError(f"{verb.__name__} got both {first} and {', '.join(encoding)}: give the prompt once")
        return of_prompt(*arguments, encoding, **named)

    of_prompt: Callable[..., Result] = verb
    declared = signature(verb)
    _, first, *_ = declared.parameters
    extra = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation="ArrayLike | None") for name in (IDS, TYPES)
    ]
    vars(call)["__signature__"] = declared.replace(parameters=[*declared.parameters.values(), *extra])
    return call


class OtherSpellingWarning(UserWarning):
    """The model gives more to a token's other spelling, with or without a space."""


def other_spelling(model: OpenModel, text: str) -> tuple[str, int] | None:
    """The same word with a space before it, or without, and its id; None if it is no token of its own."""
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
    """Warn if the other spelling of a token, the argument `what`, has the larger of the logits [vocab]."""
    if model.hooked.metadata.labels:  # names, which have one spelling
        return
    other = other_spelling(model, token) if isinstance(token, str) else None
    if other is not None and logits[other[1]] > logits[token_id(model, token)]:
        warnings.warn(
            f"{what}={token!r} is another token than {other[0]!r}, to which the model gives more here: "
            f"{what}={other[0]!r} may be meant; an id is taken without this question",
            OtherSpellingWarning,
            stacklevel=caller_level(),
        )


def warn_of_spellings(model: OpenModel, arguments: dict[str, Any], logits: NDArray[Any]) -> None:
    """Warn of arguments whose tokens are given once for all rows of the logits [rows, vocab], or once for each."""
    for what, entries in arguments.items():
        several = isinstance(entries, Sequence | np.ndarray) and not isinstance(entries, str)
        for row, one in enumerate(logits):
            warn_of_spelling(model, what, entries[row] if several else entries, one)
