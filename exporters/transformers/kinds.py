"""Kinds of layers: those that compute the same, and as many of them as have to be traced for all to be known.

Nothing is guessed from a config. The model without weights runs once on torch's meta device, and what each layer
computes is written down. A layer here is one of transformers' layers, which may hold several with hook points
(`Layout.layers`). Two are of one kind if these agree:

1. Every operator that torch dispatches, with its numbers and sizes, and where each tensor comes from: the stream, a
   weight of the layer by its name inside of it, the layer's past, numbers in the code, a value computed before all
   layers (the mask, the rotation, by which of them it is), an earlier operator of the layer, or a value of a layer
   named by its number.
2. Every hook point, and what it names.
3. The class and the attributes of every module in the layer. Its number is the only attribute that may differ; an
   object that is not understood is equal to itself alone.
4. The values of buffers that no checkpoint holds.

The first of a kind is traced, and every layer of which another one reads more than the stream. What layers share is
made in a graph where it is first needed, and is not made again (`stamp`); a weight that several share is of none.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from exporters.transformers.attention import Calls
from mionnx.graph.hook_points import HookPoint, layer_of

OUTSIDE = -1  # the layer of what is computed before all layers
INDEX = re.compile(r"layer|idx|index")  # names of attributes that may hold a layer's number
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
Past = Sequence[tuple[Tensor, Tensor]]
_TORCH = frozenset(vars(nn.Module())) | {"training"}


@dataclass(frozen=True)
class Kinds:
    """The layers of a model."""

    of: list[int]  # the kind of each layer, a number
    traced: list[int]  # the layers that a graph has to hold for the others to be made from them, ascending
    returned: int = 0  # how many values a layer returns in a tuple; 0 where it returns the stream alone
    halves: int = 1  # how many layers with hook points it holds
    shared: frozenset[str] = frozenset()  # names of the weights that are of no one layer, though their names say one

    @property
    def hooked(self) -> list[int]:
        """The traced layers as hook points number them."""
        return [layer * self.halves + half for layer in self.traced for half in range(self.halves)]

    def template(self, layer: int) -> int:
        """The traced layer that a layer is made from: the last traced one of its kind."""
        return max(other for other in self.traced if self.of[other] == self.of[layer])


def all_different(layers: int, halves: int = 1) -> Kinds:
    """Every layer a kind of its own: all are traced."""
    return Kinds([*range(layers)], [*range(layers)], halves=halves)


class Recorder(TorchDispatchMode):
    """Record of a run: the computation of each layer, as a list of hashable steps."""

    def __init__(self, model: nn.Module, blocks: str, inputs: Sequence[Tensor], past: Past, halves: int = 1) -> None:
        super().__init__()
        self.halves = halves
        self.steps: dict[int, list[Hashable]] = {OUTSIDE: []}  # layer -> its operators and hook points in order
        self.reads: dict[int, set[int]] = {OUTSIDE: set()}  # layer -> other layers of which it reads a value
        self.returned: set[int] = set()  # as in `Kinds`, the numbers that occur
        self.layer = OUTSIDE
        self._blocks = model.get_submodule(blocks)
        self._at: dict[int, tuple[Any, ...]] = {}
        self._kept: list[Tensor] = []  # so that no two tensors have one id
        self._literals = Calls(self._answer)
        self.shared = _shared(model, blocks)
        for name, tensor in _stored(model):
            layer, rest = (OUTSIDE, name) if name in self.shared else split(name, blocks)
            self._put(tensor, (layer, "weight", rest, str(tensor.dtype), tuple(tensor.shape)))
        for number, tensor in enumerate(inputs):
            self._put(tensor, (OUTSIDE, "input", number))
        for hooked, pair in enumerate(past):
            for number, tensor in enumerate(pair):
                self._put(tensor, (hooked // halves, "past", hooked % halves, number))

    def __enter__(self) -> Self:
        self._hooks = [block.register_forward_hook(self._note) for block in self._blocks.children()]
        super().__enter__()
        self._literals.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._literals.__exit__(*error)
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _note(self, _block: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        self.returned.add(len(output) if isinstance(output, tuple | list) else 0)

    def listen(self, name: str, value: Tensor, stream: bool) -> Tensor:
        """The taps' listener: note a hook point; layers begin at the stream before them."""
        if name == str(HookPoint.ResidPre(0)):
            self._put(value, (OUTSIDE, "stream"))
            self._begin(0)
        hooked = layer_of(name)
        layer, half = (None, 0) if hooked is None else divmod(hooked, self.halves)
        own = name if hooked is None else name.replace(f".{hooked}.", f".{half}.", 1)
        moved = None if layer in (None, self.layer) else layer  # a hook point of a layer inside another one
        self.steps[self.layer].append(("hook", own, moved, stream, self._token(value)))
        if layer is not None and name == str(HookPoint.ResidPost((layer + 1) * self.halves - 1)):
            self._put(value, (layer, "stream"))
            self._begin(layer + 1)
        return value

    def _answer(self, func: Any, args: Any, options: Any) -> Any:
        """Note tensors that modelling code makes of numbers: on the meta device nothing is left of these."""
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(self._index(one, args[0].device) for one in args[1])
        result = func(*args, **options)
        return self._literal(result, args[0]) if func is torch.tensor and _numbers(args[0]) else result

    def _index(self, index: Any, device: torch.device) -> Any:
        written = type(index) is list and _numbers(index)
        return self._literal(torch.tensor(index, device=device), index) if written else index

    def _literal(self, tensor: Tensor, numbers: Any) -> Tensor:
        self._put(tensor, (self.layer, "literal", (repr(numbers), str(tensor.dtype))))
        return tensor

    def _begin(self, layer: int) -> None:
        self.layer = layer
        self.steps.setdefault(layer, [])
        self.reads.setdefault(layer, set())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        place = len(self.steps[self.layer])
        self.steps[self.layer].append((str(func), self._token(args), self._token(kwargs or {})))
        for number, value in enumerate(result if isinstance(result, tuple | list) else [result]):
            if isinstance(value, Tensor) and (id(value) not in self._at or self._at[id(value)][1] == "made"):
                self._put(value, (self.layer, "made", place, number))
        return result

    def _put(self, tensor: Tensor, at: tuple[Any, ...]) -> None:
        self._kept.append(tensor)
        self._at[id(tensor)] = at

    def _token(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            return self._source(value)
        if isinstance(value, Mapping):
            return tuple((key, self._token(item)) for key, item in value.items())
        if isinstance(value, tuple | list):
            return tuple(self._token(item) for item in value)
        return plain(value)

    def _source(self, tensor: Tensor) -> Hashable:
        """Origin of a tensor, as seen from the current layer."""
        at = self._at.get(id(tensor))
        if at is None:
            return _constant(tensor)
        layer, *rest = at
        if layer == self.layer:
            return "own", *rest
        if rest == ["stream"] and layer == self.layer - 1:
            return "stream"
        self.reads[self.layer].add(layer)
        return at


def _numbers(value: Any) -> bool:
    """Whether a value is a number, or a list of such."""
    return all(map(_numbers, value)) if isinstance(value, tuple | list) else isinstance(value, bool | int | float)


def _constant(tensor: Tensor) -> Hashable:
    if tensor.device.type == "meta":
        return object()  # of unknown origin: equal to nothing else
    numbers = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return "constant", str(tensor.dtype), tuple(tensor.shape), numbers


def plain(value: Any) -> Hashable:
    """Hashable form of a number or a name; another object equals itself alone."""
    return (type(value).__name__, repr(value)) if isinstance(value, PLAIN) else ("object", id(value))


def split(name: str, blocks: str) -> tuple[int, str]:
    """Split a name into its layer and the rest; `OUTSIDE` and all of it if it is in none."""
    rest = name.removeprefix(f"{blocks}.")
    number, _, inside = rest.partition(".")
    return (int(number), inside) if rest != name and number.isdigit() else (OUTSIDE, name)


class _Attributes:
    """The classes and attributes of one layer's modules, as something hashable."""

    def __init__(self, block: nn.Module, layer: int, halves: int) -> None:
        self.block, self.layer, self.halves = block, layer, halves
        self.paths = {id(module): path for path, module in block.named_modules()}

    def all(self) -> tuple[Hashable, ...]:
        """Those of the layer and every module in it."""
        return tuple((path, type(module), *self._of(module)) for path, module in self.block.named_modules())

    def _of(self, module: nn.Module) -> Iterator[Hashable]:
        # the block knows its own number, its modules that of the half they are in
        halves = 1 if module is self.block else self.halves
        for name, value in sorted(vars(module).items()):
            if name not in _TORCH:
                numbered = type(value) is int and INDEX.search(name)
                half = (value - self.layer * halves) if numbered else None
                yield name, ("number of the layer", half) if half in range(halves) else self._value(value)

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, tuple | list):
            return type(value), *(self._value(item) for item in value)
        if isinstance(value, dict):
            return dict, *((plain(key), self._value(item)) for key, item in value.items())
        if isinstance(value, partial):
            return partial, self._value(value.func), self._value(value.args), self._value(value.keywords)
        if isinstance(value, MethodType):
            return MethodType, value.__func__, self._value(value.__self__)
        return self.paths.get(id(value), plain(value))


