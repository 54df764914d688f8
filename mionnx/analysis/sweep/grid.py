"""The grid of a sweep: its axes, its cells, what a cell selects; positions by name, so that prompts align."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import HookError, InputError, TokenizerError, nearest
from mionnx.graph.axes import CHOSEN, has_sequence, heads_axis, neurons_axis, sequence_axis
from mionnx.graph.hook_points import VARIANTS, HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.tokens import Tokens
from mionnx.machine.ranges import listed
from mionnx.run.prompt import Ids
from mionnx.run.runner import Runner
from mionnx.run.tokenizing import Prompt

Place = int | str | Sequence[int]
Positions = Mapping[str, Place | Sequence[Place]]
Places = tuple[tuple[int, ...], ...]  # of each name, token positions in one prompt
STATES = ("RwkvState", "SsmState")  # variants: at the end of a call
SWEEP_AXES = ("layer", "position", "head", "source", "neuron")


@dataclass(frozen=True)
class Grid:
    """The cells of a sweep."""

    over: tuple[str, ...]  # names of the axes, in the order of the result's
    template: str  # the hook point with `{i}` for the layer
    layers: tuple[int, ...]  # patched layers, ascending
    axes: tuple[str, ...]  # of the value at the hook point
    sizes: tuple[int, ...]  # number of entries of each axis in `over`
    places: Places | None = None  # of each entry of the position axis, in one prompt; None: an entry is a position

    def at(self, places: Places | None) -> "Grid":
        """The same cells in a prompt with named positions."""
        return self if places is None else replace(self, places=places)

    @property
    def cells(self) -> int:
        return int(np.prod(self.sizes))

    def hook(self, layer: int) -> str:
        return self.template.format(i=layer)

    def along(self, axis: str) -> int | None:
        """Index of the value's axis for an axis of the sweep; None for the layer."""
        if axis == "layer":
            return None
        finders = {"position": sequence_axis, "head": heads_axis, "neuron": neurons_axis}
        return self.axes.index("seq_k") if axis == "source" else finders[axis](self.axes)

    def layer_of(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array(self.layers)[np.unravel_index(cells, self.sizes)[self.over.index("layer")]]

    def selected(self, cells: NDArray[np.int64], shape: Sequence[int], first: int = 0) -> NDArray[np.bool_]:
        """[cells, ...]: mask of the entries that cells select in a value, whose sequence starts at position `first`."""
        mask = np.ones((len(cells), *[1] * (len(self.axes) - 1)), bool)
        for name, index in zip(self.over, np.unravel_index(cells, self.sizes), strict=True):
            axis = self.along(name)
            if axis is None:
                continue
            entries = np.arange(shape[axis]) + (first if name == "position" else 0)
            line = entries == index[:, None]
            # A named position may be several tokens: the cell patches them together.
            if name == "position" and self.places is not None:
                line = np.array([np.isin(entries, place) for place in self.places])[index]
            mask = mask & line.reshape([len(cells), *[-1 if i == axis else 1 for i in range(1, len(self.axes))]])
        return mask

    def position_of(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position of each cell; 0 where the sweep does not go over positions."""
        if "position" not in self.over:
            return np.zeros(len(cells), np.int64)
        entries = np.unravel_index(cells, self.sizes)[self.over.index("position")]
        return entries if self.places is None else np.array([min(place) for place in self.places])[entries]

    def by_cell(self, values: Sequence[NDArray[Any]], combine: Callable[..., Any]) -> NDArray[Any]:
        """Combine the numbers that each cell selects in each layer's value; 0 at positions that are not there."""
        # `values` have no batch axis, so each axis is one further to the front.
        axes = [axis - 1 for axis in map(self.along, self.over) if axis is not None]
        layers = []
        for numbers in values:
            if "position" in self.over and self.places is not None:
                at = sequence_axis(self.axes) - 1
                # A name's tokens may lie behind the end of a prompt that is cut at the position read.
                parts = [numbers.take([i for i in place if i < numbers.shape[at]], axis=at) for place in self.places]
                numbers = np.stack([combine(part, axis=at) for part in parts], axis=at)
            numbers = combine(numbers, axis=tuple(axis for axis in range(numbers.ndim) if axis not in axes))
            # `combine` left the axes in the value's order, the grid has its own.
            layers.append(numbers.transpose([sorted(axes).index(axis) for axis in axes]))
        cells = np.moveaxis(np.stack(layers), 0, self.over.index("layer"))
        # The grid is as wide as the uncut prompts; positions behind the one read have no effect.
        padded = np.zeros(self.sizes, cells.dtype)
        padded[tuple(map(slice, cells.shape))] = cells
        return padded


def make_grid(
    model: HookedModel,
    hook: str | HookPoint,
    over: str | Iterable[str],
    layers: Iterable[int] | None,
    seq: int | None,
    places: Places | None = None,
) -> Grid:
    """Make the grid of a sweep over a hook point; `seq` is None where prompts differ in length."""
    kinds = hook_kinds(model, hook)
    if len(kinds) > 1:
        raise HookError(f"{str(hook)!r} means several hook points, a sweep goes over one: {', '.join(kinds)}")
    ((template, available),) = kinds.items()
    point = HookPoint.parse(template.format(i=0))
    if point.variant in STATES:
        written = template.replace("hook_state", "hook_v")
        raise HookError(
            f"{template} is what the next call goes on with, and no logits of this one depend on it: sweep over "
            f"{written}, what tokens write into it"
        )
    chosen = _layers(template, available, layers)
    if not isinstance(over, Iterable):
        raise InputError(f"over={over!r} names no axes; it is one or several of {', '.join(SWEEP_AXES)}")
    axes, names = point.axes or (), (over,) if isinstance(over, str) else tuple(listed("over", over))
    valid = axes_to_go_over(point)
    for name in names:
        if not isinstance(name, str) or name not in valid:
            advice = _advice(model, str(name), point)
            raise InputError(f"{template} has no axis {name!r} to go over; it has {', '.join(valid)}{advice}")
    if len({*names}) != len(names) or "layer" not in names:
        raise InputError(f"over={names}: each axis once, and the layer among them (layers=[3] for one layer)")
    _refuse_unaligned(names, seq, places is not None)
    sizes = {"layer": len(chosen), "position": len(places or ()) or seq or 1, "source": seq or 1}
    for name, axis in (("head", heads_axis(axes)), ("neuron", neurons_axis(axes))):
        # Layers may differ in heads or neurons, and a grid is rectangular.
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
        valid = sorted({HookPoint.parse(name).short for name in names})
        near = nearest(str(hook), names) if "." in str(hook) else nearest(str(hook).removeprefix("hook_"), valid)
        raise HookError(
            f"this {model.metadata.family} model has no hook point {str(hook)!r} in its layers to sweep over; it has "
            f"{', '.join(valid)}{near}"
        )
    layers_of: dict[str, list[int]] = {VARIANTS[point.variant].template: [] for point in points}
    for point in sorted(points, key=lambda point: point.layer or 0):
        layers_of[VARIANTS[point.variant].template].append(point.layer or 0)
    return layers_of


def _layers(template: str, available: list[int], layers: Iterable[int] | None) -> tuple[int, ...]:
    if layers is None:
        return tuple(available)
    try:
        entries = [layers] if isinstance(layers, int | np.integer) else listed("layers", layers)
        if any(isinstance(layer, bool) for layer in entries):
            raise TypeError
        chosen = sorted({operator.index(layer) for layer in entries})
    except TypeError:
        raise InputError(f"layers={layers!r}: integers are expected, as [0, 3]") from None
    if not chosen or not {*chosen} <= {*available}:
        first, last = available[0], available[-1]
        contiguous = available == [*range(first, last + 1)] and first < last
        valid = f"{first} to {last}" if contiguous else ", ".join(map(str, available))
        raise InputError(f"layers {chosen} of {template}; the hook given means the layers {valid}")
    return tuple(chosen)


def find_places(model: Runner, prompts: Prompt, ids: Sequence[Ids], positions: Positions) -> list[Places]:
    """Find the token positions under each name in each prompt, of which `ids` are the tokens, [seq]; ascending from 0.

    `positions` is as in a `Comparison`; an entry of a prompt may be a list of several indices too.
    """
    if not isinstance(positions, Mapping) or not positions:
        raise InputError(f"positions={positions!r} names none; {{'subject': ['France', 'Spain'], 'last': -1}} does")
    texts = _texts(model, prompts, len(ids))
    columns = [_each(name, place, len(ids)) for name, place in positions.items()]
    return [
        tuple(
            _place_of(f"prompt {number}: position {name!r}", column[number], texts[number], len(row))
            for name, column in zip(positions, columns, strict=True)
        )
        for number, row in enumerate(ids)
    ]


def _texts(model: Runner, prompts: Any, count: int) -> list[Tokens | None]:
    """Prompts as tokenised texts; None for those that came as ids."""
    rows = model.ids(prompts)
    entries = [rows] if isinstance(rows, Tokens) else rows if isinstance(rows, list | tuple) else []
    # A list of integers is one prompt of ids, not several prompts; an encoding is ids, however many entries it has.
    return [one if isinstance(one, Tokens) else None for one in entries] if len(entries) == count else [None] * count


def _each(name: str, place: Any, count: int) -> list[Any]:
    place = place[()] if getattr(place, "ndim", None) == 0 else place  # the number in an array of one
    if isinstance(place, str) or not isinstance(place, Iterable):
        return [place] * count
    entries: list[Any] = [*place]
    if len(entries) != count:
        raise InputError(f"positions[{name!r}] has {len(entries)} entries for {count} prompts")
    return entries


def _place_of(what: str, place: Any, text: Tokens | None, length: int) -> tuple[int, ...]:
    if isinstance(place, str):
        if text is None:
            raise InputError(f"{what}: {place!r} is found in a text, and this prompt came as ids")
        try:
            return tuple(text.positions_of(place))
        except TokenizerError as error:
            raise InputError(f"{what}: {error}") from error
    indices = [*place] if isinstance(place, Iterable) else [place]
    for index in indices:
        if not isinstance(index, int | np.integer) or not -length <= index < length:
            raise InputError(f"{what}: {index!r} of {length} tokens (0 to {length - 1})")
    if not indices:
        raise InputError(f"{what} is an empty list")
    return tuple(sorted({int(index) % length for index in indices}))
