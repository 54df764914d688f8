"""What the verbs that read a model are given: one text, or streams."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.inputs.token_batch import make_token_batch
from mionnx.run.runner import Prompt, Runner


@dataclass(frozen=True)
class Text:
    """One tokenised prompt.

    Attributes:
        ids: [seq], int64.
        tokens: the text of each.
    """

    ids: NDArray[np.int64]
    tokens: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, position: int) -> int:
        """A position counted from the start.

        Raises:
            InputError: there is none such.
        """
        if not isinstance(position, int | np.integer) or not -len(self) <= position < len(self):
            raise InputError(f"position {position!r} of a text of {len(self)} tokens (0 to {len(self) - 1})")
        return int(position) % len(self)


def one_text(model: Runner, prompt: Prompt) -> Text:
    """The one prompt that was given.

    Raises:
        InputError: several, or none that the model can run on.
    """
    call = make_token_batch(model._ids(prompt), None, None, model.hooked.metadata.sizes)
    if call.batch != 1:
        raise InputError(f"one prompt is read at a time, and {call.batch} were given: call once for each")
    return Text(call.input_ids[0], [spell(model, token) for token in call.input_ids[0].tolist()])


def spell(model: Runner, token: int) -> str:
    """A token's text; its number where the model has no tokenizer."""
    return model.tokenizer.decode([token], skip_special_tokens=False) if model.has_tokenizer else str(token)


def token_of(model: Runner, token: int | str) -> int:
    """A token given by its id or by its text.

    Raises:
        InputError: the text is no single token of the vocabulary, or the id is outside the vocabulary.
        TokenizerError: a text, and the model has no tokenizer.
    """
    if isinstance(token, str):
        return model.token_id(token)
    if not isinstance(token, int | np.integer) or isinstance(token, bool):
        raise InputError(f"a token is its id or its text, got {token!r}")
    return model._known(int(token))


def is_stream(given: Any) -> bool:
    """Whether an argument is values of a residual stream, rather than a prompt."""
    try:
        return np.asarray(given).dtype.kind not in "iubOUST"
    except ValueError:  # rows of unequal length
        return False


def streams_of(given: ArrayLike, hidden: int, what: str = "residual") -> NDArray[Any]:
    """Vectors of the residual stream.

    Returns:
        [..., hidden].

    Raises:
        InputError: another width, no numbers, NaN or infinities.
    """
    found = np.asarray(given)
    if found.dtype.kind in "iu":
        found = found.astype(np.float32)
    if found.dtype.kind in "bOUSTc" or found.shape[-1:] != (hidden,) or 0 in found.shape:
        raise InputError(f"{what} is {found.dtype} {list(found.shape)}, it must be numbers [..., hidden={hidden}]")
    if not np.isfinite(found.astype(np.float32)).all():
        raise InputError(f"{what} has NaN or infinities")
    return found
