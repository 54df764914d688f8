"""`RWKVState`, the recurrent state of an RWKV model; its layers can be transplanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.io_names import STATE
from mionnx.graph.metadata import Sizes
from mionnx.inputs.layer_cache import LayerCache, Value, fitting_feeds
from mionnx.machine.arrays import zeros
from mionnx.machine.brief import Brief
from mionnx.machine.typed import typed


@dataclass(frozen=True, repr=False)
class LayerState(Brief):
    """One layer's state."""

    # att_shift, ffn_shift: [batch, hidden], what the next token's time mix and channel mix are mixed with.
    att_shift: NDArray[Any]
    wkv: NDArray[Any]  # [batch, n_heads, key, value], float32, what the recurrence has gathered
    ffn_shift: NDArray[Any]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter((self.att_shift, self.wkv, self.ffn_shift))


@typed(InputError)
class RWKVState(LayerCache[LayerState]):
    """The state after the tokens seen so far.

    Attributes:
        layers: one entry a layer.
        attention_mask: [batch, seq], 1 for tokens seen and 0 for padding; it gives the next tokens their positions.
    """

    NOUN = "state"
    KIND = "rwkv"
    PARTS = STATE.parts

    @staticmethod
    def layer_of(parts: Iterable[NDArray[Any]]) -> LayerState:
        return LayerState(*parts)

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
        self.put_layer(layer, (att_shift, wkv, ffn_shift))

    def clone_layer_position_range(self, donor: RWKVState, layer: int, start: int, end: int) -> None:
        """Refused, with what can be done instead: a recurrent state does not keep positions apart."""
        raise InputError(
            "a recurrent state does not keep its positions apart: take whole layers with clone_layer_from, or leave "
            "positions out while they are read, with HookSpec.set_state_knockout"
        )

    def trim_to(self, seq_len: int) -> None:
        """Refused, with what can be done instead: a recurrent state cannot go back."""
        raise InputError(
            f"a recurrent state of {self.seq_len} positions cannot go back to {seq_len}: keep the state of an "
            "earlier call, or capture hook_states"
        )

    def row(self, row: int) -> RWKVState:
        """One row, its padding forgotten: a state of one row."""
        one = self.select([row])
        return RWKVState(one.layers, one.attention_mask[:, one.attention_mask[0] == 1])

    @staticmethod
    def empty(sizes: Sizes, batch: int, dtype: DTypeLike) -> RWKVState:
        """The state before the first token: zeros."""
        shift = zeros((batch, sizes.hidden_size), dtype)
        wkv = zeros((batch, sizes.num_heads, sizes.head_dim, sizes.head_dim), np.float32)
        # one array for all layers: methods replace arrays and never write into them
        return RWKVState([LayerState(shift, wkv, shift)] * sizes.num_layers, zeros((batch, 0), np.int64))

    def feeds(self, sizes: Sizes, batch: int, dtype: DTypeLike) -> dict[str, Value]:
        """The inputs of the graph.

        Raises:
            InputError: another number of layers, another shape or dtype, or NaN.
        """
        shift = (batch, sizes.hidden_size)
        layer = (shift, (batch, sizes.num_heads, sizes.head_dim, sizes.head_dim), shift)
        shapes = dict(zip(STATE.inputs(sizes.num_layers), layer * sizes.num_layers, strict=True))
        feeds = fitting_feeds(self, shapes, (dtype, np.float32, dtype))
        for name, value in feeds.items():
            # an array on a device is what a call left there: NaN in it is the model's own
            if isinstance(value, np.ndarray) and np.isnan(value).any():
                _, number, part = name.split(".")
                raise InputError(f"the state's {part} of layer {number} has NaN")
        return feeds
