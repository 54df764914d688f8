"""Base of `KVCache` and `RWKVState`: what one pass leaves for the next, layer by layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mionnx.errors import InputError
from mionnx.inputs.cache_file import write_cache
from mionnx.inputs.value import Value
from mionnx.machine import memory
from mionnx.machine.arrays import LARGE_ARRAY, to_array
from mionnx.machine.brief import Brief, count, shape_of, spelled
from mionnx.machine.stored import Storable
from mionnx.machine.typed import typed

Layer = TypeVar("Layer", bound=Iterable[NDArray[Any]])


class LazyLayers(Sequence[Layer]):
    """Layers on the device that computed them, copied to the CPU one by one on access.

    Attributes:
        parts: of every layer, arrays or values on a device.
        layer_of: a layer from its parts.
    """

    def __init__(self, parts: Sequence[tuple[Value, ...]], layer_of: Callable[[Iterable[NDArray[Any]]], Layer]) -> None:
        self.parts, self.layer_of = parts, layer_of
        self._made: dict[int, Layer] = {}

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | Sequence[Layer]:
        if isinstance(index, slice):
            return LazyLayers(self.parts[index], self.layer_of)
        number = range(len(self))[index]
        if number not in self._made:
            self._made[number] = self.layer_of(map(np.asarray, self.parts[number]))
        return self._made[number]

    def __repr__(self) -> str:
        return f"<{len(self)} layers>"

    def replaced(self, number: int, layer: Layer) -> "LazyLayers[Layer]":
        """The same layers but for one."""
        new = LazyLayers([tuple(layer) if i == number else parts for i, parts in enumerate(self.parts)], self.layer_of)
        new._made = {**self._made, number: layer}
        return new


@typed(InputError)
@dataclass(repr=False)
class LayerCache(Brief, Storable, ABC, Generic[Layer]):
    """Keys and values, or recurrent states, after the tokens seen so far.

    Attributes:
        layers: one entry a layer.
        attention_mask: [batch, seq], 1 for tokens and 0 for padding.
        NOUN: for messages.
        KIND, PARTS: what the saved file calls it, and the parts of its layers.
    """

    layers: Sequence[Layer]
    attention_mask: NDArray[np.int64]
    NOUN: ClassVar[str]
    KIND: ClassVar[str]
    PARTS: ClassVar[tuple[str, ...]]

    @staticmethod
    @abstractmethod
    def layer_of(parts: Iterable[NDArray[Any]]) -> Layer:
        """A layer from its parts."""

    @classmethod
    def left(cls, parts: Sequence[tuple[Value, ...]], attention_mask: NDArray[np.int64]) -> Self:
        """A cache of the outputs of a pass, on the device that computed them."""
        return cls(LazyLayers(parts, cls.layer_of), attention_mask)

    def held(self) -> Sequence[Iterable[Value]]:
        """The parts of every layer on their device, to be fed again without a copy."""
        return self.layers.parts if isinstance(self.layers, LazyLayers) else self.layers

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return int(self.attention_mask.shape[0])

    @property
    def seq_len(self) -> int:
        """Number of positions, padding included."""
        return int(self.attention_mask.shape[1])

    def _facts(self) -> Iterator[str]:
        yield from (count(self.num_layers, "layer"), count(self.batch, "row"), count(self.seq_len, "position"))

    def _lines(self) -> Iterator[str]:
        for part, value in zip(self.PARTS, next(iter(self.held()), ()), strict=False):
            yield f"{part} of each layer: {shape_of(value)}"

    def get_layer(self, layer: int) -> Layer:
        """The parts of one layer.

        Raises:
            InputError: no such layer.
        """
        if not 0 <= layer < self.num_layers:
            count = self.num_layers
            raise InputError(f"layer {layer} of a {self.NOUN} with {count} layers (0 to {count - 1})")
        return self.layers[layer]

    def put_layer(self, layer: int, parts: Iterable[NDArray[Any]]) -> None:
        """Put other parts in place of a layer's, unchecked."""
        new, layers = self.layer_of(parts), self.layers
        if isinstance(layers, LazyLayers):
            self.layers = layers.replaced(layer, new)
        else:
            self.layers = [new if i == layer else one for i, one in enumerate(layers)]

    def repeat(self, rows: int) -> Self:
        """Repeat a cache of one row: a prefix shared by many continuations.

        Raises:
            InputError: it has several rows already; less than one row, or more than memory holds, are asked for.
        """
        size = rows * sum(value.nbytes for layer in self.held() for value in layer)
        if rows < 1 or (size > LARGE_ARRAY and size > memory.available()):
            raise InputError(f"repeat({rows}): one or more rows, and {memory.format_bytes(size)} of memory are needed")
        if self.batch != 1:
            raise InputError(f"only a {self.NOUN} of one row can be repeated, this one has {self.batch}")
        layers = [self.layer_of(np.repeat(part, rows, axis=0) for part in layer) for layer in self.layers]
        return type(self)(layers, np.repeat(self.attention_mask, rows, axis=0))

    def select(self, rows: Sequence[int]) -> Self:
        """The keys and values, or the states, of some rows, in the order given; padding stays.

        Raises:
            InputError: a row that it does not have.
        """
        if any(not 0 <= row < self.batch for row in rows):
            raise InputError(f"rows {spelled([*rows])} of a {self.NOUN} of {self.batch} (0 to {self.batch - 1})")
        at = list(rows)
        layers = [self.layer_of(part[at] for part in layer) for layer in self.layers]
        return type(self)(layers, self.attention_mask[at])

    def _contents(self) -> dict[str, Any]:
        layers = [tuple(map(np.asarray, layer)) for layer in self.held()]
        return {"layers": layers, "attention_mask": self.attention_mask}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        return cls([cls.layer_of(parts) for parts in contents.pop("layers")], **contents)

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file."""
        parts = {
            f"{i}.{part}": value
            for i, layer in enumerate(self.layers)
            for part, value in zip(self.PARTS, layer, strict=True)
        }
        write_cache(path, self.KIND, {**parts, "attention_mask": self.attention_mask})


def checked_like(old: NDArray[Any], value: ArrayLike, what: str) -> NDArray[Any]:
    """Check a value against the one it replaces, and cast it to that one's dtype.

    Raises:
        InputError: no numbers, another shape, or NaN.
    """
    try:
        given = to_array(value)
    except ValueError as error:
        raise InputError(f"{what} must be numbers: {error}") from error
    if given.shape != old.shape:
        raise InputError(f"{what} must be {list(old.shape)}, got {list(given.shape)}")
    if np.isnan(given.astype(np.float32)).any():
        raise InputError(f"{what} must not have NaN")
    return given.astype(old.dtype)
