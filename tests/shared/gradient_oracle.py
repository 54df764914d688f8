"""Gradients of transformers' eager model by torch's autograd, in float64: the oracle of `gradients`."""

from collections.abc import Callable, Mapping
from copy import deepcopy

import numpy as np
import torch
from numpy.typing import NDArray
from oracle import Inputs
from torch import Tensor
from transformers import PreTrainedModel

from exporters.transformers.families import layout_of
from exporters.transformers.trace import Cached, prepare

Gradients = dict[str, NDArray[np.float64]]
Keep = Callable[[str, Tensor], Tensor]


def gradients(
    model: PreTrainedModel,
    inputs: Inputs,
    seed: NDArray[np.float64],
    dtype: torch.dtype = torch.float64,
    changes: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    splices: Mapping[str, Callable[[Tensor, Keep], Tensor]] | None = None,
) -> Gradients:
    """The derivative of the sum of logits [batch, seq, vocab] times `seed`, by the value at each hook point.

    A value that torch reads elsewhere too (the MLP's input of olmo2 is the stream's own tensor) is copied at its hook
    point: what is meant is what an intervention there changes. `changes` has functions of the gradients at some hook
    points, whose results go on backwards; `splices` functions of the values at some, which may keep more.
    """
    model = deepcopy(model).to(dtype)
    prepare(model.config)
    values: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> Tensor:
        value.requires_grad_() if value.is_leaf else value.retain_grad()
        values[name] = value
        return value

    def listen(name: str, value: Tensor, stream: bool) -> Tensor:
        if not value.is_floating_point():  # the experts that a router chose
            return value
        if splices and name in splices:
            value = splices[name](value, keep)
        kept = keep(name, value if stream else value.clone())
        if changes and name in changes:
            kept.register_hook(changes[name])
        return kept

    ids, mask, positions = (torch.from_numpy(array) for array in (inputs.ids, inputs.mask, inputs.positions))
    logits, _ = Cached(model, layout_of(model.config), listen)(ids, mask, positions, [])
    (logits * torch.from_numpy(seed).to(dtype)).sum().backward()
    return {name: value.grad.double().numpy() for name, value in values.items() if value.grad is not None}
