"""Words unknown to a tokenizer: a warning of what becomes `<unk>`, once a model."""

import json
import warnings

from tokenizers import Tokenizer

from mionnx.inputs.tokens import Tokens
from mionnx.inputs.world_tokenizer import WorldTokenizer
from mionnx.machine.caller import caller_level

SAID = 5  # words that a warning names


class UnknownWordWarning(UserWarning):
    """Words outside the vocabulary: the model reads its token for unknown words instead."""


class UnknownWords:
    """Warns of unknown words, the first time that a model is given some.

    Attributes:
        token: text of the token for unknown words; None where the tokenizer knows every text.
        model: the model's name, for the message.
    """

    def __init__(self, tokenizer: Tokenizer | WorldTokenizer, model: str) -> None:
        self.token: str | None = None
        self._id: int | None = None
        if not isinstance(tokenizer, WorldTokenizer) and (token := _unknown_token(tokenizer)) is not None:
            self.token, self._id = token, tokenizer.token_to_id(token)
        self.model = model
        self._said = False

    def look(self, tokens: Tokens) -> None:
        """Warn of the unknown words of a text; one that the text itself spells `<unk>` is none."""
        if self._said or self._id is None or self._id not in tokens.ids:
            return
        found = [tokens.text[slice(*offsets)].strip() for offsets in self._offsets(tokens)]
        words = [word for word in dict.fromkeys(found) if word and word != self.token]
        if words:
            self._said = True
            more = f" and {len(words) - SAID} more" if len(words) > SAID else ""
            warnings.warn(
                f"not in the vocabulary of {self.model}: {', '.join(map(repr, words[:SAID]))}{more}; the model reads "
                f"{self.token} instead (said once for a model)",
                UnknownWordWarning,
                stacklevel=caller_level(),
            )

    def _offsets(self, tokens: Tokens) -> list[tuple[int, int]]:
        pairs = zip(tokens.ids.tolist(), tokens.offsets, strict=True)
        return [offsets for token, offsets in pairs if token == self._id]


def _unknown_token(tokenizer: Tokenizer) -> str | None:
    """The token that a tokenizer writes for unknown words."""
    if type(tokenizer.model).__name__ != "Unigram":
        return getattr(tokenizer.model, "unk_token", None)
    model = json.loads(tokenizer.to_str())["model"]  # the library shows it nowhere else
    return None if model.get("unk_id") is None else str(model["vocab"][model["unk_id"]][0])
