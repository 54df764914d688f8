"""Arguments of verbs: prompts as ids, tokens by id or text, classes of tokens, vectors of the residual stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError, nearest
from mionnx.inputs.prompt_list import read_prompts, real_ids, real_types
from mionnx.inputs.token_batch import make_token_batch
from mionnx.inputs.token_rows import entries_of
from mionnx.inputs.tokens import decode
from mionnx.machine.arrays import to_array
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt

Ids = NDArray[np.int64]
Classify = Callable[[Ids], Any]
By = str | Classify | None
CLASSES = ("position", "token")  # classes of tokens


@dataclass(frozen=True)
class PromptText:
    """One tokenised prompt."""

    ids: Ids
    tokens: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, position: int) -> int:
        """A position counted from the start."""
        if not isinstance(position, int | np.integer) or not -len(self) <= position < len(self):
            raise InputError(f"position {position!r} of a text of {len(self)} tokens (0 to {len(self) - 1})")
        return int(position) % len(self)


def prompt_ids(model: Runner, prompts: Prompt) -> list[Ids]:
    """Tokenise prompts: [seq] each, without padding."""
    rows = typed_prompts(model, prompts)
    if any(types is not None for _, types in rows):
        raise InputError(
            "this reads single texts, and a pair of texts was given: forward, classify and sweeps take pairs"
        )
    return [ids for ids, _ in rows]


def typed_prompts(model: Runner, prompts: Prompt) -> list[tuple[Ids, Ids | None]]:
    """Tokenise prompts: ids and token types [seq] of each, without padding; no types of a single text."""
    batch = make_token_batch(model.ids(prompts), None, None, model.hooked)
    ids = real_ids(batch)
    types = real_types(batch) or [None] * len(ids)
    return [(own, None if kinds is None or not kinds.any() else kinds) for own, kinds in zip(ids, types, strict=True)]


def one_prompt(model: Runner, prompt: Prompt) -> Ids:
    """Tokenise a single prompt: [seq]."""
    rows = prompt_ids(model, prompt)
    if len(rows) != 1:
        raise InputError(
            f"one prompt is read at a time, and {len(rows)} were given: call once for each, or use a verb that has "
            "batch_size=, which takes a list"
        )
    return rows[0]


def one_text(model: Runner, prompt: Prompt) -> PromptText:
    """Tokenise a single prompt, with the text of each token."""
    ids = one_prompt(model, prompt)
    return PromptText(ids, [token_text(model, token) for token in ids.tolist()])


def texts_of(model: Runner, prompts: Prompt) -> list[PromptText]:
    """Tokenise a list of prompts, with the text of each token; one prompt is a list of one."""
    words: dict[int, str] = {}
    texts = []
    for ids in read_prompts(model.ids(prompts), None, None, model.hooked).ids:
        words |= {token: token_text(model, token) for token in {*ids.tolist()} - words.keys()}
        texts.append(PromptText(ids, [words[token] for token in ids.tolist()]))
    return texts


def is_list(model: Runner, prompts: Prompt) -> bool:
    """Whether prompts are a list, or several rows of an array, rather than a single one."""
    ids = model.ids(prompts)
    if entries_of(ids) is not None:
        return True
    return np.ndim(ids) > 1 and len(ids) > 1 if hasattr(ids, "shape") else len(texts_of(model, prompts)) > 1


def each_of(value: Any, rows: int, what: str) -> list[Any]:
    """Something that is given once for all prompts of a list, or once for each, as a list."""
    if isinstance(value, str | bytes) or not (isinstance(value, Sequence) or getattr(value, "ndim", None)):
        return [value] * rows
    if len(value) != rows:
        raise InputError(f"{what}= has {len(value)} tokens for {rows} prompts: give one for all, or one for each")
    return [*value]


def token_text(model: Runner, token: int) -> str:
    """The text of a token; its number where the model has no tokenizer."""
    return decode(model.tokenizer, [token], skip_special_tokens=False) if model.has_tokenizer else str(token)


def prompt_text(model: Runner, ids: Ids) -> str:
    """A prompt as a text; its ids where the model has no tokenizer."""
    return decode(model.tokenizer, ids.tolist()) if model.has_tokenizer else " ".join(map(str, ids.tolist()))


def token_of(model: Runner, token: int | str) -> int:
    """The id of a token given by its id or by its text."""
    if isinstance(token, str):
        return model.token_id(token)
    number = to_array(token)[()] if getattr(token, "ndim", None) == 0 else token  # of an array or a tensor
    if not isinstance(number, int | np.integer) or isinstance(number, bool):
        raise InputError(f"a token is its id or its text, got {token!r}")
    return model.check_token(int(number))


def is_stream(value: Any) -> bool:
    """Whether an argument holds vectors of the residual stream, rather than a prompt."""
    try:
        return to_array(value).dtype.kind not in "iubOUST"
    except ValueError:  # rows of unequal length
        return False


def streams_of(value: ArrayLike, hidden: int, what: str = "residual") -> NDArray[Any]:
    """Check vectors of the residual stream, [..., hidden]."""
    try:
        vectors = to_array(value)
    except ValueError as error:
        raise InputError(f"{what} must be numbers [..., hidden={hidden}]: {error}") from error
    if vectors.dtype.kind in "iu":
        vectors = vectors.astype(np.float32)
    if vectors.dtype.kind in "bOUSTc" or vectors.shape[-1:] != (hidden,) or 0 in vectors.shape:
        raise InputError(f"{what} is {vectors.dtype} {list(vectors.shape)}, it must be numbers [..., hidden={hidden}]")
    if not np.isfinite(vectors.astype(np.float32)).all():
        raise InputError(f"{what} has NaN or infinities")
    return vectors


def check_by(by: Any) -> None:
    """Refuse what names no classes."""
    if by is not None and not callable(by) and not (isinstance(by, str) and by in CLASSES):
        raise InputError(f"by={by!r}: 'position', 'token', or a function of the ids [seq]{nearest(str(by), CLASSES)}")


def classes_of(by: By, ids: NDArray[Any], positions: NDArray[Any] | None = None) -> Ids:
    """The class of each token of one text, int64 [seq]; positions [seq] are counted from 0 if left out."""
    if by is None:
        return np.zeros(len(ids), np.int64)
    if by == "token":
        return np.asarray(ids).astype(np.int64)
    if by == "position":
        return np.arange(len(ids)) if positions is None else np.asarray(positions).astype(np.int64)
    if not callable(by):
        check_by(by)
    classes = np.asarray(by(np.asarray(ids)))  # type: ignore[operator]
    if classes.shape != np.shape(ids) or classes.dtype.kind not in "iub":
        raise InputError(
            f"by= gave {classes.dtype} {list(classes.shape)}; it gives integers [{len(ids)}], a class a token"
        )
    return classes.astype(np.int64)
