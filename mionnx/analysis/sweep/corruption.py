"""Corruption of a prompt by interventions: a run with a spec in force, and `Noise`, the spec of causal tracing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.analysis.sweep.grid import Place, find_places
from mionnx.bind.selection import Selection
from mionnx.errors import InputError
from mionnx.graph.axes import SEQUENCE_AXES
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import make_token_batch
from mionnx.machine.brief import Brief, spelled
from mionnx.machine.ranges import at_least, at_most
from mionnx.machine.typed import typed
from mionnx.rewrite.plan import Edit, Outputs
from mionnx.run.prompt import Ids, prompt_ids
from mionnx.run.runner import Runner
from mionnx.run.segments import EMBEDDING, Arrays, Rows
from mionnx.run.tokenizing import Prompt
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

EMBEDDINGS = (
    HookPoint.Embed.name,
    HookPoint.PosEmbed.name,
    HookPoint.TokenTypeEmbed.name,
)  # hook points before the first layer
ALONE = Outputs(carried=False)
SIGMAS = 3.0  # if nothing is said, as in causal tracing
MOST_REPEATS = 1000  # draws for each prompt, each a run and a value [tokens, width]; a few tens do
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Corruption:
    """A spec on one prompt.

    The layers of a sweep are graphs of their own, so each takes the interventions at its own hook points.
    """

    spec: HookSpec
    interventions: Sequence[tuple[HookPoint, Intervention]]  # those of the spec, each at one hook point
    edits: Sequence[tuple[Edit, Arrays]]  # each intervention's structure, and its inputs for one row and all positions
    layers: int

    @cached_property
    def _places(self) -> list[int]:
        """Layer of each edit; `EMBEDDING` before the layers, the number of layers behind them."""
        points = [HookPoint.parse(edit.hook) for edit, _ in self.edits]
        # A hook point without a layer is an embedding or the final norm.
        behind = [EMBEDDING if point.name in EMBEDDINGS else self.layers for point in points]
        return [other if point.layer is None else point.layer for point, other in zip(points, behind, strict=True)]

    def count(self, hook: str) -> int:
        """Number of interventions at a hook point."""
        return sum(edit.hook == hook for edit, _ in self.edits)

    def at(self, layer: int, rows: Rows) -> dict[Edit, Arrays]:
        """The edits of one layer for some rows, from their first computed position on."""
        seq = rows.ids.shape[1]
        own = [one for one, place in zip(self.edits, self._places, strict=True) if place == layer]
        return {edit: _for_rows(edit, inputs, rows.count, rows.start, seq) for edit, inputs in own}


def _for_rows(edit: Edit, inputs: Mapping[str, NDArray[Any]], count: int, start: int, stop: int) -> Arrays:
    """Inputs of one row as those of several, from a position on."""
    repeated: Arrays = dict(inputs)
    for name, value in inputs.items():
        if name not in (*edit.value_inputs, edit.mask_input) or value.ndim != len(edit.axes):
            continue  # directions, weights, experts
        # An axis of size 1 is broadcast over positions, so there is nothing to cut.
        for axis, kind in enumerate(edit.axes):
            if kind in SEQUENCE_AXES and value.shape[axis] > 1:
                value = value.take(range(start, stop), axis=axis)
        # One value a row, in memory: `broadcast_to` alone gives a view of one row.
        repeated[name] = np.ascontiguousarray(np.broadcast_to(value, (count, *value.shape[1:])))
    return repeated


def corrupt(model: Runner, spec: HookSpec, ids: Ids, at: int | None = None) -> Corruption:
    """Bind a spec to one prompt, [seq], that is read at its last position or another one."""
    if spec.captures or spec.gradients or spec.metric is not None:
        raise InputError("corrupted= takes interventions: leave captures, gradients and the metric out of the spec")
    if spec.state_knockouts or spec.state_steerings:
        raise InputError("a sweep does not take state interventions: corrupt by interventions at hook points")
    if not spec.interventions:
        raise InputError("corrupted= is a spec without interventions: the corrupted run would be the clean one")
    bound = model.binder.bind(spec, ALONE)
    if any(HookPoint.parse(edit.hook).variant == "Custom" or edit.reads is not None for edit, _ in bound.edits):
        raise InputError("a sweep takes no interventions inside a splice, and no splice that reads another hook point")
    batch = make_token_batch(ids[None], None, None, model.hooked)
    inputs = {**bound.values(batch), **bound.weights}
    reads_all = not model.hooked.metadata.positional or model.hooked.metadata.head == "span"
    bound.refuse_idle(batch, False, None if reads_all else {0: [len(ids) - 1 if at is None else at]})
    edits = [_masked(selection, inputs) for selection in bound.selections(batch)]
    return Corruption(spec, bound.hooks.interventions, edits, model.num_layers)


def _masked(selection: Selection, inputs: Mapping[str, NDArray[Any]]) -> tuple[Edit, Arrays]:
    """An edit with its own inputs, its positions as a mask: a layer's graph may lack them."""
    edit = selection.edit
    own = {name: array for name, array in inputs.items() if name.startswith(f"{edit.prefix}.")}
    if not edit.at_positions:
        return edit, own
    # The graph of a layer may start behind some positions; a mask is cut with them, indices would have to be moved.
    del own[edit.positions_input]
    return replace(edit, at_positions=False, masked=True), {**own, edit.mask_input: selection.selected()}


