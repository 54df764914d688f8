"""The eager torch model as the oracle: every hook point's value, and every intervention written out again in torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from exporters.transformers.trace import run_eagerly
from mionnx import HookPoint, Intervention

Past = list[tuple[Tensor, ...]]
Edits = Sequence[tuple[HookPoint, Intervention]]


@dataclass
class Inputs:
    """A batch: ids and mask [batch, seq], how many of the tokens are run first as a past, and prompt lengths."""

    ids: np.ndarray
    mask: np.ndarray
    past: int = 0
    prompts: np.ndarray | None = None

    @property
    def positions(self) -> np.ndarray:
        return np.maximum(self.mask.cumsum(1) - 1, 0)

    @property
    def real(self) -> np.ndarray:
        """[batch, seq - past]: which of the tokens after the past are no padding."""
        return self.mask[:, self.past :].astype(bool)


@dataclass
class Outcome:
    """What the oracle gave: logits and captures of the tokens after the past, and the cache."""

    logits: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)
    cache: list[tuple[np.ndarray, ...]] = field(default_factory=list)


def run(model: PreTrainedModel, inputs: Inputs, edits: Edits = ()) -> Outcome:
    """One eager pass over the tokens after the past, the past itself made without edits."""
    outcome = Outcome(np.empty(0))
    ids, mask, positions = (torch.from_numpy(array) for array in (inputs.ids, inputs.mask, inputs.positions))
    past: Past = []
    if inputs.past:
        first = slice(None, inputs.past)
        _, past = run_eagerly(model, _ignore, ids[:, first], mask[:, first], positions[:, first], past)
    rest = slice(inputs.past, None)
    here = torch.where(mask[:, rest].bool(), positions[:, rest], -1)
    keys = torch.where(mask.bool(), positions, -1)
    ends = mask.sum(1) if inputs.prompts is None else torch.from_numpy(inputs.prompts)

    choice: dict[int | None, Tensor] = {}  # layer -> the experts that its tokens chose

    def listen(name: str, value: Tensor, stream: bool) -> Tensor:
        changed, this = value, HookPoint.parse(name)
        for point, intervention in edits:
            if point.name == name:
                chosen = changed if this.variant == "MlpExpertIndices" else choice.get(this.layer)
                edited = apply(changed, point, intervention, here, ends, keys, chosen)
                changed = sparing(edited, changed, here, keys) if spares(this, intervention) else edited
        if this.variant == "MlpExpertIndices":
            choice[this.layer] = changed
        if stream and changed is not value:
            value.copy_(changed)
            changed = value
        outcome.values[name] = changed.numpy().copy()
        return changed

    logits, cache = run_eagerly(model, listen, ids[:, rest], mask, positions[:, rest], past)
    outcome.logits = logits.numpy()
    outcome.cache = [tuple(part.numpy() for part in own) for own in cache]
    return outcome


def spares(point: HookPoint, intervention: Intervention) -> bool:
    return point.variant in ("AttnScores", "AttnPattern") and intervention.kind != "knockout"


def sparing(edited: Tensor, value: Tensor, here: Tensor, keys: Tensor) -> Tensor:
    """Queries and keys of padding stay as they are: a row alone has none."""
    real = (here >= 0)[:, None, :, None] & (keys >= 0)[:, None, None, -value.shape[-1] :]
    return torch.where(real, edited, value)


def _ignore(_name: str, value: Tensor, _stream: bool) -> Tensor:
    return value


def apply(
    value: Tensor,
    point: HookPoint,
    edit: Intervention,
    here: Tensor,
    ends: Tensor,
    keys: Tensor,
    choice: Tensor | None = None,
) -> Tensor:
    """An intervention in plain torch: the changed value where it is selected, the old one elsewhere."""
    given = None if edit.value is None else torch.from_numpy(np.asarray(edit.value, np.float32))
    if edit.kind == "add":
        changed = value + given
    elif edit.kind == "knockout":
        changed = value + _in_columns(given, value, here, keys)
    elif edit.kind == "scale":
        changed = value * given
    elif edit.kind == "zero":
        changed = torch.zeros_like(value)
    elif edit.kind == "replace":
        changed = given.expand_as(value).to(value.dtype)
    elif edit.kind == "project_out":
        changed = value - torch.einsum("...w,kw,kv->...v", value, given, given)
    elif edit.kind == "low_rank":
        write, read, offset = (torch.from_numpy(np.asarray(one, np.float32)) for one in edit.values)
        changed = value + (torch.einsum("...w,kw->...k", value, read) + offset) @ write
    else:
        raise NotImplementedError(edit.kind)
    selected = _selected(value, point, edit, here, ends)
    if edit.experts is not None and "n_chosen" in point.axes:
        of_them = torch.isin(choice, torch.tensor(edit.experts))
        selected &= of_them.reshape(of_them.shape + (1,) * (value.dim() - of_them.dim()))
    return torch.where(selected, changed, value)


def _in_columns(mask: Tensor, value: Tensor, here: Tensor, keys: Tensor) -> Tensor:
    """A mask over positions of each row's own text, at the columns in which they stand; 0 elsewhere.

    Its queries are those of the whole text, or of this call's tokens.
    """
    full = torch.zeros_like(value)
    mask = mask.expand(*value.shape[:2], *mask.shape[-2:])
    for row in range(len(value)):
        first = 0 if mask.shape[2] == keys.shape[1] else int(here[row][here[row] >= 0].min())
        for column, query in enumerate((here[row] - first).tolist()):
            for at, key in enumerate(keys[row].tolist()):
                if 0 <= query < mask.shape[2] and 0 <= key < mask.shape[3] and int(here[row, column]) >= 0:
                    full[row, :, column, at] = mask[row, :, query, key]
    return full


def _selected(value: Tensor, point: HookPoint, edit: Intervention, here: Tensor, ends: Tensor) -> Tensor:
    chosen = torch.ones_like(value, dtype=torch.bool)
    for axis, name in enumerate(point.axes):
        if name == "batch" and edit.rows is not None:
            chosen &= _line(value, axis, [i in edit.rows for i in range(value.shape[axis])])
        if name in ("n_heads", "n_kv_heads") and edit.heads is not None:
            chosen &= _line(value, axis, [i in edit.heads for i in range(value.shape[axis])])
        if name in ("d_mlp", "d_expert") and edit.neurons is not None:
            chosen &= _line(value, axis, [i in edit.neurons for i in range(value.shape[axis])])
        if name == "n_experts" and edit.experts is not None:
            chosen &= _line(value, axis, [i in edit.experts for i in range(value.shape[axis])])
        if name in ("seq", "seq_q") and edit.positions is not None:
            for row in range(len(value)):
                at = [_wanted(edit.positions, int(position), int(ends[row])) for position in here[row]]
                chosen[row] &= _line(value[row], axis - 1, at)
    return chosen


def _wanted(positions, position: int, end: int) -> bool:
    if isinstance(positions, str):
        return position >= 0 and (position < end) == (positions == "prompt")
    return any(
        _wanted(one, position, end) if isinstance(one, str) else position == (one if one >= 0 else one + end)
        for one in positions
    )


def _line(value: Tensor, axis: int, chosen: list[bool]) -> Tensor:
    return torch.tensor(chosen).reshape([-1 if i == axis else 1 for i in range(value.dim())])
