"""`LayerCache`: what one pass leaves for the next, layer by layer: keys and values, states, or both.

`KVCache` and `RWKVState` are the same cache where all layers are of one kind, each with its own names for the parts.

A saved cache is one `.safetensors` file: a tensor `{layer}.{part}` for each part of each layer, `attention_mask`, and
in its metadata `mionnx_cache`, its kind, and of several kinds of layers `mionnx_layers`, their number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mionnx.errors import InputError, SpecFileError, nearest
from mionnx.graph.io_names import KEYS_AND_VALUES
from mionnx.machine import memory
from mionnx.machine.arrays import LARGE_ARRAY, to_array
from mionnx.machine.brief import Brief, count, shape_of, spelled
from mionnx.machine.stored import Storable
from mionnx.machine.tensor_file import read_tensors, whose, write_tensors
from mionnx.machine.typed import refusal, typed

CACHE_KEY, LAYERS_KEY = "mionnx_cache", "mionnx_layers"
BY_POSITION = KEYS_AND_VALUES.parts  # parts with an entry for each token, along the axis after the heads


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
Layer = TypeVar("Layer")
Parts = Mapping[str, NDArray[Any]]  # name of a part of a layer -> its value


class LazyLayers(Sequence[Layer]):
    """Layers on the device that computed them, copied to the CPU one by one on access."""

    def __init__(self, parts: Sequence[Mapping[str, Value]], layer_of: Callable[[Parts], Layer]) -> None:
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
            own = self.parts[number].items()
            self._copied[number] = self.layer_of({name: np.asarray(value) for name, value in own})
        return self._copied[number]

    def __repr__(self) -> str:
        return f"<{len(self)} layers>"

    def replaced(self, number: int, parts: Parts) -> LazyLayers[Layer]:
        """The same layers but for one."""
        new = LazyLayers([parts if i == number else own for i, own in enumerate(self.parts)], self.layer_of)
        new._copied = {**self._copied, number: self.layer_of(parts)}  # copies of the other layers serve on
        return new


@typed(InputError)
@dataclass(repr=False)
class LayerCache(Brief, Storable, Generic[Layer]):
    """What the tokens seen so far leave in each layer: keys and values, a recurrent state, or both.

    Its own methods alone change a cache. They replace arrays and never write into them, so that a cache which was made
    from another one can be changed by itself.

    Attributes:
        layers: one entry a layer, {part: array}: "key" and "value" [batch, n_kv_heads, seq, head_dim] of a layer with
            attention, "conv" [batch, channels, kernel - 1], the last columns of a short convolution, and "state"
            [batch, n_heads, key_dim, value_dim] of one with a recurrence; empty of a layer that carries nothing.
        attention_mask: [batch, seq], 1 for tokens and 0 for padding.
        NOUN: for messages.
        KIND, PARTS: what the saved file calls it, and the parts of its layers where all have the same.
    """

    layers: Sequence[Layer]
    attention_mask: NDArray[np.int64]
    NOUN: ClassVar[str] = "cache"
    KIND: ClassVar[str] = "layers"
    PARTS: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def layer_of(parts: Parts) -> Any:
        """A layer as `layers` has it, from its parts."""
        return dict(parts)

    @staticmethod
    def parts_of(layer: Any) -> Parts:
        """The parts of an entry of `layers`."""
        parts: Parts = layer
        return parts

    @classmethod
    def left(cls, parts: Sequence[Mapping[str, Value]], attention_mask: NDArray[np.int64]) -> Self:
        """A cache of the outputs of a pass, on the device that computed them."""
        return cls(LazyLayers(parts, cls.layer_of), attention_mask)

    def device_parts(self) -> Sequence[Mapping[str, Value]]:
        """The parts of every layer on their device, to be fed again without a copy."""
        return self.layers.parts if isinstance(self.layers, LazyLayers) else [*map(self.parts_of, self.layers)]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __len__(self) -> int:
        """Number of layers, as transformers' caches have it."""
        return len(self.layers)

    @property
    def states_alone(self) -> bool:
        """Whether no layer has keys and values."""
        return not any(name in BY_POSITION for layer in self.device_parts() for name in layer)

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
        alike = Counter((part, shape_of(value)) for layer in self.device_parts() for part, value in layer.items())
        for (part, shape), layers in alike.items():
            yield f"{part} of {'each layer' if layers == self.num_layers else count(layers, 'layer')}: {shape}"

    def get_layer(self, layer: int) -> Layer:
        """The parts of one layer."""
        if not 0 <= layer < self.num_layers:
            count = self.num_layers
            raise InputError(f"layer {layer} of a {self.NOUN} with {count} layers (0 to {count - 1})")
        return self.layers[layer]

    def set_parts(self, layer: int, **parts: ArrayLike) -> None:
        """Put other arrays in place of parts of a layer: `cache.set_parts(3, state=array)`.

        Raises:
            InputError: no such layer or part, another shape, or NaN.
        """
        own = self.parts_of(self.get_layer(layer))
        for name in parts:
            if name not in own:
                raise InputError(f"layer {layer} has no part {name!r}, only {', '.join(own)}{nearest(name, own)}")
        self.put_layer(layer, parts)

    def put_layer(self, layer: int, parts: Mapping[str, ArrayLike | None]) -> None:
        """Put other parts in place of a layer's, cast to its dtypes; None leaves a part as it is.

        Raises:
            InputError: no such layer, no numbers, another shape, or NaN.
        """
        own = self.parts_of(self.get_layer(layer))
        other = {name: value for name, value in parts.items() if value is not None}
        new = {**own, **{name: _like(own[name], part, f"{name} of layer {layer}") for name, part in other.items()}}
        self._replace(layer, new)

    def _replace(self, layer: int, parts: Parts) -> None:
        if isinstance(self.layers, LazyLayers):
            self.layers = self.layers.replaced(layer, parts)
        else:
            self.layers = [self.layer_of(parts) if i == layer else one for i, one in enumerate(self.layers)]

    def clear_layer(self, layer: int) -> None:
        """Put zeros in place of a layer's parts, as before the first token."""
        own = self.parts_of(self.get_layer(layer)).items()
        self.put_layer(layer, {name: np.zeros_like(value) for name, value in own})

    def clone_layer_from(self, donor: Self, layer: int) -> None:
        """Take a layer from another one of the same kind and shape.

        Raises:
            InputError: no such layer in one of the two, or another shape.
        """
        self._check_donor(donor)
        own, other = self.parts_of(self.get_layer(layer)), donor.parts_of(donor.get_layer(layer))
        if own.keys() != other.keys():
            raise InputError(f"layer {layer}: the donor holds {[*other]}, this {self.NOUN} {[*own]}")
        self.put_layer(layer, other)

    def clone_layer_position_range(self, donor: Self, layer: int, start: int, end: int) -> None:
        """Take a layer's keys and values at positions [start, end) from another cache.

        Positions are columns of the cache, padding included. The two may differ in length.

        Raises:
            InputError: a range that one of the two does not hold, no such layer, another shape, or a layer with a
                recurrent state, which does not keep its positions apart.
        """
        self._check_donor(donor)
        own, other = self.parts_of(self.get_layer(layer)), donor.parts_of(donor.get_layer(layer))
        if not {*own, *other} <= {*BY_POSITION}:
            raise InputError(
                f"layer {layer}: a recurrent state does not keep its positions apart: take whole layers with "
                "clone_layer_from, or leave positions out while they are read, with HookSpec.set_state_knockout"
            )
        for cache, name in ((self, f"this {self.NOUN}"), (donor, "the donor")):
            if not 0 <= start < end <= cache.seq_len:
                raise InputError(f"positions {start} up to {end} of {name}, which holds {cache.seq_len}")
        new = {}
        for name, value in own.items():
            # all but seq, in which the two may differ
            if value.shape[:2] != other[name].shape[:2] or value.shape[3] != other[name].shape[3]:
                shapes = f"the donor holds {list(other[name].shape)}, this {self.NOUN} {list(value.shape)}"
                raise InputError(f"layer {layer}: {shapes}")
            new[name] = value.copy()
            new[name][:, :, start:end] = other[name][:, :, start:end]
        self.put_layer(layer, new)

    def trim_to(self, seq_len: int) -> None:
        """Forget all positions from `seq_len` on.

        Raises:
            InputError: it holds fewer, or a layer has a recurrent state, which cannot go back.
        """
        layers = [*map(self.parts_of, self.layers)]
        states = [number for number, layer in enumerate(layers) if not {*layer} <= {*BY_POSITION}]
        if states:
            where = "" if len(states) == len(layers) else f" in layer {states[0]}"
            raise InputError(
                f"a recurrent state{where} of {self.seq_len} positions cannot go back to {seq_len}: keep the "
                f"{self.NOUN} of an earlier call, or capture hook_states"
            )
        if not 0 <= seq_len <= self.seq_len:
            raise InputError(f"trim to {seq_len} positions: the cache holds {self.seq_len}")
        cut = [{name: value[:, :, :seq_len] for name, value in layer.items()} for layer in layers]
        self.layers = [*map(self.layer_of, cut)]
        self.attention_mask = self.attention_mask[:, :seq_len]

    def row(self, row: int) -> Self:
        """One row without its padding: keys and values are [1, n_kv_heads, tokens, head_dim]."""
        one = self.select([row])
        real = np.flatnonzero(one.attention_mask[0])
        layers = [
            {name: value[:, :, real] if name in BY_POSITION else value for name, value in one.parts_of(layer).items()}
            for layer in one.layers
        ]
        return type(self)([*map(self.layer_of, layers)], one.attention_mask[:, real])

    def _check_donor(self, donor: Any) -> None:
        if not isinstance(donor, type(self)):  # `typed` checks no `Self`
            raise InputError(refusal("donor", type(self), donor))

    def repeat(self, rows: int) -> Self:
        """Repeat a cache of one row: a prefix shared by many continuations.

        Raises:
            InputError: it has several rows already, or less than one row, or more than memory holds, are requested.
        """
        size = rows * sum(value.nbytes for layer in self.device_parts() for value in layer.values())
        if rows < 1 or (size > LARGE_ARRAY and size > memory.available()):
            raise InputError(f"repeat({rows}): one or more rows, and {memory.format_bytes(size)} of memory are needed")
        if self.batch != 1:
            raise InputError(f"only a {self.NOUN} of one row can be repeated, this one has {self.batch}")
        return self._of_each(lambda part: np.repeat(part, rows, axis=0))

    def select(self, rows: Sequence[int]) -> Self:
        """The keys and values, or the states, of some rows, in the order given; padding stays."""
        if any(not 0 <= row < self.batch for row in rows):
            raise InputError(f"rows {spelled([*rows])} of a {self.NOUN} of {self.batch} (0 to {self.batch - 1})")
        at = list(rows)
        return self._of_each(lambda part: part[at])

    def _of_each(self, function: Callable[[NDArray[Any]], NDArray[Any]]) -> Self:
        """The cache of what a function of rows makes of each part, and of the mask."""
        layers = [{name: function(part) for name, part in self.parts_of(layer).items()} for layer in self.layers]
        return type(self)([*map(self.layer_of, layers)], function(self.attention_mask))

    def _contents(self) -> dict[str, Any]:
        layers = [{name: np.asarray(value) for name, value in layer.items()} for layer in self.device_parts()]
        # parts that all layers have are not named in each
        stored = [tuple(layer[name] for name in self.PARTS) for layer in layers] if self.PARTS else layers
        return {"layers": stored, "attention_mask": self.attention_mask}

    @classmethod
    def _of_contents(cls, contents: dict[str, Any]) -> Self:
        stored = contents.pop("layers")
        layers = [dict(zip(cls.PARTS, parts, strict=True)) for parts in stored] if cls.PARTS else stored
        return cls([*map(cls.layer_of, layers)], **contents)

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, which appears when it is complete.

        Raises:
            InputError: it cannot be written, or has a dtype that safetensors does not have.
        """
        parts = {
            f"{i}.{part}": value for i, layer in enumerate(self.layers) for part, value in self.parts_of(layer).items()
        }
        facts = {CACHE_KEY: self.KIND} | ({} if self.PARTS else {LAYERS_KEY: str(self.num_layers)})
        try:
            write_tensors(path, {**parts, "attention_mask": self.attention_mask}, facts)
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
        names = cls._names(metadata, tensors)
        # names by number: a layer that is missing in the middle is seen by its name
        if names is None or tensors.keys() != {"attention_mask", *(name for layer in names for name in layer)}:
            raise InputError(f"{path} is damaged: it lacks or has too many of its parts ({len(tensors)} tensors)")
        for name, value in tensors.items():
            if np.isnan(value.astype(np.float32)).any():
                raise InputError(f"{path}: {name} has NaN")
        mask = tensors["attention_mask"]
        if mask.ndim != 2 or mask.dtype != np.int64 or not np.isin(mask, (0, 1)).all():
            raise InputError(f"{path}: the attention_mask must be int64 [batch, seq] of 0 and 1")
        layers = [{part: tensors[name] for name, part in layer.items()} for layer in names]
        positions = {value.shape for layer in layers for part, value in layer.items() if part in BY_POSITION}
        if any(len(shape) != 4 or shape[::2] != mask.shape for shape in positions):  # batch and seq
            raise InputError(f"{path} holds layers of the shapes {sorted(positions)} for {mask.shape}")
        return cls([*map(cls.layer_of, layers)], mask)

    @classmethod
    def _names(cls, metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> list[dict[str, str]] | None:
        """Of each layer of a saved cache the names of its tensors, and the parts that they are; None if none fit."""
        matches = [(match, int(match[1])) for name in tensors if (match := re.fullmatch(r"(\d{1,6})\.(\w+)", name))]
        if cls.PARTS:
            numbers = range(len({number for _, number in matches}))
            return [{f"{i}.{part}": part for part in cls.PARTS} for i in numbers] or None
        count = metadata.get(LAYERS_KEY, "")
        if not re.fullmatch(r"\d{1,6}", count) or any(number >= int(count) for _, number in matches):
            return None
        layers: list[dict[str, str]] = [{} for _ in range(int(count))]
        for match, number in matches:
            layers[number][match[0]] = match[2]
        return layers


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
