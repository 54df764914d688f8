"""Base of `KVCache` and `RWKVState`: what one pass leaves for the next, layer by layer.

A saved cache is one `.safetensors` file: a tensor `{layer}.{part}` for each part of each layer, `attention_mask`, and
in its metadata `mionnx_cache`, its kind.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mionnx.errors import InputError, SpecFileError
from mionnx.machine import memory
from mionnx.machine.arrays import LARGE_ARRAY, to_array
from mionnx.machine.brief import Brief, count, shape_of, spelled
from mionnx.machine.stored import Storable
from mionnx.machine.tensor_file import read_tensors, whose, write_tensors
from mionnx.machine.typed import refusal, typed

CACHE_KEY = "mionnx_cache"


class ArrayOnDevice(Protocol):
    """An array on another device; `np.asarray` copies it to the CPU."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its axes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of its numbers."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]: ...


Value = NDArray[Any] | ArrayOnDevice  # an input or output of a pass
Layer = TypeVar("Layer", bound=Iterable[NDArray[Any]])


class LazyLayers(Sequence[Layer]):
    """Layers on the device that computed them, copied to the CPU one by one on access."""

    def __init__(self, parts: Sequence[tuple[Value, ...]], layer_of: Callable[[Iterable[NDArray[Any]]], Layer]) -> None:
        self.parts, self.layer_of = parts, layer_of
        self._copied: dict[int, Layer] = {}

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Layer]: ...
    def __getitem__(self, index: int | slice) -> Layer | Sequence[Layer]:
        if isinstance(index, slice):
            return LazyLayers(self.parts[index], self.layer_of)
        number = range(len(self))[index]  # negative ones count from the end, others are refused
        if number not in self._copied:
            self._copied[number] = self.layer_of(map(np.asarray, self.parts[number]))
        return self._copied[number]

    def __repr__(self) -> str:
        return f"<{len(self)} layers>"

    def replaced(self, number: int, layer: Layer) -> LazyLayers[Layer]:
        """The same layers but for one."""
        new = LazyLayers([tuple(layer) if i == number else parts for i, parts in enumerate(self.parts)], self.layer_of)
        new._copied = {**self._copied, number: layer}  # copies of the other layers serve on
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

    def device_parts(self) -> Sequence[Iterable[Value]]:
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
        for part, value in zip(self.PARTS, next(iter(self.device_parts()), ()), strict=False):
            yield f"{part} of each layer: {shape_of(value)}"

    def get_layer(self, layer: int) -> Layer:
        """The parts of one layer."""
        if not 0 <= layer < self.num_layers:
            count = self.num_layers
            raise InputError(f"layer {layer} of a {self.NOUN} with {count} layers (0 to {count - 1})")
        return self.layers[layer]

    def put_layer(self, layer: int, parts: Iterable[ArrayLike | None]) -> None:
        """Put other parts in place of a layer's, cast to its dtypes; None leaves a part as it is.

        Raises:
            InputError: no such layer, no numbers, another shape, or NaN.
        """
        own = zip(self.PARTS, self.get_layer(layer), parts, strict=True)
        new = self.layer_of(
            [old if part is None else _like(old, part, f"{name} of layer {layer}") for name, old, part in own]
        )
        if isinstance(self.layers, LazyLayers):
            self.layers = self.layers.replaced(layer, new)
        else:
            self.layers = [new if i == layer else one for i, one in enumerate(self.layers)]

    def clear_layer(self, layer: int) -> None:
        """Put zeros in place of a layer's parts, as before the first token."""
        self.put_layer(layer, map(np.zeros_like, self.get_layer(layer)))

    def clone_layer_from(self, donor: Self, layer: int) -> None:
        """Take a layer from another one of the same kind and shape.

        Raises:
            InputError: no such layer in one of the two, or another shape.
        """
        self._check_donor(donor)
        self.put_layer(layer, donor.get_layer(layer))

    def _check_donor(self, donor: Any) -> None:
        if not isinstance(donor, type(self)):  # `typed` checks no `Self`
            raise InputError(refusal("donor", type(self), donor))

    def repeat(self, rows: int) -> Self:
        """Repeat a cache of one row: a prefix shared by many continuations.

        Raises:
            InputError: it has several rows already, or less than one row, or more than memory holds, are requested.
        """
        size = rows * sum(value.nbytes for layer in self.device_parts() for value in layer)
        if rows < 1 or (size > LARGE_ARRAY and size > memory.available()):
            raise InputError(f"repeat({rows}): one or more rows, and {memory.format_bytes(size)} of memory are needed")
        if self.batch != 1:
            raise InputError(f"only a {self.NOUN} of one row can be repeated, this one has {self.batch}")
        layers = [self.layer_of(np.repeat(part, rows, axis=0) for part in layer) for layer in self.layers]
        return type(self)(layers, np.repeat(self.attention_mask, rows, axis=0))

    def select(self, rows: Sequence[int]) -> Self:
        """The keys and values, or the states, of some rows, in the order given; padding stays."""
        if any(not 0 <= row < self.batch for row in rows):
            raise InputError(f"rows {spelled([*rows])} of a {self.NOUN} of {self.batch} (0 to {self.batch - 1})")
        at = list(rows)
        layers = [self.layer_of(part[at] for part in layer) for layer in self.layers]
        return type(self)(layers, self.attention_mask[at])

    def _contents(self) -> dict[str, Any]:
        layers = [tuple(map(np.asarray, layer)) for layer in self.device_parts()]
        return {"layers": layers, "attention_mask": self.attention_mask}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        return cls([cls.layer_of(parts) for parts in contents.pop("layers")], **contents)

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, which appears when it is complete.

        Raises:
            InputError: it cannot be written, or has a dtype that safetensors does not have.
        """
        parts = {
            f"{i}.{part}": value
            for i, layer in enumerate(self.layers)
            for part, value in zip(self.PARTS, layer, strict=True)
        }
        try:
            write_tensors(path, {**parts, "attention_mask": self.attention_mask}, {CACHE_KEY: self.KIND})
        except SpecFileError as error:
            raise InputError(f"the cache cannot be saved: {error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            InputError: the file is missing, damaged, of another kind, lacks a part, or holds NaN.
        """
        metadata, tensors = read_tensors(path, f"{path} is no saved cache", InputError)
        if metadata.get(CACHE_KEY) != cls.KIND:
            raise InputError(f"{path} is no saved cache of kind {cls.KIND!r}: {whose(metadata)}")
        numbers = range(len({match[1] for name in tensors if (match := re.fullmatch(r"(\d+)\.\w+", name))}))
        layers = [[f"{i}.{part}" for part in cls.PARTS] for i in numbers]
        # names by number: a layer that is missing in the middle is seen by its name
        if tensors.keys() != {"attention_mask", *(name for names in layers for name in names)} or not layers:
            raise InputError(f"{path} is damaged: it lacks or has too many of its parts ({len(tensors)} tensors)")
        for name, value in tensors.items():
            if np.isnan(value.astype(np.float32)).any():
                raise InputError(f"{path}: {name} has NaN")
        mask = tensors["attention_mask"]
        if mask.ndim != 2 or mask.dtype != np.int64 or not np.isin(mask, (0, 1)).all():
            raise InputError(f"{path}: the attention_mask must be int64 [batch, seq] of 0 and 1")
        return cls([cls.layer_of(tensors[name] for name in names) for names in layers], mask)


