"""`RWKVState`, the recurrent state of an RWKV model; its layers can be transplanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.io_names import SHIFTED_STATE
from mionnx.graph.sizes import Sizes
from mionnx.inputs.layer_cache import LayerCache, Parts
from mionnx.machine.arrays import zeros
from mionnx.machine.brief import Brief
from mionnx.machine.typed import typed


@dataclass(frozen=True, repr=False)
class LayerState(Brief):
    """One layer's state."""

    # att_shift, ffn_shift: [batch, hidden], what the next token's time mix and channel mix are mixed with.
    att_shift: NDArray[Any]
    # [batch, n_heads, key, value], float32, what the recurrence has gathered; of RWKV-4 [batch, 1, 3, channels]:
    # numerators, denominators, and the exponents of e by which both are to be multiplied
    wkv: NDArray[Any]
    ffn_shift: NDArray[Any]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter((self.att_shift, self.wkv, self.ffn_shift))


@typed(InputError)
class RWKVState(LayerCache[LayerState]):
    """The state after the tokens seen so far: a `LayerCache` whose layers are all RWKV's.

    Attributes:
        layers: one entry a layer.
        attention_mask: [batch, seq], 1 for tokens seen and 0 for padding; it gives the next tokens their positions.
    """

    NOUN = "state"
    KIND = "rwkv"
    PARTS = SHIFTED_STATE.parts

    @staticmethod
    def layer_of(parts: Parts) -> LayerState:
        return LayerState(**parts)

    @staticmethod
    def parts_of(layer: LayerState) -> Parts:
        return dict(vars(layer))

    def set_layer(
        self, layer: int, wkv: ArrayLike, att_shift: ArrayLike | None = None, ffn_shift: ArrayLike | None = None
    ) -> None:
        """Put another state in place of a layer's.

        Args:
            layer: 0-based.
            wkv: [batch, n_heads, key, value].
            att_shift, ffn_shift: [batch, hidden]; left as they are if they are left out.

        Raises:
            InputError: no such layer, another shape, or NaN.
        """
        self.put_layer(layer, {"att_shift": att_shift, "wkv": wkv, "ffn_shift": ffn_shift})

    @staticmethod
    def empty(sizes: Sizes, batch: int, dtype: DTypeLike, key_dim: int | None = None) -> RWKVState:
        """The state before the first token: zeros; `key_dim` is 3 of RWKV-4, else the size of a head."""
        shift = zeros((batch, sizes.hidden_size), dtype)
        wkv = zeros((batch, sizes.num_heads, key_dim or sizes.head_dim, sizes.head_dim), np.float32)
        # one array for all layers: methods replace arrays and never write into them
        return RWKVState([LayerState(shift, wkv, shift)] * sizes.num_layers, zeros((batch, 0), np.int64))
