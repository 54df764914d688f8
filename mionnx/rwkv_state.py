"""The recurrent state of an RWKV model: what a forward pass continues from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mionnx.errors import InputError
from mionnx.metadata import Sizes

PARTS = ("att_shift", "wkv", "ffn_shift")


@dataclass(frozen=True)
class Layer:
    """One layer's state.

    Attributes:
        att_shift, ffn_shift: [batch, hidden], what the next token's time mix and channel mix are mixed with.
        wkv: [batch, n_heads, key, value], float32, what the recurrence has gathered.
    """

    att_shift: NDArray[Any]
    wkv: NDArray[np.float32]
    ffn_shift: NDArray[Any]


@dataclass(frozen=True)
class RWKVState:
    """The state after the tokens seen so far.

    Attributes:
        layers: one entry a layer.
        attention_mask: [batch, seq], 1 for tokens seen and 0 for padding; it gives the next tokens their positions.
    """

    layers: Sequence[Layer]
    attention_mask: NDArray[np.int64]

    @property
    def num_layers(self) -> int:
        """How many layers it holds."""
        return len(self.layers)

    @property
    def seq_len(self) -> int:
        """How many positions it has seen, padding included."""
        return int(self.attention_mask.shape[1])

    @staticmethod
    def empty(sizes: Sizes, batch: int, dtype: DTypeLike) -> "RWKVState":
        """The state before the first token: zeros."""
        shift = np.zeros((batch, sizes.hidden_size), dtype)
        wkv = np.zeros((batch, sizes.num_heads, sizes.head_dim, sizes.head_dim), np.float32)
        return RWKVState([Layer(shift, wkv, shift)] * sizes.num_layers, np.zeros((batch, 0), np.int64))

    def feeds(self, sizes: Sizes, batch: int, dtype: DTypeLike) -> dict[str, NDArray[Any]]:
        """As inputs of the graph.

        Raises:
            InputError: another number of layers, another shape or dtype, or NaN.
        """
        if self.num_layers != sizes.num_layers:
            raise InputError(f"the state has {self.num_layers} layers, the model {sizes.num_layers}")
        shift = (np.dtype(dtype), (batch, sizes.hidden_size))
        wkv = (np.dtype(np.float32), (batch, sizes.num_heads, sizes.head_dim, sizes.head_dim))
        feeds = {}
        for i, layer in enumerate(self.layers):
            for part, (kind, shape) in zip(PARTS, (shift, wkv, shift), strict=True):
                value = np.asarray(getattr(layer, part))
                if value.shape != shape or value.dtype != kind:
                    raise InputError(
                        f"the state's {part} of layer {i} is {value.dtype} {list(value.shape)}, "
                        f"expected {kind} {list(shape)}"
                    )
                if np.isnan(value).any():
                    raise InputError(f"the state's {part} of layer {i} has NaN")
                feeds[f"past_state.{i}.{part}"] = value
        return feeds


def outputs(num_layers: int) -> list[str]:
    """The names of the graph's outputs that hold the state after a call."""
    return [f"present_state.{i}.{part}" for i in range(num_layers) for part in PARTS]
