"""The streams of one text: `LensReader` has the model that reads further tokens from them, `SavedReader` has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.lens.readout import Lens, Readout
from mionnx.errors import InputError
from mionnx.machine.once import once_property
from mionnx.run.open_model import Recipe
from mionnx.run.prompt import token_of, token_text
from mionnx.run.runner import Runner

MORE_TOKENS = ": LensResult.load(path, model=model) reads further tokens"


class LensReader:
    """Reads tokens from the streams of one text.

    It is pickled with the model's recipe: the model is opened again when it is first needed.

    Attributes:
        streams: [points + 1, positions, hidden]; the last is that after the last layer.
    """

    def __init__(self, model: Runner | Recipe[Runner], streams: NDArray[Any]) -> None:
        self._model, self.streams = model, streams

    @once_property
    def model(self) -> Runner:
        return self._model.open() if isinstance(self._model, Recipe) else self._model

    @property
    def source(self) -> list[str]:
        """The model's family, dtype and hash of weights, by which a saved lens knows it again."""
        return source_of(self.model)

    def spell(self, token: int) -> str:
        """A token's text."""
        return token_text(self.model, token)

    def known(self, token: int | str) -> int:
        """The id of a token that is given by id or text."""
        return token_of(self.model, token)

    def read(self, chosen: NDArray[np.int64], k: int = 1) -> Readout:
        """Read tokens [positions, tokens], and the `k` most likely ones, at every point."""
        return self.model.opened(Lens).read(self.streams[-1], self.streams[:-1], chosen, k)

    def last(self) -> Readout:
        """Read the top token after the last layer."""
        no_tokens = np.empty((self.streams.shape[1], 0), np.int64)
        return self.model.opened(Lens).read(self.streams[-1], self.streams[-1:], no_tokens, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return LensReader, (self._model if isinstance(self._model, Recipe) else Recipe.of(self._model), self.streams)

    def __deepcopy__(self, memo: dict[int, Any]) -> LensReader:
        return self  # nothing in it changes


class SavedReader:
    """Tokens of a lens without its model, by their ids.

    Attributes:
        streams: as those of a `LensReader`; None if the lens was saved without.
        words: token -> its text, of all tokens in the lens.
    """

    def __init__(
        self,
        streams: NDArray[Any] | None,
        source: list[str],
        words: Mapping[int, str],
        tracked: Sequence[int],
        readout: Readout,
    ) -> None:
        self.streams, self.source, self.words = streams, source, words
        self.tracked, self.readout = tracked, readout

    def spell(self, token: int) -> str:
        """A token's text."""
        if token not in self.words:
            raise InputError(f"token {token} is not in this lens{MORE_TOKENS}")
        return self.words[token]

    def known(self, token: int | str) -> int:
        """The id of a tracked token, given by id.

        Raises:
            InputError: another token, or a text, whose id only a tokenizer knows.
        """
        if token not in self.tracked:
            tracked = ", ".join(f"{one} {self.words[one]!r}" for one in self.tracked) or "none"
            raise InputError(f"token {token!r} is none of the tracked tokens of this lens ({tracked}){MORE_TOKENS}")
        return int(token)

    def read(self, chosen: NDArray[np.int64]) -> Readout:
        """Read a tracked token, the same at every position."""
        column = 1 + self.tracked.index(self.known(int(chosen[0, 0])))
        values = {field.name: getattr(self.readout, field.name) for field in fields(Readout)}
        values |= {name: values[name][..., [column]] for name in ("log_probs", "ranks")}
        return Readout(**values)


def source_of(model: Runner) -> list[str]:
    """The model's family, dtype and hash of weights."""
    metadata = model.hooked.metadata
    return [metadata.family, metadata.dtype, model.hooked.weights_sha256]
