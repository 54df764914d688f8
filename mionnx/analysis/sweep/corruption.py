"""Corruption of a prompt by interventions: a run of the clean prompt with a spec in force.

The layers of a sweep are graphs of their own, so each takes the spec's interventions at its own hook points; the patch
of a cell comes after those at the same hook point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.bind.selection import Selection
from mionnx.errors import InputError
from mionnx.graph.axes import SEQUENCE_AXES
from mionnx.graph.hook_points import HookPoint
from mionnx.inputs.token_batch import make_token_batch
from mionnx.rewrite.plan import Edit, Outputs
from mionnx.run.prompt import Ids
from mionnx.run.runner import Runner
from mionnx.run.segments import EMBEDDING, Arrays, Rows
from mionnx.spec.hook_spec import HookSpec
from mionnx.spec.intervention import Intervention

EMBEDDINGS = (HookPoint.Embed.name, HookPoint.PosEmbed.name)  # hook points before the first layer
ALONE = Outputs(carried=False)


@dataclass(frozen=True)
class Corruption:
    """A spec on one prompt.

    Attributes:
        spec: its interventions.
        interventions: the same, each at one hook point.
        edits: each intervention's structure, and its inputs for one row and all positions.
    """

    spec: HookSpec
    interventions: Sequence[tuple[HookPoint, Intervention]]
    edits: Sequence[tuple[Edit, Arrays]]
    layers: int

    @cached_property
    def _places(self) -> list[int]:
        """Layer of each edit; `EMBEDDING` before the layers, the number of layers behind them."""
        points = [HookPoint.parse(edit.hook) for edit, _ in self.edits]
        behind = [EMBEDDING if point.name in EMBEDDINGS else self.layers for point in points]
        return [other if point.layer is None else point.layer for point, other in zip(points, behind, strict=True)]

    def count(self, hook: str) -> int:
        """Number of interventions at a hook point."""
        return sum(edit.hook == hook for edit, _ in self.edits)

    def at(self, layer: int, rows: Rows) -> dict[Edit, Arrays]:
        """The edits of one layer for some rows, from their first computed position on."""
        seq = rows.ids.shape[1]
        here = [one for one, place in zip(self.edits, self._places, strict=True) if place == layer]
        return {edit: _for_rows(edit, inputs, rows.count, rows.start, seq) for edit, inputs in here}


def _for_rows(edit: Edit, inputs: Mapping[str, NDArray[Any]], count: int, start: int, stop: int) -> Arrays:
    """Inputs of one row as those of several, from a position on."""
    repeated: Arrays = dict(inputs)
    for name, value in inputs.items():
        if name not in (*edit.value_inputs, edit.mask_input) or value.ndim != len(edit.axes):
            continue  # directions, weights, experts
        for axis, kind in enumerate(edit.axes):
            if kind in SEQUENCE_AXES and value.shape[axis] > 1:
                value = value.take(range(start, stop), axis=axis)
        repeated[name] = np.ascontiguousarray(np.broadcast_to(value, (count, *value.shape[1:])))
    return repeated


def corrupt(model: Runner, spec: HookSpec, ids: Ids) -> Corruption:
    """Bind a spec to one prompt, [seq].

    Raises:
        InputError: a spec without interventions, with captures or gradients, with state interventions, or with splices
            that bring hook points or read others.
        InterventionError: an intervention that does not fit the prompt, or does not change what is read.
    """
    if spec.captures or spec.gradients or spec.metric is not None:
        raise InputError("corrupted= takes interventions: leave captures, gradients and the metric out of the spec")
    if spec.state_knockouts or spec.state_steerings:
        raise InputError("a sweep does not take state interventions: corrupt by interventions at hook points")
    if not spec.interventions:
        raise InputError("corrupted= is a spec without interventions: the corrupted run would be the clean one")
    bound = model.binder.bind(spec, ALONE)
    if any(HookPoint.parse(edit.hook).variant == "Custom" or edit.reads is not None for edit, _ in bound.edits):
        raise InputError("a sweep takes no interventions inside a splice, and no splice that reads another hook point")
    batch = make_token_batch(ids[None], None, None, model.hooked.metadata.sizes)
    inputs = {**bound.values(batch), **bound.weights}
    bound.refuse_idle(batch, False, {0: [len(ids) - 1]})
    edits = [_masked(selection, inputs) for selection in bound.selections(batch)]
    return Corruption(spec, bound.hooks.interventions, edits, model.num_layers)


def _masked(selection: Selection, inputs: Mapping[str, NDArray[Any]]) -> tuple[Edit, Arrays]:
    """An edit with its own inputs, its positions as a mask: a layer's graph may lack them."""
    edit = selection.edit
    own = {name: array for name, array in inputs.items() if name.startswith(f"{edit.prefix}.")}
    if not edit.at_positions:
        return edit, own
    del own[edit.positions_input]
    return replace(edit, at_positions=False, masked=True), {**own, edit.mask_input: selection.selected()}
