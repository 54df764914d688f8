"""`Transcoder`: one layer's features, as arrays that may be mapped from a file, and those of them that are active."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import ModelError

ENCODED = 2**14  # features whose encoder rows are in memory at once
Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Active:
    """The active features of one layer, by position and then by number.

    Attributes:
        position, feature: [n].
        value: [n], activations.
        place: [n], where each one's rows stand below: a feature that is active at many positions is read once.
        encoder: [rows, d_in].
        decoder: [rows, layers, d_out], of each layer that they write to.
    """

    position: Numbers
    feature: Numbers
    value: Floats
    place: Numbers
    encoder: Floats
    decoder: Floats


@dataclass(frozen=True)
class Transcoder:
    """The features of one layer: a = activation(encoder x + bias), y = sum of a decoder + output_bias + x skip.

    Attributes:
        encoder: [features, d_in]. bias: [features].
        decoder: [features, layers, d_out], of this layer and, across layers, of each later one.
        output_bias: [d_out].
        threshold: [features], of JumpReLU, where features are open above it.
        k: how many features are active at a token, of top-k; else 0.
        skip: [d_in, d_out], a linear map beside the features.
    """

    encoder: NDArray[Any]
    bias: Floats
    decoder: NDArray[Any]
    output_bias: Floats
    threshold: Floats | None = None
    k: int = 0
    skip: Floats | None = None

    @property
    def features(self) -> int:
        """Number of features."""
        return len(self.encoder)

    def check(self, where: str) -> None:
        """Refuse arrays that do not fit each other, and numbers that are none in what is small."""
        ranks = self.encoder.ndim, self.decoder.ndim
        if ranks != (2, 3):
            raise ModelError(f"{where}: an encoder of {ranks[0]} axes and a decoder of {ranks[1]}, not 2 and 3")
        (count, d_in), d_out = self.encoder.shape, self.decoder.shape[2]
        shapes: dict[str, tuple[Floats, tuple[int, ...]]] = {
            "b_enc": (self.bias, (count,)),
            "b_dec": (self.output_bias, (d_out,)),
        }
        shapes |= {} if self.threshold is None else {"threshold": (self.threshold, (count,))}
        shapes |= {} if self.skip is None else {"W_skip": (self.skip, (d_in, d_out))}
        if len(self.decoder) != count or 0 in (*self.encoder.shape, *self.decoder.shape):
            raise ModelError(
                f"{where}: an encoder {list(self.encoder.shape)} does not fit a decoder {list(self.decoder.shape)}"
            )
        for name, (array, shape) in shapes.items():
            if array.shape != shape:
                raise ModelError(f"{where}: {name} is {list(array.shape)}, and should be {list(shape)}")
            if not np.isfinite(array).all():
                raise ModelError(f"{where}: {name} has NaN or infinities")
        if self.k > count:
            raise ModelError(f"{where}: the largest {self.k} of {count} features")

    def active(self, x: Floats, where: str) -> Active:
        """The features that are active on vectors [seq, d_in]; rows of no others are read twice."""
        position, feature, value = self._top(x, where) if self.k else self._open(x, where)
        order = np.lexsort((feature, position))
        position, feature, value = position[order], feature[order], value[order]
        rows, place = np.unique(feature, return_inverse=True)
        encoder, decoder = (np.asarray(one[rows], np.float32) for one in (self.encoder, self.decoder))
        if not np.isfinite(decoder).all():
            raise ModelError(f"{where}: the decoder has NaN or infinities")
        return Active(position, feature, value, place, encoder, decoder)

    def values(self, x: Floats, features: Numbers) -> Floats:
        """Activations [seq, n] of some features on vectors [seq, d_in]; of top-k whether or not others are larger."""
        pre = x @ np.asarray(self.encoder[features], np.float32).T + self.bias[features]
        return np.where(pre > self._limit(features), np.maximum(pre, 0), 0).astype(np.float32)

    def _limit(self, features: Any) -> Any:
        return 0 if self.threshold is None else self.threshold[features]

    def _blocks(self, x: Floats, where: str) -> Any:
        """Pre-activations [seq, block] of one block of features after the other, with the first feature's number."""
        for begin in range(0, self.features, ENCODED):
            part = slice(begin, begin + ENCODED)
            pre = x @ np.asarray(self.encoder[part], np.float32).T + self.bias[part]
            if not np.isfinite(pre).all():
                raise ModelError(f"{where}: pre-activations of features from {begin} on are not finite")
            yield begin, part, pre

    def _open(self, x: Floats, where: str) -> tuple[Numbers, Numbers, Floats]:
        parts = []
        for begin, part, pre in self._blocks(x, where):
            position, feature = np.nonzero((pre > self._limit(part)) & (pre > 0))
            parts.append((position, feature + begin, pre[position, feature]))
        position, feature, value = (np.concatenate(one) for one in zip(*parts, strict=True))
        return position, feature, value

    def _top(self, x: Floats, where: str) -> tuple[Numbers, Numbers, Floats]:
        """The k largest at each position, as far as they are above 0."""
        values, numbers = np.zeros((len(x), 0), np.float32), np.zeros((len(x), 0), np.int64)
        for begin, _, pre in self._blocks(x, where):
            values = np.concatenate([values, pre], axis=1)
            numbers = np.concatenate([numbers, np.broadcast_to(begin + np.arange(pre.shape[1]), pre.shape)], axis=1)
            best = np.argsort(-values, axis=1, kind="stable")[:, : self.k]
            values, numbers = np.take_along_axis(values, best, 1), np.take_along_axis(numbers, best, 1)
        position, place = np.nonzero(values > 0)
        return position, numbers[position, place], values[position, place]
