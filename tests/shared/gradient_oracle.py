"""Gradients of transformers' eager model by torch's autograd, in float64: the oracle of `gradients` and of `trace`."""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any

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


def local_gradients(
    model: PreTrainedModel, ids: NDArray[np.int64], at: Collection[str], end: str, vector: NDArray, position: int
) -> tuple[Gradients, Gradients]:
    """Values at some hook points, each [seq, hidden], and derivatives of a number at another by them.

    The number is the product of a vector and what is at the hook point `end` and a position; patterns, scales of norms
    and the values at `at` are constants but for the derivatives themselves.
    """
    model = deepcopy(model).double()
    prepare(model.config)
    leaves: dict[str, Tensor] = {}
    ends: list[Tensor] = []
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.register_forward_hook(_with_its_scale_held)

    def listen(name: str, value: Tensor, stream: bool) -> Tensor:
        if name.endswith("attn.hook_pattern"):
            return value.detach()
        if name in at:
            value = leaves[name] = value.detach().requires_grad_()
        if name == end:
            ends.append(value)
        return value

    tokens, ones = torch.from_numpy(ids[None]), torch.ones(1, len(ids), dtype=torch.int64)
    Cached(model, layout_of(model.config), listen)(tokens, ones, torch.arange(len(ids))[None], [])
    (ends[0][0, position] @ torch.tensor(vector, dtype=torch.float64)).backward()
    grads = {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in leaves.items()}
    values = {name: one.detach()[0].numpy() for name, one in leaves.items()}
    return values, {name: one[0].numpy() for name, one in grads.items()}


def _with_its_scale_held(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """The same numbers, as a linear map of what a norm reads."""
    x, bias = args[0], getattr(module, "bias", None)
    x = x - x.mean(-1, keepdim=True) if "LayerNorm" in type(module).__name__ else x
    rest = 0 if bias is None else bias.detach()
    return x * ((out - rest) / x).detach() + rest
