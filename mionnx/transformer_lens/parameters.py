"""The module of a bridge: its weights, views of the graph's own or arrays of folded ones, and a pass on the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.modeling_outputs import CausalLMOutput

from mionnx.analysis.weights.weights import Weights
from mionnx.errors import HookError, InputError, MIError
from mionnx.transformer_lens.weight_gradients import PlacedWeight

Array = NDArray[Any]
# Arguments of transformers that say how, and not what: without a cache or lists of states they change nothing here.
MANNER = ("use_cache", "return_dict")
NORMS = ("ln1", "ln1_post", "ln2", "ln2_post")


def make_room(module: torch.nn.Module) -> None:
    """Give a module without weights parameters that nobody has written to, and that so take no memory."""
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:  # bridges split some before they have numbers
                part._parameters[key] = torch.nn.Parameter(torch.empty(parameter.shape), requires_grad=False)


def set_weights(bridge: Any, weights: Weights, layers: int) -> tuple[dict[str, int], list[PlacedWeight]]:
    """Give the modules of a bridge these weights: the bytes of views, and those of copies; where each has gone.

    A weight that the graph does not name stays on torch's device "meta", which holds no numbers and refuses to be read.
    """
    counts, places = {"views": 0, "copies": 0}, list[PlacedWeight]()
    for module, key, array, vector in _named(bridge, weights, layers):
        own = getattr(module, "original_component", module)
        if vector is None:
            array = _laid_out(own, array)
        tensor, view = _tensor(array)
        counts["views" if view else "copies"] += tensor.numel() * tensor.element_size()
        old = getattr(own, key, None)
        if old is not None and tuple(old.shape) != tuple(tensor.shape):
            raise InputError(f"{type(own).__name__}.{key} is {list(old.shape)}, and the graph's {list(tensor.shape)}")
        if key in own._buffers:
            own._buffers[key] = tensor
        elif old is not None or bool(tensor.any()):
            parameter = torch.nn.Parameter(tensor)
            setattr(own, key, parameter)
            places.append(PlacedWeight(module, key, parameter, vector is None and type(own).__name__ != "Conv1D"))
    placed = {id(one.parameter) for one in places}
    for part in {*bridge.modules(), *bridge.original_model.modules()}:
        for key, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in placed:
                empty = torch.empty(parameter.shape, device="meta")
                part._parameters[key] = torch.nn.Parameter(empty)
    return counts, places


def _named(bridge: Any, weights: Weights, layers: int) -> Iterator[tuple[Any, str, Array, bool | None]]:
    """Modules, names of their parameters, numbers, and whether these are a vector."""
    yield bridge.embed, "weight", weights.W_E, True
    if hasattr(bridge, "pos_embed") and (table := _read(weights, "W_pos")) is not None:
        yield bridge.pos_embed, "weight", table, True
    if hasattr(bridge, "unembed"):
        yield bridge.unembed, "weight", weights.W_U, None
        yield bridge.unembed, "bias", weights.b_U, True
    yield from _norm(bridge.ln_final, weights, "ln_final", 0)
    for layer in range(layers):
        block = bridge.blocks[layer]
        for name in NORMS:
            if name in block._modules:
                yield from _norm(block._modules[name], weights, name, layer)
        parts = {"q": "Q", "k": "K", "v": "V", "o": "O"}
        for name, letter in parts.items():
            yield from _linear(block.attn, name, weights, letter, layer)
        for name, word in {"in": "in", "gate": "gate", "out": "out"}.items():
            yield from _linear(block.mlp, name, weights, word, layer)


def _linear(
    parent: Any, name: str, weights: Weights, word: str, layer: int
) -> Iterator[tuple[Any, str, Array, bool | None]]:
    module = parent._modules.get(name)
    weight = None if module is None else _read(weights, f"W_{word}", layer)
    if weight is None:
        return
    if word in ("Q", "K", "V"):  # [head, d_model, d_head]
        weight = np.moveaxis(weight, 1, 2).reshape(-1, weight.shape[1]).T
    elif word == "O":
        weight = weight.reshape(-1, weight.shape[-1])
    yield module, "weight", weight, None
    bias = _read(weights, f"b_{word}", layer)
    if bias is not None:
        yield module, "bias", bias.reshape(-1), True


def _norm(module: Any, weights: Weights, name: str, layer: int) -> Iterator[tuple[Any, str, Array, bool | None]]:
    weight = _read(weights, f"{name}_w", layer)
    if weight is None:
        return
    yield module, "weight", weight - 1 if module.uses_weight_offset else weight, True
    bias = _read(weights, f"{name}_b", layer)
    if bias is not None:
        yield module, "bias", bias, True


def _read(weights: Weights, name: str, layer: int = 0) -> Array | None:
    try:
        return weights.reader.read(name, layer)
    except (HookError, MIError):
        return None


def _laid_out(module: Any, matrix: Array) -> Array:
    """A matrix [in, out] as its module holds it."""
    return matrix if type(module).__name__ == "Conv1D" else matrix.T


def _tensor(array: Array) -> tuple[torch.Tensor, bool]:
    """An array as a tensor of float32, and whether it is a view of the weight file."""
    view = array.dtype == np.float32 and not array.flags.writeable
    if view and (mapped := _private(array)) is not None:
        return torch.from_numpy(mapped), True
    return torch.from_numpy(np.array(array, np.float32)), False


def _private(array: Array) -> Array | None:
    """The same numbers of the same file in pages that may be written: torch knows no array that may not."""
    base: Any = array
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)  # numbers inside a graph are bytes
    if base is None or base.filename is None:
        return None
    start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0] + base.offset
    raw = np.memmap(base.filename, np.uint8, "c")
    return np.ndarray(array.shape, array.dtype, raw, start, array.strides)


def serve_module(bridge: Any) -> None:
    """Give the module of a bridge a forward that runs the bridge: logits, and the loss where it is given labels."""
    module = bridge.original_model

    def forward(
        input_ids: Any = None, attention_mask: Any = None, labels: Any = None, position_ids: Any = None, **options: Any
    ) -> CausalLMOutput:
        """Run the engine.

        Raises:
            InputError: arguments that ask for more than logits and a loss.
        """
        others = [name for name, value in options.items() if value not in (None, False) and name not in MANNER]
        if others or input_ids is None:
            raise InputError(
                f"{', '.join(others) or 'no input_ids'}: the module's pass runs on the engine, which takes input_ids, "
                "attention_mask, position_ids and labels; hidden states and patterns are values of hook points"
            )
        logits = bridge.forward(input_ids, attention_mask=attention_mask, position_ids=position_ids)
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    module.forward = forward
