"""`Sources`: what writes in one prompt: active features, errors of transcoders, tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.features.transcoder import Floats, Numbers
from mionnx.analysis.tracing.local_model import LocalModel
from mionnx.graph.output_head import LOGITS
from mionnx.rewrite.gradient.way_back import EMBED_POINT


@dataclass(frozen=True)
class Written:
    """What is written at the MLP of one layer.

    Attributes:
        vectors: [seq, hidden, 1 + the most features of a position], the error first, then features, then zeros.
        feature, position, place: [m], a feature's number among all that are active, and where its vector stands.
    """

    vectors: Floats
    feature: Numbers
    position: Numbers
    place: Numbers


class Sources:
    """The sources of one prompt; features by layer, position and number.

    Attributes:
        layer, position, feature, value: [n], of the active features.
        encoders: [n, hidden], what they read.
        written: what is written at the MLP of each layer.
        tokens: [seq, hidden], the embeddings.
        logits: [vocab], of the last position.
        constants: what the way back reads, by name.
    """

    def __init__(self, local: LocalModel, ids: Sequence[int], skip: int) -> None:
        self.local, self.ids = local, [*ids]
        values = local.run(ids)
        parts, outputs = [], []
        reconstructed = np.zeros((local.layers, len(self.ids), local.model.hidden_size), np.float32)
        for layer in range(local.layers):
            coder, scale = local.transcoders.layer(layer), local.scale(layer)
            x = values[local.read_at[layer]][0]
            x = np.ascontiguousarray(x if scale is None else x / scale)
            one = coder.active(x[skip:], f"the transcoder of layer {layer}")
            position = one.position + skip
            for ahead in range(one.written.shape[1]):
                np.add.at(reconstructed[layer + ahead], position, one.written[:, ahead])
            reconstructed[layer] += coder.output_bias
            if coder.skip is not None:
                reconstructed[layer] += x @ coder.skip
            encoder = one.encoder if scale is None else one.encoder / scale
            parts.append((np.full(len(position), layer), position, one.feature, one.value, encoder))
            outputs.append(one.written)
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        self.layer, self.position, self.feature, self.value, self.encoders = columns
        errors = np.stack([values[name][0] for name in local.write_at]) - reconstructed
        errors[:, :skip] = 0
        self.written = [self._written(layer, errors[layer], outputs) for layer in range(local.layers)]
        self.tokens = np.ascontiguousarray(values[EMBED_POINT][0])
        self.logits = values[LOGITS][0, -1].astype(np.float64)
        self.constants = {name: values[name] for name in local.opened.graphs.constants}

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
        """Memory that they take, constants of the way back included."""
        arrays = [self.encoders, *self.constants.values(), *(one.vectors for one in self.written)]
        return sum(array.nbytes for array in arrays)

    def _written(self, layer: int, errors: Floats, outputs: list[NDArray[np.float32]]) -> Written:
        layers = range(layer + 1) if self.local.transcoders.across else (layer,)
        feature = np.concatenate([np.flatnonzero(self.layer == i) for i in layers])
        vectors = np.concatenate([outputs[i][:, layer - i] for i in layers])
        position = self.position[feature]
        order, counts = np.argsort(position, kind="stable"), np.bincount(position, minlength=len(self.ids))
        place = np.empty(len(feature), np.int64)
        # the number of a feature among those of its position, behind the error
        place[order] = np.arange(len(feature)) - (np.cumsum(counts) - counts)[position[order]] + 1
        padded = np.zeros((len(self.ids), errors.shape[1], 1 + int(counts.max(initial=0))), np.float32)
        padded[:, :, 0], padded[position, :, place] = errors, vectors
        return Written(padded, feature, position, place)
