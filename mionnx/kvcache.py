"""The key/value cache of a transformer: what a forward pass continues from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import InputError

Layer = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far.

    Attributes:
        layers: per layer (keys, values), each [batch, n_kv_heads, seq, head_dim]; keys are stored after RoPE.
        attention_mask: [batch, seq], 1 for tokens and 0 for padding.
    """

    layers: Sequence[Layer]
    attention_mask: NDArray[np.int64]

    @property
    def num_layers(self) -> int:
        """How many layers it holds."""
        return len(self.layers)

    @property
    def seq_len(self) -> int:
        """How many positions it holds, padding included."""
        return int(self.attention_mask.shape[1])

    def get_layer(self, layer: int) -> Layer:
        """Keys and values of one layer.

        Raises:
            InputError: no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise InputError(f"layer {layer} of a cache with {self.num_layers} layers")
        return self.layers[layer]

    @staticmethod
    def empty(num_layers: int, batch: int, n_kv_heads: int, head_dim: int, dtype: Any) -> "KVCache":
        """The cache before the first token."""
        nothing = np.zeros((batch, n_kv_heads, 0, head_dim), dtype)
        return KVCache([(nothing, nothing)] * num_layers, np.zeros((batch, 0), np.int64))
