"""`KVCache`, the key/value cache of a transformer; its layers and positions can be transplanted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.inputs.layer_cache import LayerCache, Parts
from mionnx.machine.arrays import zeros
from mionnx.machine.dialects import Translated
from mionnx.machine.typed import typed

MOST_LAYERS = 2**16
Layer = tuple[NDArray[Any], NDArray[Any]]


@typed(InputError)
class KVCache(LayerCache[Layer], Translated):
    """Keys and values of the tokens seen so far: a `LayerCache` whose layers all have attention, and nothing else.

    Attributes:
        layers: per layer (keys, values), each [batch, n_kv_heads, seq, head_dim]; keys are stored after RoPE. Sizes
            of heads may differ, and a layer that reads the keys and values of another has none (n_kv_heads is 0).
        attention_mask: [batch, seq], 1 for tokens and 0 for padding.
    """

    KIND = "kv"
    PARTS = KEYS_AND_VALUES.parts

    @staticmethod
    def layer_of(parts: Parts) -> Layer:
        return parts["key"], parts["value"]

    @staticmethod
    def parts_of(layer: Layer) -> Parts:
        keys, values = layer
        return {"key": keys, "value": values}

    def set_layer(self, layer: int, keys: ArrayLike, values: ArrayLike) -> None:
        """Put other keys and values in place of a layer's.

        Args:
            layer: 0-based.
            keys, values: [batch, n_kv_heads, seq, head_dim], as the layer's own.

        Raises:
            InputError: no such layer, another shape, or NaN.
        """
        self.put_layer(layer, {"key": keys, "value": values})

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