def kinds_of(model: nn.Module, blocks: str, recorder: Recorder, buffers: Mapping[str, Tensor]) -> Kinds:
    """Group a model's layers; `buffers` are those that no checkpoint holds, by name, with values."""
    layers, halves = list(model.get_submodule(blocks).children()), recorder.halves
    if len(recorder.returned) != 1:
        return all_different(len(layers), halves)
    by_layer: dict[int, list[Hashable]] = {}
    for name, buffer in sorted(buffers.items()):
        layer, rest = split(name, blocks)
        by_layer.setdefault(layer, []).append((rest, _constant(buffer)))
    signs = [
        (tuple(recorder.steps.get(i, [object()])), _Attributes(block, i, halves).all(), tuple(by_layer.get(i, [])))
        for i, block in enumerate(layers)
    ]
    numbers: dict[Hashable, int] = {}
    of = [numbers.setdefault(sign, len(numbers)) for sign in signs]
    return Kinds(of, _traced(of, recorder.reads), next(iter(recorder.returned)), halves, recorder.shared)


def _traced(of: list[int], reads: Mapping[int, set[int]]) -> list[int]:
    chosen = {of.index(kind) for kind in of}
    afar = {layer: reads.get(layer, set()) - {OUTSIDE} for layer in range(len(of))}
    # A layer that reads of another one, whatever it reads of its neighbour, is traced behind its own neighbour.
    while missing := {other for layer in chosen if afar[layer] for other in (layer - 1, *afar[layer])} - chosen:
        chosen |= missing
    return sorted(chosen)


def _stored(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a model, shared ones by each of their names."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _shared(model: nn.Module, blocks: str) -> frozenset[str]:
    """The names of parameters and buffers that are in several layers, or in one and outside of them."""
    owners: dict[int, set[int]] = {}
    for name, tensor in _stored(model):
        owners.setdefault(id(tensor), set()).add(split(name, blocks)[0])
    return frozenset(name for name, tensor in _stored(model) if len(owners[id(tensor)]) > 1)
