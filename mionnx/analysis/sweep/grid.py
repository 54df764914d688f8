"""The grid of a sweep: its axes, its cells, and the entries of a value that a cell selects."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError, InputError, nearest
from mionnx.graph.axes import CHOSEN, has_sequence, heads_axis, neurons_axis, sequence_axis
from mionnx.graph.hook_points import VARIANTS, HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.machine.ranges import listed

Places = tuple[tuple[int, ...], ...]
SWEEP_AXES = ("layer", "position", "head", "source", "neuron")


@dataclass(frozen=True)
class Grid:
    """The cells of a sweep.

    Attributes:
        over: names of the axes, in the order of the result's.
        template: the hook point with `{i}` for the layer.
        layers: patched layers, ascending.
        sizes: number of entries of each axis in `over`.
        places: token positions of each entry of the position axis, in one prompt; None: an entry is a position.
    """

    over: tuple[str, ...]
    template: str
    layers: tuple[int, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    places: Places | None = None

    def at(self, places: Places | None) -> "Grid":
        """The same cells in a prompt with named positions."""
        return self if places is None else replace(self, places=places)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return int(np.prod(self.sizes))

    def hook(self, layer: int) -> str:
        """The hook point of a layer."""
        return self.template.format(i=layer)

    def along(self, axis: str) -> int | None:
        """Index of the value's axis for an axis of the sweep; None for the layer."""
        if axis == "layer":
            return None
        finders = {"position": sequence_axis, "head": heads_axis, "neuron": neurons_axis}
        return self.axes.index("seq_k") if axis == "source" else finders[axis](self.axes)

    def layer_of(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """The layer of each cell, by its number."""
        return np.array(self.layers)[np.unravel_index(cells, self.sizes)[self.over.index("layer")]]

    def selected(self, cells: NDArray[np.int64], shape: Sequence[int], first: int = 0) -> NDArray[np.bool_]:
        """Mask of the entries that cells select.

        Args:
            shape: of the value.
            first: the position at which the value's sequence starts.

        Returns:
            [cells, ...] bool, of the value's rank; size 1 along axes that the cells do not limit.
        """
        mask = np.ones((len(cells), *[1] * (len(self.axes) - 1)), bool)
        for name, index in zip(self.over, np.unravel_index(cells, self.sizes), strict=True):
            axis = self.along(name)
            if axis is not None:
                begin = first if name == "position" else 0
                line = self._line(name, index, np.arange(begin, begin + shape[axis]))
                mask = mask & line.reshape([len(cells), *[-1 if i == axis else 1 for i in range(1, len(self.axes))]])
        return mask

    def _line(self, name: str, index: NDArray[np.int64], entries: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[cells, entries]: the entries of one axis that each cell selects."""
        if name != "position" or self.places is None:
            return entries == index[:, None]
        named = np.array([np.isin(entries, place) for place in self.places])
        return named[index]

    def position_of(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position of each cell; 0 where the sweep does not go over positions."""
        if "position" not in self.over:
            return np.zeros(len(cells), np.int64)
        entries = np.unravel_index(cells, self.sizes)[self.over.index("position")]
        return entries if self.places is None else np.array([min(place) for place in self.places])[entries]

    def by_name(self, numbers: NDArray[Any], axis: int, combine: Callable[..., Any]) -> NDArray[Any]:
        """Numbers by position as numbers by entry of the position axis.

        Args:
            numbers: with token positions along `axis`; positions that are not there count for nothing.
            axis: the index of that axis.
            combine: takes numbers and `axis=`, such as `np.any`.
        """
        if self.places is None:
            return numbers
        length = numbers.shape[axis]
        parts = [numbers.take([at for at in place if at < length], axis=axis) for place in self.places]
        return np.stack([combine(part, axis=axis) for part in parts], axis=axis)


def make_grid(
    model: HookedModel,
    hook: str | HookPoint,
    over: str | Iterable[str],
    layers: Iterable[int] | None,
    seq: int | None,
    places: Places | None = None,
) -> Grid:
    """Make the grid of a sweep over a hook point.

    Args:
        hook: a short name, "z" or "hook_resid_pre"; a name with `{i}` for the layer, or a glob; or a hook point of one
            layer, which is then the only one.
        over: names of axes, of `SWEEP_AXES`.
        layers: of those that the hook means; by default all of them.
        seq: positions of the prompts; None if they differ in length.
        places: named positions of one of the prompts; None if an entry of the position axis is a position.

    Raises:
        HookError: no such hook point, or several.
        InputError: an axis that the value does not have, a repeated axis, or a layer that does not exist.
    """
    kinds = hook_kinds(model, hook)
    if len(kinds) > 1:
        raise HookError(f"{str(hook)!r} means several hook points, a sweep goes over one: {', '.join(kinds)}")
    ((template, available),) = kinds.items()
    variant = HookPoint.parse(template.format(i=0))
    chosen = _layers(template, available, layers)
    if not isinstance(over, Iterable):
        raise InputError(f"over={over!r} names no axes; it is one or several of {', '.join(SWEEP_AXES)}")
    axes, names = variant.axes or (), (over,) if isinstance(over, str) else tuple(listed("over", over))
    valid = axes_to_go_over(variant)
    for name in names:
        if not isinstance(name, str) or name not in valid:
            advice = _advice(model, str(name), variant)
            raise InputError(f"{template} has no axis {name!r} to go over; it has {', '.join(valid)}{advice}")
    if len({*names}) != len(names) or "layer" not in names:
        raise InputError(f"over={names}: each axis once, and the layer among them (layers=[3] for one layer)")
    _refuse_unaligned(names, seq, places is not None)
    sizes = {"layer": len(chosen), "position": len(places or ()) or seq or 1, "source": seq or 1}
    for name, axis in (("head", heads_axis(axes)), ("neuron", neurons_axis(axes))):
        counts = {int(model.axes(HookPoint.parse(template.format(i=layer)))[axis or 0]) for layer in chosen if axis}
        if len(counts) > 1 and name in names:
            raise InputError(f"{template} has {sorted(counts)} {name}s, by layer: layers= of one size make a grid")
        sizes[name] = max(counts, default=1)
    return Grid(names, template, chosen, axes, tuple(sizes[name] for name in names))


def _refuse_unaligned(names: tuple[str, ...], seq: int | None, named: bool) -> None:
    """Refuse axes of prompts of different lengths, unless their positions are named."""
    if named and "position" not in names:
        raise InputError(f"positions= names the entries of an axis 'position', which over={names} does not have")
    if seq is None and ("source" in names or ("position" in names and not named)):
        raise InputError(
            "prompts of different lengths have no positions in common: go over layers and heads only, or name the "
            'positions of each prompt, as positions={"subject": ["France", "New Zealand"], "last": -1}'
        )


def axes_to_go_over(point: HookPoint) -> list[str]:
    """The axes that a sweep over a hook point may have."""
    axes = point.axes or ()
    has = {"layer": True, "position": has_sequence(axes), "head": heads_axis(axes) is not None}
    has |= {"source": "seq_k" in axes, "neuron": neurons_axis(axes) is not None and CHOSEN not in axes}
    return [axis for axis in SWEEP_AXES if has[axis]]


def _advice(model: HookedModel, name: str, point: HookPoint) -> str:
    """Advice for an axis that a hook point does not have."""
    axes = point.axes or ()
    if name == "neuron" and CHOSEN in axes:
        return (
            "; the neurons there are of the experts that each token chose, other ones at each position: intervene at "
            "them with experts= and neurons="
        )
    kinds = {HookPoint.parse(hook).short: HookPoint.parse(hook).axes or () for hook in model.metadata.hooks}
    with_neurons = [short for short, own in kinds.items() if neurons_axis(own) and CHOSEN not in own]
    if name == "neuron" and with_neurons:
        return f"; neurons are at {', '.join(f'hook_{short}' for short in with_neurons)}"
    return nearest(name, axes_to_go_over(point))


def hook_kinds(model: HookedModel, hook: str | HookPoint) -> dict[str, list[int]]:
    """The kinds of hook points that a name means: template -> its layers in the model."""
    names = [name for name in model.metadata.hooks if name.startswith("blocks.")]
    pattern_text = str(hook).replace("{i}", "*")
    short = pattern_text.removeprefix("hook_")
    matching = [name for name in names if HookPoint.parse(name).short == short]
    for pattern in (pattern_text, f"blocks.*.{pattern_text}"):  # "mlp.hook_act" is a name without its layer
        matching = matching or [name for name in names if fnmatchcase(name, pattern)]
    points = [HookPoint.parse(name) for name in matching]
    if not points:
        raise _unknown(model, str(hook), names)
    layers_of: dict[str, list[int]] = {}
    for layer, template in sorted((point.layer or 0, VARIANTS[point.variant].template) for point in points):
        layers_of.setdefault(template, []).append(layer)
    return {
        template: layers_of[template] for template in dict.fromkeys(VARIANTS[one.variant].template for one in points)
    }


def _unknown(model: HookedModel, request: str, names: list[str]) -> HookError:
    short = sorted({HookPoint.parse(name).short for name in names})
    near = nearest(request, names) if "." in request else nearest(request.removeprefix("hook_"), short)
    return HookError(
        f"this {model.metadata.family} model has no hook point {request!r} in its layers to sweep over; it has "
        f"{', '.join(short)}{near}"
    )


def _layers(template: str, available: list[int], layers: Iterable[int] | None) -> tuple[int, ...]:
    if layers is None:
        return tuple(available)
    try:
        entries = [layers] if isinstance(layers, int | np.integer) else listed("layers", layers)
        chosen = sorted({operator.index(layer) for layer in entries})
    except TypeError:
        raise InputError(f"layers={layers!r}: integers are expected, as [0, 3]") from None
    if not chosen or not {*chosen} <= {*available}:
        raise InputError(f"layers {chosen} of {template}; the hook given means the layers {_layers_text(available)}")
    return tuple(chosen)


def _layers_text(layers: list[int]) -> str:
    contiguous = layers == list(range(layers[0], layers[-1] + 1)) and len(layers) > 1
    return f"{layers[0]} to {layers[-1]}" if contiguous else ", ".join(map(str, layers))
