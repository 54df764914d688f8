"""The key/value cache of a transformer; its layers and positions can be transplanted.

A cache is changed by its own methods only; arrays are replaced, never written into, so a cache that was made from
another one can be changed alone.

A saved cache is one `.safetensors` file: `{layer}.key` and `{layer}.value` a layer, `attention_mask`, and in its
metadata `mionnx_cache` = "kv".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.graph.metadata import Sizes
from mionnx.inputs.cache_file import read_cache
from mionnx.inputs.layer_cache import LayerCache, checked_like
from mionnx.inputs.value import Value
from mionnx.machine.arrays import zeros
from mionnx.machine.dialects import Translated
from mionnx.machine.typed import typed

MOST_LAYERS = 2**16
Layer = tuple[NDArray[Any], NDArray[Any]]
CACHE_PARTS = KEYS_AND_VALUES.parts


@typed(InputError)
class KVCache(LayerCache[Layer], Translated):
    """Keys and values of the tokens seen so far.

    Attributes:
        layers: per layer (keys, values), each [batch, n_kv_heads, seq, head_dim]; keys are stored after RoPE. Sizes
            of heads may differ, and a layer that reads the keys and values of another has none (n_kv_heads is 0).
        attention_mask: [batch, seq], 1 for tokens and 0 for padding.
    """

    NOUN = "cache"
    KIND = "kv"
    PARTS = CACHE_PARTS

    @staticmethod
    def layer_of(parts: Iterable[NDArray[Any]]) -> Layer:
        """Keys and values."""
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
        own = self.get_layer(layer)
        new = [
            checked_like(old, value, f"the {part}s of layer {layer}")
            for old, value, part in zip(own, (keys, values), CACHE_PARTS, strict=True)
        ]
        self.put_layer(layer, new)

    def clear_layer(self, layer: int) -> None:
        """Put zeros in place of a layer's keys and values."""
        keys, values = self.get_layer(layer)
        self.set_layer(layer, np.zeros_like(keys), np.zeros_like(values))

    def clone_layer_from(self, donor: KVCache, layer: int) -> None:
        """Take a layer's keys and values from another cache of the same shape.

        Raises:
            InputError: no such layer in one of the two, or another shape.
        """
        self.set_layer(layer, *donor.get_layer(layer))

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
        for own, given in zip(self.get_layer(layer), donor.get_layer(layer), strict=True):
            if own.shape[:2] != given.shape[:2] or own.shape[3] != given.shape[3]:
                raise InputError(f"layer {layer}: the donor holds {list(given.shape)}, this cache {list(own.shape)}")
            changed = own.copy()
            changed[:, :, start:end] = given[:, :, start:end]
            new.append(changed)
        self.set_layer(layer, *new)

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
        """One row without its padding: [1, n_kv_heads, tokens, head_dim] a layer.

        Raises:
            InputError: no such row.
        """
        one = self.select([row])
        real = np.flatnonzero(one.attention_mask[0])
        layers = [self.layer_of(part[:, :, real] for part in layer) for layer in one.layers]
        return KVCache(layers, one.attention_mask[:, real])

    @staticmethod
    def load(path: str | Path) -> KVCache:
        """Read a cache that `save` wrote.

        Raises:
            InputError: the file is missing, damaged, or no key/value cache.
        """
        tensors = read_cache(path, "kv", CACHE_PARTS)
        layers = [(tensors[f"{i}.key"], tensors[f"{i}.value"]) for i in range((len(tensors) - 1) // 2)]
        cache = KVCache(layers, tensors["attention_mask"])
        shapes = {value.shape for layer in layers for value in layer}
        if any(len(shape) != 4 or shape[::2] != cache.attention_mask.shape for shape in shapes) or not shapes:
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
        """The inputs of the graph, each of this dtype and this shape, or of its own in `shapes`.

        Raises:
            InputError: another number of layers, another shape or dtype.
        """
        wanted = shapes or dict.fromkeys(KEYS_AND_VALUES.inputs(sizes.num_layers), shape)
        return fitting_feeds(self, wanted, np.dtype(dtype))

    @staticmethod
    def empty(num_layers: int, batch: int, n_kv_heads: int, head_dim: int, dtype: DTypeLike) -> KVCache:
        """The cache before the first token.

        Raises:
            InputError: a negative size, more layers than a model can have, or a dtype that is none.
        """
        if not 0 <= num_layers <= MOST_LAYERS:
            raise InputError(f"{num_layers} layers: a model has 0 to {MOST_LAYERS}")
        nothing = zeros((batch, n_kv_heads, 0, head_dim), dtype)
        return KVCache([(nothing, nothing)] * num_layers, zeros((batch, 0), np.int64))


def fitting_feeds(cache: KVCache, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]) -> dict[str, Value]:
    """A cache as the inputs of a graph; its arrays are looked at, the arguments are not.

    Args:
        shapes: input -> its shape, layer by layer.

    Raises:
        InputError: another number of layers, another shape or dtype.
    """
    if cache.num_layers != (layers := len(shapes) // len(CACHE_PARTS)):
        raise InputError(f"the cache has {cache.num_layers} layers, the model {layers}")
    values = [value for layer in cache.held() for value in layer]
    for (name, shape), value in zip(shapes.items(), values, strict=True):
        if value.shape != shape or value.dtype != dtype:
            _, layer, kind = name.split(".")
            raise InputError(
                f"the cache's {kind}s of layer {layer} are {value.dtype} {list(value.shape)}, "
                f"expected {dtype} {list(shape)}"
            )
    return dict(zip(shapes, values, strict=True))