def check_repeats(repeats: int) -> None:
    """Refuse a number of draws for each prompt out of its range."""
    at_least("repeats", repeats, 1)
    at_most("repeats", repeats, MOST_REPEATS)


@typed(InputError, leave=["positions"])
@dataclass(frozen=True, repr=False)
class Noise(Brief):
    """Gaussian noise at some tokens, as causal tracing corrupts its runs.

    The method is that of Meng et al. 2022 (arXiv:2202.05262, section 2.1).

    The numbers come from numpy's PCG64 generator, seeded with (`seed`, number of the prompt): the same arguments
    give the same noise. They are values of `Intervention.Add`, and never drawn inside the graph.

    Attributes:
        positions: the tokens: a string, whose tokens they are; an index; or a list with one of these for each prompt.
        sigmas: standard deviation of the noise, in standard deviations of the values that it is added to, over all
            numbers at the chosen tokens of all prompts of a call.
        std: standard deviation of the noise itself, in place of `sigmas`.
        repeats: draws for each prompt, 1 to 1,000.
        hook: a hook point [batch, seq, width].

    Example:
        noise = Noise("France", repeats=10)
        model.patch_sweep("The capital of France is", noise, metric="probability", answer="Paris")
    """

    positions: Place | Sequence[Place]
    sigmas: float | None = None
    std: float | None = None
    seed: int = 0
    repeats: int = 1
    hook: str | HookPoint = "hook_embed"

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        at_least("seed", self.seed, 0)
        if self.sigmas is not None and self.std is not None:
            raise InputError("sigmas= and std= are two ways to give one standard deviation: give one of them")
        for name, size in (("sigmas", self.sigmas), ("std", self.std)):
            if size is not None and not 0 < size < np.inf:
                raise InputError(f"{name}={size!r}: a number above 0")

    def specs(self, model: Runner, prompts: Prompt) -> list[list[HookSpec]]:
        """The interventions that add the noise: for each prompt, one spec a repeat."""
        axes = HookPoint.parse(self.hook).axes or ()
        if axes[:2] != ("batch", "seq") or len(axes) != 3:
            raise InputError(f"noise is added at a hook point [batch, seq, width]; {self.hook} is [{', '.join(axes)}]")
        ids = prompt_ids(model, prompts)
        places = [place for (place,) in find_places(model, prompts, ids, {"noise": self.positions})]
        spec = HookSpec().capture(self.hook)
        values = [model.forward(row, spec)[self.hook][0, list(at)] for row, at in zip(ids, places, strict=True)]
        std = self.std
        if std is None:  # of all numbers together
            # In float64, since the numbers of all prompts together may be millions.
            numbers = np.concatenate([value.ravel() for value in values]).astype(np.float64)
            std = (self.sigmas or SIGMAS) * float(numbers.std(ddof=1))
        return [
            [self._spec(noise, at) for noise in std * self._draws(number, (len(at), value.shape[-1]))]
            for number, (value, at) in enumerate(zip(values, places, strict=True))
        ]

    def _draws(self, number: int, shape: tuple[int, int]) -> Numbers:
        """[repeats, tokens, width] of one prompt, of standard deviation 1."""
        return np.random.default_rng([self.seed, number]).standard_normal((self.repeats, *shape))

    def _spec(self, noise: Numbers, at: tuple[int, ...]) -> HookSpec:
        add = Intervention.Add(noise.astype(np.float32)[None], positions=list(at))
        return HookSpec().intervene(self.hook, add)

    def _facts(self) -> Iterator[str]:
        yield f"at {spelled(self.positions)}"
        size = (
            f"{self.sigmas or SIGMAS:g} standard deviations" if self.std is None else f"standard deviation {self.std:g}"
        )
        yield f"{size} at {self.hook}"
        yield f"seed {self.seed}, {self.repeats} a prompt"
