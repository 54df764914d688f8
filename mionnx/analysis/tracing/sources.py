"""`Sources`: what writes in one prompt: active features, errors of transcoders, tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.transcoder import Active, Floats, Numbers
from mionnx.analysis.tracing.local_model import LARGE_CONSTANTS, Arrays, LocalModel
from mionnx.errors import InputError
from mionnx.rewrite.gradient.way_back import (
    EMBED_POINT,
    SOURCE_INDEX,
    SOURCE_ROWS,
    SOURCE_VALUES,
    SOURCES,
    TOKEN_SOURCES,
    TRACED_LOGITS,
)

GATHERED = 1 / 8  # of the memory: where vectors of all sources take more, the graph gathers them, layer by layer


@dataclass(frozen=True)
class Written:
    """What is written at the MLP of one layer: at each position the error, then features, then nothing.

    Attributes:
        rows: [rows + seq, hidden], of decoders, then the error of each position.
        index: [seq, m], the row of each source; value: [seq, m], what it is multiplied by, 0 for nothing.
        feature, position, place: [n], a feature's number among all that are active, and where it stands in `index`.
    """

    rows: Floats
    index: Numbers
    value: Floats
    feature: Numbers
    position: Numbers
    place: Numbers

    def vectors(self) -> Floats:
        """[seq, hidden, m]."""
        return np.ascontiguousarray((self.rows[self.index] * self.value[:, :, None]).transpose(0, 2, 1))


class Sources:
    """The sources of one prompt; features by layer, position and number.

    Attributes:
        layer, position, feature, value: [n], of the active features.
        written: what is written at the MLP of each layer.
        tokens: [seq, hidden], the embeddings.
        logits: [vocab], of the last position; None where targets are no logits.
        gathered: whether the graph of the way back gathers the vectors of sources itself, at each call.
    """

    def __init__(self, local: LocalModel, ids: Sequence[int], skip: int, memory: int) -> None:
        self.local, self.ids = local, [*ids]
        from scipy.sparse import csr_array  # slow to import

        # one text at a time: what a prompt's first tokens compute takes the place of the whole's
        constants, values = local.run(ids)
        self._constants = len(self.ids), constants
        size = sum(array.nbytes for array in constants.values())
        # those of a long text go before others come: there one pass more is little beside its rows
        self._whole = constants if size <= LARGE_CONSTANTS else {}
        active, errors = [], np.stack([values[name][0] for name in local.write_at])
        for layer in range(local.layers):
            coder, scale = local.transcoders.layer(layer), local.scale(layer)
            x = values[local.read_at[layer]][0]
            x = np.ascontiguousarray(x if scale is None else x / scale)
            one = coder.active(x[skip:], f"the transcoder of layer {layer}")
            active.append(one)
            acts = csr_array((one.value, (one.position + skip, one.place)), shape=(len(x), len(one.encoder)))
            for ahead in range(min(one.decoder.shape[1], local.layers - layer)):
                errors[layer + ahead] -= acts @ one.decoder[:, ahead]
            errors[layer] -= coder.output_bias
            if coder.skip is not None:
                errors[layer] -= x @ coder.skip
        errors[:, :skip] = 0
        self.layer = np.repeat(np.arange(local.layers), [len(one.value) for one in active])
        self.position = np.concatenate([one.position for one in active]) + skip
        self.feature = np.concatenate([one.feature for one in active])
        self.value = np.concatenate([one.value for one in active])
        self._place = np.concatenate([one.place for one in active])
        self._encoders = [one.encoder for one in active]
        self.written = [self._written(layer, errors[layer], active) for layer in range(local.layers)]
        self.tokens = np.ascontiguousarray(values[EMBED_POINT][0])
        self.logits = values[TRACED_LOGITS][0].astype(np.float64) if TRACED_LOGITS in values else None
        self.engine_bytes = size * (2 if self._whole else 1) + local.taken(len(self.ids))  # and those of first tokens
        self.gathered = sum(one.index.size for one in self.written) * errors.shape[2] * 4 > GATHERED * memory
        self._vectors = [] if self.gathered else [one.vectors() for one in self.written]

    @property
    def count(self) -> int:
        """Number of active features."""
        return len(self.layer)

    @property
    def size(self) -> int:
        """Number of all sources: features, errors by layer and position, tokens."""
        return self.count + (self.local.layers + 1) * len(self.ids)

    @property
    def bytes(self) -> int:
        """Memory that they take, with what the engine holds: constants of the way back, and what it took besides."""
        arrays: list[NDArray[Any]] = [*self._encoders, *self._vectors, self.tokens]
        arrays += [self.layer, self.position, self.feature, self.value, self._place]
        arrays += [getattr(one, each.name) for one in self.written for each in fields(Written)]
        return sum(array.nbytes for array in arrays) + self.engine_bytes

    def numbers(self, features: Numbers) -> Numbers:
        """The numbers of features [n, 3], by layer, position and number, among all that are active.

        Raises:
            InputError: one that is not active.
        """
        own, other = (
            (one[0] * len(self.ids) + one[1]) * (1 + self.feature.max(initial=0)) + one[2]
            for one in ((self.layer, self.position, self.feature), features.T)
        )
        places = np.minimum(np.searchsorted(own, other), max(len(own) - 1, 0))
        if len(other) and (not len(own) or (own[places] != other).any()):
            raise InputError("these transcoders have other active features than the graph: give those that it is of")
        return places

    def encoders(self, features: Numbers) -> Floats:
        """What some active features of one layer read, [n, hidden]."""
        if not len(features):
            return np.zeros((0, self.tokens.shape[1]), np.float32)
        layer = int(self.layer[features[0]])
        rows, scale = self._encoders[layer][self._place[features]], self.local.scale(layer)
        return rows if scale is None else rows / scale

    def feeds(self, end: int) -> Arrays:
        """What the way back reads besides its rows, on the first tokens."""
        if self._constants[0] != end:  # what the first tokens compute does not depend on those behind them
            self._constants = end, {}
            self._constants = end, self.local.first_tokens(self.ids, end, self._whole)
        return {**self._constants[1], **self.vectors(end)}

    def vectors(self, end: int) -> Arrays:
        """What sources write at the first tokens, as the way back reads it."""
        feeds = {TOKEN_SOURCES: self.tokens[:end]}
        for i, one in enumerate(self.written):
            if self.gathered:
                feeds |= {SOURCE_ROWS(i): one.rows, SOURCE_INDEX(i): one.index[:end], SOURCE_VALUES(i): one.value[:end]}
            else:
                feeds[SOURCES(i)] = self._vectors[i][:end]
        return feeds

    def _written(self, layer: int, errors: Floats, active: Sequence[Active]) -> Written:
        layers = range(layer + 1) if self.local.transcoders.across else (layer,)
        feature = np.concatenate([np.flatnonzero(self.layer == i) for i in layers])
        begins = np.cumsum([0, *(len(active[i].encoder) for i in layers)])
        row = np.concatenate([active[i].place + begin for i, begin in zip(layers, begins, strict=False)])
        rows = np.concatenate([*(active[i].decoder[:, layer - i] for i in layers), errors])
        position, seq = self.position[feature], len(self.ids)
        order, counts = np.argsort(position, kind="stable"), np.bincount(position, minlength=seq)
        place = np.empty(len(feature), np.int64)
        # the number of a feature among those of its position, behind the error
        place[order] = np.arange(len(feature)) - (np.cumsum(counts) - counts)[position[order]] + 1
        index: NDArray[np.int64] = np.zeros((seq, 1 + int(counts.max(initial=0))), np.int64)
        value = np.zeros(index.shape, np.float32)
        index[:, 0], value[:, 0] = begins[-1] + np.arange(seq), 1
        index[position, place], value[position, place] = row, self.value[feature]
        return Written(rows, index, value, feature, position, place)
