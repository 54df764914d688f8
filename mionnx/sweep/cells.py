"""The cells of a sweep: which axes are varied, and what each cell selects of a value."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError, InputError, nearest
from mionnx.hooked_model import HookedModel
from mionnx.hookpoint import VARIANTS, HookPoint, short_names
from mionnx.place import heads_axis
from mionnx.rewrite.intervene import sequence_axis

AXES = ("layer", "position", "head", "source")


@dataclass(frozen=True)
class Grid:
    """Everything that a sweep varies.

    Attributes:
        over: names of the axes, in the order of the result's.
        template: the hook point with `{i}` for the layer.
        layers: those that are patched, ascending.
        axes: the value's axes.
        sizes: how many there are of each of `over`.
    """

    over: tuple[str, ...]
    template: str
    layers: tuple[int, ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def cells(self) -> int:
        """How many."""
        return int(np.prod(self.sizes))

    def hook(self, layer: int) -> str:
        """The hook point of a layer."""
        return self.template.format(i=layer)

    def along(self, axis: str) -> int | None:
        """The axis of the value that an axis of the sweep runs along; None for the layer."""
        found = {"position": sequence_axis, "head": heads_axis, "source": lambda axes: axes.index("seq_k")}
        return None if axis == "layer" else found[axis](self.axes)

    def layer_of(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """The layer of each cell, by its number."""
        place = self.over.index("layer")
        return np.array(self.layers)[np.unravel_index(cells, self.sizes)[place]]

    def selected(self, cells: NDArray[np.int64], shape: Sequence[int], first: int = 0) -> NDArray[np.bool_]:
        """What cells select: [cells, ...], of the value's rank, 1 wide along axes that they do not limit.

        Args:
            cells: numbers of cells.
            shape: of the value.
            first: the position that the value's sequence begins with.
        """
        mask = np.ones((len(cells), *[1] * (len(self.axes) - 1)), bool)
        for name, index in zip(self.over, np.unravel_index(cells, self.sizes), strict=True):
            axis = self.along(name)
            if axis is not None:
                begin = first if name == "position" else 0
                line = np.arange(begin, begin + shape[axis]) == index[:, None]
                mask = mask & line.reshape([len(cells), *[-1 if i == axis else 1 for i in range(1, len(self.axes))]])
        return mask

    def position_of(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """The position of each cell; 0 where the sweep does not go over positions."""
        if "position" not in self.over:
            return np.zeros(len(cells), np.int64)
        return np.unravel_index(cells, self.sizes)[self.over.index("position")]


def make_grid(
    model: HookedModel, hook: str | HookPoint, over: str | Iterable[str], layers: Iterable[int] | None, seq: int | None
) -> Grid:
    """What a sweep over a hook point varies.

    Args:
        model: the hooked model.
        hook: a hook point of any layer, with `*` or `{i}` for the layer, or its short name: "hook_resid_pre", "z".
        over: names of axes, of `AXES`.
        layers: all if left out.
        seq: positions of the prompts; None if they differ in length.

    Raises:
        HookError: no such hook point.
        InputError: an axis that the value does not have, twice the same one, or a layer that does not exist.
    """
    template = _template(model, hook)
    variant = HookPoint.parse(template.format(i=0))
    chosen = _layers(model, template, layers)
    axes, names = variant.axes or (), (over,) if isinstance(over, str) else tuple(over)
    there = {"layer": True, "position": bool({"seq", "seq_q"} & {*axes}), "head": heads_axis(axes) is not None}
    there["source"] = "seq_k" in axes
    for name in names:
        if not there.get(name, False):
            valid = [axis for axis in AXES if there[axis]]
            near = nearest(str(name), valid)
            raise InputError(f"{template} has no axis {name!r} to go over; it has {', '.join(valid)}{near}")
    if len({*names}) != len(names) or "layer" not in names:
        raise InputError(f"over={names}: each axis once, and the layer among them (layers=[3] for one layer)")
    if seq is None and {"position", "source"} & {*names}:
        raise InputError("prompts of different lengths have no positions in common: go over layers and heads only")
    heads = heads_axis(axes)
    count = 1 if heads is None else int(model.axes(HookPoint.parse(template.format(i=chosen[0])))[heads])
    sizes = {"layer": len(chosen), "position": seq or 1, "source": seq or 1, "head": count}
    return Grid(names, template, chosen, axes, tuple(sizes[name] for name in names))


def _template(model: HookedModel, hook: str | HookPoint) -> str:
    given = str(hook)
    point = HookPoint.parse(given.replace("{i}", "0").replace("*", "0"))
    found = [VARIANTS[point.variant][0]] if point.variant in VARIANTS else short_names().get(_short(given), [])
    there = [template for template in found if "{i}" in template and _layers_of(model, template)]
    if not there:
        names = sorted({HookPoint.parse(name).short for name in model.metadata.hooks if name.startswith("blocks.")})
        raise HookError(
            f"this {model.metadata.family} model has no hook point {given!r} in its layers to sweep over; it has "
            f"{', '.join(names)}{nearest(_short(given), names)}"
        )
    return there[0]


def _short(given: str) -> str:
    return given.rpartition("hook_")[2] if "hook_" in given else given


def _layers_of(model: HookedModel, template: str) -> list[int]:
    layers = range(model.metadata.sizes.num_layers)
    return [layer for layer in layers if template.format(i=layer) in model.metadata.hooks]


def _layers(model: HookedModel, template: str, layers: Iterable[int] | None) -> tuple[int, ...]:
    there = _layers_of(model, template)
    chosen = there if layers is None else sorted({int(layer) for layer in layers})
    if not chosen or not {*chosen} <= {*there}:
        raise InputError(f"layers {chosen} of {template}; it is there in the layers {there[0]} to {there[-1]}")
    return tuple(chosen)
