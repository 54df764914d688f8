"""The recurrent state of an RWKV model; its layers can be transplanted.

A saved state is one `.safetensors` file: `{layer}.att_shift`, `{layer}.wkv` and `{layer}.ffn_shift` a layer,
`attention_mask`, and in its metadata `mionnx_cache` = "rwkv".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mionnx.errors import InputError
from mionnx.graph.io_names import STATE
from mionnx.graph.metadata import Sizes
from mionnx.inputs.cache_file import read_cache
from mionnx.inputs.layer_cache import LayerCache, checked_like
from mionnx.inputs.value import Value
from mionnx.machine.arrays import zeros
from mionnx.machine.brief import Brief
from mionnx.machine.typed import typed

STATE_PARTS = STATE.parts


@dataclass(frozen=True, repr=False)
class LayerState(Brief):
    """One layer's state.

    Attributes:
        att_shift, ffn_shift: [batch, hidden], what the next token's time mix and channel mix are mixed with.
        wkv: [batch, n_heads, key, value], float32, what the recurrence has gathered.
    """

    att_shift: NDArray[Any]
    wkv: NDArray[Any]
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
    PARTS = STATE_PARTS

    @staticmethod
    def layer_of(parts: Iterable[NDArray[Any]]) -> LayerState:
        """The three parts."""
        return LayerState(*parts)

    def set_layer(
        self,
        layer: int,
        wkv: ArrayLike,
        att_shift: ArrayLike | None = None,
        ffn_shift: ArrayLike | None = None,
    ) -> None:
        """Put another state in place of a layer's.

        Args:
            layer: 0-based.
            wkv: [batch, n_heads, key, value].
            att_shift, ffn_shift: [batch, hidden]; left as they are if they are left out.

        Raises:
            InputError: no such layer, another shape, or NaN.
        """
        old = self.get_layer(layer)
        parts = (att_shift, wkv, ffn_shift)
        new = [
            before if value is None else checked_like(before, value, f"{part} of layer {layer}")
            for before, value, part in zip(old, parts, STATE_PARTS, strict=True)
        ]
        self.put_layer(layer, new)

    def clear_layer(self, layer: int) -> None:
        """Reset a layer to zeros, as before the first token."""
        att_shift, wkv, ffn_shift = (np.zeros_like(part) for part in self.get_layer(layer))
        self.set_layer(layer, wkv, att_shift, ffn_shift)

    def clone_layer_from(self, donor: RWKVState, layer: int) -> None:
        """Take a layer's state from another one of the same shape.

        Raises:
            InputError: no such layer in one of the two, or another shape.
        """
        att_shift, wkv, ffn_shift = donor.get_layer(layer)
        self.set_layer(layer, wkv, att_shift, ffn_shift)

    def clone_layer_position_range(self, donor: RWKVState, layer: int, start: int, end: int) -> None:
        """Refused: a recurrent state does not keep positions apart.

        Raises:
            InputError: always; it names what can be done instead.
        """
        raise InputError(
            "a recurrent state does not keep its positions apart: take whole layers with clone_layer_from, or leave "
            "positions out while they are read, with HookSpec.set_state_knockout"
        )

    def trim_to(self, seq_len: int) -> None:
        """Refused: a recurrent state cannot go back.

        Raises:
            InputError: always; it names what can be done instead.
        """
        raise InputError(
            f"a recurrent state of {self.seq_len} positions cannot go back to {seq_len}: keep the state of an "
            "earlier call, or capture hook_states"
        )

    def row(self, row: int) -> RWKVState:
        """One row, its padding forgotten: a state of one row.

        Raises:
            InputError: no such row.
        """
        one = self.select([row])
        return RWKVState(one.layers, one.attention_mask[:, one.attention_mask[0] == 1])

    @staticmethod
    def load(path: str | Path) -> RWKVState:
        """Read a state that `save` wrote.

        Raises:
            InputError: the file is missing, damaged, or no RWKV state.
        """
        tensors = read_cache(path, "rwkv", STATE_PARTS)
        count = (len(tensors) - 1) // len(STATE_PARTS)
        layers = [LayerState(*(tensors[f"{i}.{part}"] for part in STATE_PARTS)) for i in range(count)]
        return RWKVState(layers, tensors["attention_mask"])

    @staticmethod
    def empty(sizes: Sizes, batch: int, dtype: DTypeLike) -> RWKVState:
        """The state before the first token: zeros.

        Raises:
            InputError: a negative batch, one that memory does not hold, or a dtype that is none.
        """
        shift = zeros((batch, sizes.hidden_size), dtype)
        wkv = zeros((batch, sizes.num_heads, sizes.head_dim, sizes.head_dim), np.float32)
        return RWKVState([LayerState(shift, wkv, shift)] * sizes.num_layers, zeros((batch, 0), np.int64))

    def feeds(self, sizes: Sizes, batch: int, dtype: DTypeLike) -> dict[str, Value]:
        """The inputs of the graph.

        Raises:
            InputError: another number of layers, another shape or dtype, or NaN.
        """
        if self.num_layers != sizes.num_layers:
            raise InputError(f"the state has {self.num_layers} layers, the model {sizes.num_layers}")
        shift = (np.dtype(dtype), (batch, sizes.hidden_size))
        wkv = (np.dtype(np.float32), (batch, sizes.num_heads, sizes.head_dim, sizes.head_dim))
        feeds: dict[str, Value] = {}
        for i, layer in enumerate(self.held()):
            names = STATE.layer_inputs(i)
            for part, name, (kind, shape), given in zip(STATE_PARTS, names, (shift, wkv, shift), layer, strict=True):
                value: Value = given if hasattr(given, "__array__") else np.asarray(given)
                if value.shape != shape or value.dtype != kind:
                    raise InputError(
                        f"the state's {part} of layer {i} is {value.dtype} {list(value.shape)}, "
                        f"expected {kind} {list(shape)}"
                    )
                # what a call left is the model's own doing
                if isinstance(value, np.ndarray) and np.isnan(value).any():
                    raise InputError(f"the state's {part} of layer {i} has NaN")
                feeds[name] = value
        return feeds
