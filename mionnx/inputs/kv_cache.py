"""`KVCache`, the key/value cache of a transformer; its layers and positions can be transplanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.graph.metadata import Sizes
from mionnx.inputs.layer_cache import LayerCache, Value, fitting_feeds
from mionnx.machine.arrays import zeros
from mionnx.machine.dialects import Translated
from mionnx.machine.typed import typed

MOST_LAYERS = 2**16
Layer = tuple[NDArray[Any], NDArray[Any]]


@typed(InputError)
class KVCache(LayerCache[Layer], Translated):
    """Keys and values of the tokens seen so far.

    Its own methods alone change a cache. They replace arrays and never write into them, so that a cache which was made
    from another one can be changed by itself.

    Attributes:
        layers: per layer (keys, values), each [batch, n_kv_heads, seq, head_dim]; keys are stored after RoPE. Sizes
            of heads may differ, and a layer that reads the keys and values of another has none (n_kv_heads is 0).
        attention_mask: [batch, seq], 1 for tokens and 0 for padding.
    """

    NOUN = "cache"
    KIND = "kv"
    PARTS = KEYS_AND_VALUES.parts

    @staticmethod
    def layer_of(parts: Iterable[NDArray[Any]]) -> Layer:
        keys, values = parts
        return keys, values

    def set_layer(self, layer: int, keys: ArrayLike, values: ArrayLike) -> None:
        """Put other keys and values in place of a layer's.

        Args:
            layer: 0-based.
            keys, values: [batch, n_kv_heads, seq, head_dim], as the layer's own.

        Raises:
            InputError: no such layer, another shape, or NaN.
        """
        self.put_layer(layer, (keys, values))

    def clone_layer_position_range(self, donor: KVCache, layer: int, start: int, end: int) -> None:
        """Take a layer's keys and values at positions [start, end) from another cache.

        Positions are columns of the cache, padding included. The two may differ in length.

        Raises:
            InputError: a range that one of the two does not hold, no such layer, or another shape.
        """
        for cache, whose in ((self, "this cache"), (donor, "the donor")):
            if not 0 <= start < end <= cache.seq_len:
                raise InputError(f"positions {start} up to {end} of {whose}, which holds {cache.seq_len}")
        new = []
        for own, other in zip(self.get_layer(layer), donor.get_layer(layer), strict=True):
            # all but seq, in which the two may differ
            if own.shape[:2] != other.shape[:2] or own.shape[3] != other.shape[3]:
                raise InputError(f"layer {layer}: the donor holds {list(other.shape)}, this cache {list(own.shape)}")
            changed = own.copy()
            changed[:, :, start:end] = other[:, :, start:end]
            new.append(changed)
        self.put_layer(layer, new)

    def trim_to(self, seq_len: int) -> None:
        """Forget all positions from `seq_len` on.

        Raises:
            InputError: it holds fewer.
        """
        if not 0 <= seq_len <= self.seq_len:
            raise InputError(f"trim to {seq_len} positions: the cache holds {self.seq_len}")
        self.layers = [(keys[:, :, :seq_len], values[:, :, :seq_len]) for keys, values in self.layers]
        self.attention_mask = self.attention_mask[:, :seq_len]

    def row(self, row: int) -> KVCache:
        """One row without its padding: [1, n_kv_heads, tokens, head_dim] a layer."""
        one = self.select([row])
        real = np.flatnonzero(one.attention_mask[0])
        layers = [self.layer_of(part[:, :, real] for part in layer) for layer in one.layers]
        return KVCache(layers, one.attention_mask[:, real])

    @classmethod
    def load(cls, path: str | Path) -> Self:
        cache = super().load(path)
        shapes = {value.shape for layer in cache.layers for value in layer}
        if any(len(shape) != 4 or shape[::2] != cache.attention_mask.shape for shape in shapes):  # batch and seq
            raise InputError(f"{path} holds layers of the shapes {sorted(shapes)} for {cache.attention_mask.shape}")
        return cache

    def feeds(
        self,
        sizes: Sizes,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> dict[str, Value]:
        """The inputs of the graph, each of this dtype and this shape, or of its own in `shapes`."""
        expected = shapes or dict.fromkeys(KEYS_AND_VALUES.inputs(sizes.num_layers), shape)
        return fitting_feeds(self, expected, (dtype, dtype))

    @staticmethod
    def empty(num_layers: int, batch: int, n_kv_heads: int, head_dim: int, dtype: DTypeLike) -> KVCache:
        """The cache before the first token.

        Raises:
            InputError: a negative size, more layers than a model can have, or a dtype that is none.
        """
        if not 0 <= num_layers <= MOST_LAYERS:
            raise InputError(f"{num_layers} layers: a model has 0 to {MOST_LAYERS}")
        nothing = zeros((batch, n_kv_heads, 0, head_dim), dtype)
        # one array for all layers: methods replace arrays and never write into them
        return KVCache([(nothing, nothing)] * num_layers, zeros((batch, 0), np.int64))
