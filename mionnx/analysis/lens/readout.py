"""Streams read through a model's head in blocks, so that all logits are never held at once; by whom tokens are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.engine.options import Options
from mionnx.errors import InputError
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.output_head import LOGITS
from mionnx.inputs.lacking import refuse_several_streams, refuse_without_vocabulary
from mionnx.machine.brief import Brief
from mionnx.machine.once import once_property
from mionnx.machine.stored import Storable
from mionnx.rewrite.lens_head import LENS_K, LENS_TOKENS, OUTPUTS
from mionnx.rewrite.plan import Outputs
from mionnx.run.open_model import Recipe
from mionnx.run.prompt import token_of, token_text
from mionnx.run.runner import Runner
from mionnx.run.segments import Rows, Segments

ROOM = 2**25  # bytes that the logits of one block and what is made of them may take, unless one row takes more
COPIES = 5  # arrays of the logits' size that are alive at once: logits, probabilities, products


@dataclass(frozen=True, repr=False)
class Readout(Brief, Storable):
    """Predictions of the next token from `n` streams at `positions`."""

    top: NDArray[np.float32]  # [n, positions, k] log-probabilities in nats, in descending order
    top_ids: NDArray[np.int64]  # [n, positions, k] their tokens
    log_probs: NDArray[np.float32]  # [n, positions, chosen] of the tokens that were asked for
    ranks: NDArray[np.int64]  # [n, positions, chosen] how many tokens have a larger logit
    entropy: NDArray[np.float32]  # [n, positions] in nats
    divergence: NDArray[np.float32]  # [n, positions] KL(reference || stream) in nats


class Lens(Segments):
    """The part of one model behind its last layer: it gives logits, or a readout."""

    def __init__(self, hooked: HookedModel, options: Options) -> None:
        refuse_without_vocabulary(hooked, "the logit lens")
        refuse_several_streams(hooked, "reading a stream as logits")
        super().__init__(hooked, options)
        self.sizes = hooked.metadata.sizes

    def logits_of(self, streams: NDArray[Any]) -> NDArray[Any]:
        """The logits [batch, seq, vocab] of streams [batch, seq, hidden]."""
        return self.logits(Rows.blank(*streams.shape[:2]), {self.end: streams}, last=False)

    def read(self, reference: NDArray[Any], streams: NDArray[Any], chosen: NDArray[np.int64], k: int) -> Readout:
        """Read tokens [positions, chosen] from streams [n, positions, hidden]; the reference is [positions, hidden]."""
        self._check(chosen, k)
        shape = (len(streams), len(reference))
        results: list[NDArray[Any]] = [np.empty((*shape, k), np.float32), np.empty((*shape, k), np.int64)]
        results += [np.empty((*shape, chosen.shape[1]), dtype) for dtype in (np.float32, np.int64)]
        results += [np.empty(shape, np.float32) for _ in range(2)]
        for rows, columns in self._blocks(*shape, chosen.shape[1]):
            # The reference goes with every block, as its first row: divergences need its logits beside the others'.
            block = np.concatenate([reference[None, columns], streams[rows, columns]])
            for array, part in zip(results, self._distribution(block, chosen[columns], k), strict=True):
                array[rows, columns] = part[1:]
        return Readout(*results)

    def _check(self, chosen: NDArray[np.int64], k: int) -> None:
        if not isinstance(k, int | np.integer) or not 1 <= k <= self.sizes.vocab_size:
            raise InputError(f"k={k!r}; it must be an integer from 1 to {self.sizes.vocab_size}, the vocabulary's size")
        outside = chosen[(chosen < 0) | (chosen >= self.sizes.vocab_size)]
        if outside.size:
            raise InputError(f"token {outside[0]}; the vocabulary is 0 to {self.sizes.vocab_size - 1}")

    def _blocks(self, streams: int, positions: int, chosen: int) -> Iterator[tuple[slice, slice]]:
        """Ranges of streams and positions with logits that fit; each block holds the reference too."""
        row = self.sizes.vocab_size * (4 * COPIES + 5 * chosen)  # ranks compare every token with each chosen one
        fitting = max(2, ROOM // row)  # the reference and one stream at least
        high = min(streams, fitting - 1)
        # Each row of streams has the reference beside it.
        wide = max(1, fitting // (high + 1))
        for first in range(0, streams, high):
            for column in range(0, positions, wide):
                yield slice(first, first + high), slice(column, column + wide)

    def _distribution(self, block: NDArray[Any], chosen: NDArray[np.int64], k: int) -> list[NDArray[Any]]:
        piece = self.open([self.end], [LOGITS], outputs=Outputs(carried=False, readout=True))
        names = [f"mionnx.lens.{name}" for name in OUTPUTS]
        feeds = {self.end: block, LENS_TOKENS: chosen, LENS_K: np.array([k])}
        return list(self.compute(piece, Rows.blank(*block.shape[:2]), names, feeds).values())


MORE_TOKENS = ": LensResult.load(path, model=model) reads further tokens"


class LensReader:
    """Reads tokens from the streams of one text, [points + 1, positions, hidden], the last after the last layer."""

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

    def token_id(self, token: int | str) -> int:
        """The id of a token that is given by id or text."""
        return token_of(self.model, token)

    def read(self, chosen: NDArray[np.int64], k: int = 1) -> Readout:
        """Read tokens [positions, tokens], and the `k` most likely ones, at every point."""
        return self.model.opened(Lens).read(self.streams[-1], self.streams[:-1], chosen, k)

    def last(self) -> Readout:
        """Read the top token after the last layer."""
        no_tokens = np.empty((self.streams.shape[1], 0), np.int64)
        return self.model.opened(Lens).read(self.streams[-1], self.streams[-1:], no_tokens, 1)

    def __reduce__(self) -> tuple[Any, ...]:  # the model is opened again when it is first needed
        return LensReader, (self._model if isinstance(self._model, Recipe) else Recipe.of(self._model), self.streams)

    def __deepcopy__(self, memo: dict[int, Any]) -> LensReader:
        return self  # nothing in it changes


class SavedReader:
    """Tokens of a lens without its model, by their ids."""

    def __init__(
        self,
        streams: NDArray[Any] | None,  # None if the lens was saved without
        source: list[str],
        words: Mapping[int, str],  # token -> its text, of all tokens in the lens
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

    def token_id(self, token: int | str) -> int:
        """The id of a tracked token, given by id; the id of a text only a tokenizer knows."""
        if token not in self.tracked:
            tracked = ", ".join(f"{one} {self.words[one]!r}" for one in self.tracked) or "none"
            raise InputError(f"token {token!r} is none of the tracked tokens of this lens ({tracked}){MORE_TOKENS}")
        return int(token)

    def read(self, chosen: NDArray[np.int64]) -> Readout:
        """Read a tracked token, the same at every position."""
        # Column 0 is the answer's.
        column = [1 + self.tracked.index(self.token_id(int(chosen[0, 0])))]
        readout = self.readout
        return replace(readout, log_probs=readout.log_probs[..., column], ranks=readout.ranks[..., column])


def source_of(model: Runner) -> list[str]:
    """The model's family, dtype and hash of weights."""
    metadata = model.hooked.metadata
    return [metadata.family, metadata.dtype, model.hooked.weights_sha256]
