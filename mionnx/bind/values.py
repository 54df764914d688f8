"""Values, positions and masks of a spec as inputs of the graph, for one token batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mionnx.bind.hook_index import HookIndex
from mionnx.bind.knockout_mask import refuse_rows_without_keys
from mionnx.bind.plan import BoundCapture
from mionnx.bind.selection import Selection, refuse_unread
from mionnx.errors import InterventionError
from mionnx.graph.axes import heads_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.hooked_model import HookedModel
from mionnx.inputs.token_batch import Place, TokenBatch
from mionnx.rewrite.intervene import TOKEN_POSITIONS
from mionnx.spec.kinds.kind import ValueShape

NOWHERE = -2  # in an input of positions: selects no token; -1 is what padding has


def edit_inputs(
    selections: Sequence[Selection], hooks: HookIndex, batch: TokenBatch, shown: TokenBatch
) -> dict[str, NDArray[Any]]:
    """The inputs with the values, positions and masks of interventions.

    Args:
        shown: the batch without the tokens that state interventions hide from all layers.
    """
    # read by graphs with position limits alone: engines leave out what a graph does not read
    inputs: dict[str, NDArray[Any]] = {TOKEN_POSITIONS: batch.token_positions}
    for selection in selections:
        inputs |= _inputs(selection, hooks.dtype(HookPoint.parse(selection.edit.hook)))
    # together: two knockouts, each harmless, may leave a query without keys
    _refuse_blind(selections, shown, hooks.model)
    refuse_unread(selections)
    return inputs


def _inputs(selection: Selection, dtype: DTypeLike) -> dict[str, NDArray[Any]]:
    edit = selection.edit
    inputs = dict(zip(edit.value_inputs, selection.values(dtype), strict=True))
    if selection.positions is not None:
        inputs[edit.positions_input] = _table(selection.positions, selection.call.batch)
    if edit.masked:
        inputs[edit.mask_input] = selection.mask()
    if edit.at_experts is not None:
        inputs[edit.experts_input] = np.array(selection.intervention.experts)
    return inputs


def _table(positions: dict[int, list[int]], batch: int) -> NDArray[np.int64]:
    """Row -> positions as [batch, n]."""
    # rows may choose unequal numbers of positions: the rest points nowhere
    table = np.full((batch, max(1, *map(len, positions.values()))), NOWHERE, np.int64)
    for row, columns in positions.items():
        table[row, : len(columns)] = columns
    return table


def _refuse_blind(selections: Iterable[Selection], batch: TokenBatch, model: HookedModel) -> None:
    """Refuse knockouts that together leave an attention row without a key."""
    blocked: dict[int, NDArray[np.bool_]] = {}
    for selection in selections:
        layer = HookPoint.parse(selection.edit.hook).layer
        if selection.intervention.rules.shape is ValueShape.ATTENTION_MASK and layer is not None:
            here = np.isneginf(selection.knockout_mask.in_batch) & selection.selected()
            blocked[layer] = blocked[layer] | here if layer in blocked else here
    for layer, mask in blocked.items():
        window = model.metadata.window(layer)
        refuse_rows_without_keys(str(HookPoint.AttnScores(layer)), mask, batch, window)


def capture_inputs(captures: Iterable[BoundCapture], batch: TokenBatch) -> dict[str, NDArray[Any]]:
    """The inputs with the positions and heads of captures in part."""
    inputs: dict[str, NDArray[Any]] = {}
    for capture in captures:
        node, request = capture.node, capture.request
        if request.positions is not None:
            inputs[node.columns_input] = columns(f"capture at {node.hook}", request.positions, batch)
        if request.heads is not None:
            inputs[node.heads_input] = heads_of(capture)
    return inputs


def heads_of(capture: BoundCapture) -> NDArray[np.int64]:
    """The heads that a capture asks for, [n]."""
    count, heads = capture.dims[heads_axis(capture.node.axes) or 0], np.array(capture.request.heads, np.int64)
    if heads.max() >= int(count):
        raise InterventionError(f"capture at {capture.node.hook}: head {heads.max()} of {count}")
    return heads


def columns(what: str, positions: Sequence[Place], batch: TokenBatch) -> NDArray[np.int64]:
    """The columns of a token batch at which positions of each row's text stand, [batch, n]."""
    if batch.final_lengths is not None:
        raise InterventionError(f"{what}: a generation computes one position after another; choose them in `forward`")
    try:
        rows = [
            [batch.column_of[row].get(batch.absolute(position, row)) for position in positions]
            for row in range(batch.batch)
        ]
    except LookupError as error:
        raise InterventionError(f"{what}: {error}") from None
    return np.array(rows, np.int64)
