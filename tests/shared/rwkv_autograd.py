"""Gradients of RWKV by torch's autograd through `rwkv_loop`: the oracle of `gradients`."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from rwkv_checkpoints import blinkdl
from rwkv_loop import Gates, Loop, state_sizes
from torch import Tensor

Gradients = dict[str, NDArray[np.float64]]


def gradients(
    version: int,
    ids: Sequence[int],
    seed: NDArray[np.float64],
    dtype: torch.dtype = torch.float64,
    state: int | None = None,
    draw: int = 0,
    stored: bool = False,
) -> Gradients:
    """The derivative of the sum of logits [seq, vocab] times `seed`, by the value at each hook point, [seq, ...].

    With `state`, of the last state [heads, key, value] of that layer in the place of the logits. With a `draw` above 0,
    the values at hook points are moved by one unit in the last place or none, at random: how far roundings carry.
    `stored` rounds the weights to float16 first.
    """
    random = torch.Generator().manual_seed(draw)
    weights = {name: tensor.half() if stored else tensor for name, tensor in blinkdl(version).items()}
    tensors = {name: tensor.to(dtype) for name, tensor in weights.items()}
    loop, kept = Loop(tensors, version, xp=torch), {}
    width = tensors["emb.weight"].shape[1]
    sizes = state_sizes(version, width)

    def keep(name: str, at: int, value: Tensor) -> Tensor:
        own = value.clone()  # what an intervention there changes: all that reads this reads the change
        if draw:
            own = own * (1 + torch.finfo(dtype).eps * torch.randint(-1, 2, own.shape, generator=random)).to(dtype)
        own.requires_grad_() if own.is_leaf else own.retain_grad()
        kept.setdefault(name, []).append(own)
        return own

    gates = Gates.ones(loop.layers, len(ids), sizes[0])
    gates.write, gates.erase = (torch.from_numpy(one).to(dtype) for one in (gates.write, gates.erase))
    shapes = (width,), sizes, (width,)
    empty = [[torch.zeros(shape, dtype=dtype) for shape in shapes] for _ in range(loop.layers)]
    logits = loop.run(list(ids), gates, keep, empty)
    value = logits if state is None else loop.states[state][1]
    (value * torch.from_numpy(seed).to(dtype)).sum().backward()
    return {
        name: np.stack([(torch.zeros_like(one) if one.grad is None else one.grad).double().numpy() for one in several])
        for name, several in kept.items()
        if any(one.grad is not None for one in several)
    }
