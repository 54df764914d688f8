"""Texts that lenses are fitted on: their tokens, and the positions that count."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.harvest.texts import Source, Texts
from mionnx.errors import InputError
from mionnx.machine.ranges import at_least
from mionnx.run.prompt import one_prompt
from mionnx.run.runner import Runner

Ids = NDArray[np.int64]


class ShortTextWarning(UserWarning):
    """A text without a position that counts."""


class LensTexts:
    """The texts of a fit that have positions that count, as ids; a digest of all that were read."""

    def __init__(self, model: Runner, texts: Source, column: str | None, skip: int, max_tokens: int) -> None:
        at_least("skip", skip, 0)
        at_least("max_tokens", max_tokens, skip + 2)
        self.model, self.source = model, Texts(texts, column)
        self.skip, self.max_tokens = skip, max_tokens
        self.read = 0  # texts so far, short ones too
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        """Hash of the ids of the texts so far."""
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Ids]:
        for text in self.source:
            ids = one_prompt(self.model, text)[: self.max_tokens]
            self.read += 1
            self._digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
            if len(ids) < self.skip + 2:
                warnings.warn(
                    f"text {self.read - 1} has {len(ids)} tokens and is left out: the first {self.skip} and the last "
                    f"do not count, so that {self.skip + 2} are needed",
                    ShortTextWarning,
                    stacklevel=2,
                )
                continue
            yield ids

    def positions(self, ids: Ids) -> Ids:
        """The positions of a text that count: without the first, which are sinks, and the last."""
        return np.arange(self.skip, len(ids) - 1)


def source_layers(model: Runner, layers: Sequence[int] | None) -> list[int]:
    """The layers of a lens, ascending; all but the last if left out."""
    last = model.num_layers - 1
    chosen = [*range(last)] if layers is None else sorted({layer + model.num_layers * (layer < 0) for layer in layers})
    wrong = [layer for layer in chosen if not 0 <= layer < last]
    if wrong or not chosen:
        named = f"layer {wrong[0]}" if wrong else "no layer"
        raise InputError(f"{named}: a lens maps layers 0 to {last - 1} to layer {last}")
    return chosen
