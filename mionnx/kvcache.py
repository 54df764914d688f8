"""The key/value cache of a transformer: what a forward pass continues from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mionnx.errors import InputError
from mionnx.metadata import Sizes

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

    def feeds(self, sizes: Sizes, shape: tuple[int, ...], dtype: DTypeLike) -> dict[str, NDArray[Any]]:
        """As inputs of the graph, each of this shape and dtype.

        Raises:
            InputError: another number of layers, another shape or dtype.
        """
        if self.num_layers != sizes.num_layers:
            raise InputError(f"the cache has {self.num_layers} layers, the model {sizes.num_layers}")
        feeds = {}
        for i, layer in enumerate(self.layers):
            for kind, value in zip(("key", "value"), layer, strict=True):
                if value.shape != shape or value.dtype != dtype:
                    raise InputError(
                        f"the cache's {kind}s of layer {i} are {value.dtype} {list(value.shape)}, "
                        f"expected {np.dtype(dtype)} {list(shape)}"
                    )
                feeds[f"past_key_values.{i}.{kind}"] = value
        return feeds

    @staticmethod
    def empty(num_layers: int, batch: int, n_kv_heads: int, head_dim: int, dtype: Any) -> "KVCache":
        """The cache before the first token."""
        nothing = np.zeros((batch, n_kv_heads, 0, head_dim), dtype)
        return KVCache([(nothing, nothing)] * num_layers, np.zeros((batch, 0), np.int64))