def _like(old: NDArray[Any], value: ArrayLike, what: str) -> NDArray[Any]:
    try:
        array = to_array(value)
    except ValueError as error:
        raise InputError(f"{what} must be numbers: {error}") from error
    if array.shape != old.shape:
        raise InputError(f"{what} must be {list(old.shape)}, got {list(array.shape)}")
    if np.isnan(array.astype(np.float32)).any():
        raise InputError(f"{what} must not have NaN")
    return array.astype(old.dtype)


def fitting_feeds(
    cache: LayerCache[Any], shapes: Mapping[str, tuple[int, ...]], dtypes: Sequence[DTypeLike]
) -> dict[str, Value]:
    """A cache as the inputs of a graph; another number of layers, shape or dtype is refused."""
    if cache.num_layers != (layers := len(shapes) // len(cache.PARTS)):
        raise InputError(f"the {cache.NOUN} has {cache.num_layers} layers, the model {layers}")
    feeds: dict[str, Value] = {}
    parts = [part for layer in cache.device_parts() for part in layer]
    kinds = [np.dtype(one) for one in dtypes] * layers
    for (name, shape), dtype, part in zip(shapes.items(), kinds, parts, strict=True):
        value: Value = part if hasattr(part, "__array__") else np.asarray(part)
        if value.shape != shape or value.dtype != dtype:
            _, layer, kind = name.split(".")
            raise InputError(
                f"the {cache.NOUN}'s {kind} of layer {layer} is {value.dtype} {list(value.shape)}, "
                f"expected {dtype} {list(shape)}"
            )
        feeds[name] = value
    return feeds
