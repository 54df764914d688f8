"""`LensReader`: the streams of one text, with the model that reads further tokens from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.lens.readout import Lens, Readout
from mionnx.machine.once import once_property
from mionnx.run.prompt import token_of, token_text
from mionnx.run.recipe import Recipe
from mionnx.run.runner import Runner


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
        """The model.

        Raises:
            ModelError: its folder is not there any more.
        """
        return self._model.open() if isinstance(self._model, Recipe) else self._model

    def spell(self, token: int) -> str:
        """A token's text."""
        return token_text(self.model, token)

    def known(self, token: int | str) -> int:
        """The id of a token that is given by id or text.

        Raises:
            InputError: no such token.
        """
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
