"""Layers of compressed-tensors (llm-compressor): integers whose activations stay in floats.

1. pack-quantized: weight_packed int32 [outputs, inputs * bits / 32], neighbouring inputs in a word, the first in the
   lowest bits, 2^(bits - 1) more than the signed integers; weight_shape int64 [2].
2. int-quantized, naive-quantized: weight int8 [outputs, inputs], signed.
3. weight_scale [outputs, groups], one group for channels, or one number; weight_zero_point, where they are not
   symmetric: packed along the outputs, int32 [outputs * bits / 32, groups], or signed int8 as the scales stand.
4. weight_g_idx int32 [inputs]: the group of each input (actorder); -1 where it says nothing.
5. w = (q - z) s (compressed_tensors/compressors/pack_quantized, quantization/lifecycle/forward.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exporters.checkpoint_tensors import StoredTensor
from exporters.packed.linear import Linear, check_bits, check_groups, split_words, without_middle
from mionnx.errors import ExportError

PARTS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
ORDERS = frozenset(("true", "group", "dynamic"))  # values of actorder that leave the groups out of order
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")


def check(settings: Mapping[str, Any]) -> None:
    """Refuse what is not integers of weights alone: rounded activations, floats of 8 or 4 bits, sparse weights."""
    groups = settings.get("config_groups")
    for name, group in (groups if isinstance(groups, dict) else {}).items():
        kind = group.get("format") or settings.get("format")
        if group.get("input_activations") or group.get("output_activations"):
            raise ExportError(
                f"{name} of the quantization_config rounds activations too: mionnx reads checkpoints of compressed "
                f"weights, {FORMATS[0]} ('W4A16', 'W8A16')"
            )
        if kind not in FORMATS or (group.get("weights") or {}).get("type", "int") != "int":
            raise ExportError(
                f"{name} of the quantization_config is {kind!r}; {', '.join(FORMATS)} of integers are read"
            )
    for name in ("transform_config", "kv_cache_scheme"):
        if settings.get(name):
            raise ExportError(f"the quantization_config has a {name}, which no graph follows")
    sparse = settings.get("sparsity_config") or {}
    if sparse.get("format", "dense") != "dense":
        raise ExportError(f"its weights are sparse besides, {sparse['format']!r}: dense ones are read")


def layer(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    """One layer, of tensors that fit together."""
    packed = "weight_packed" in parts
    integers = parts["weight_packed" if packed else "weight"]
    # packed words are filled up at the end of a row: only weight_shape says how many inputs there are
    outputs, inputs = (int(size) for size in parts["weight_shape"].load()) if packed else integers.shape
    bits = check_bits(name, _width(integers.shape[1], inputs) if packed else 8)
    scale = _rows(parts["weight_scale"], outputs)
    groups, of_input = scale.shape[1], _groups(name, parts, inputs, scale.shape[1], settings)
    sizes = [size for size in _stated(settings, "group_size") if type(size) is int and size > 0]
    # one config may have groups of several sizes: the one that gives this layer's number of groups, else an even share
    size = next((size for size in sizes if -(-inputs // size) == groups), -(-inputs // groups))
    if len(scale) != outputs or integers.shape[0] != outputs or -(-inputs // size) != groups:
        raise ExportError(f"{name}: weight_scale {list(scale.shape)} does not fit a weight {[outputs, inputs]}")
    zeros = _zeros(parts, outputs, bits, scale.shape)

    def read() -> tuple[Any, Any]:
        values = integers.load().numpy()
        return split_words(values, bits)[:, :inputs] if packed else _unsigned(values, bits), scale

    return Linear(name, inputs, outputs, bits, size, of_input, without_middle(zeros, bits), read)


def _width(words: int, inputs: int) -> float:
    """The bits of an integer, of which as many as there are inputs fill so many words."""
    return next((bits for bits in (4, 8) if -(-inputs * bits // 32) == words), words * 32 / max(1, inputs))


def _stated(settings: Mapping[str, Any], key: str) -> list[Any]:
    """The values that the groups of the config have for their weights."""
    return [(group.get("weights") or {}).get(key) for group in (settings.get("config_groups") or {}).values()]


def _rows(stored: StoredTensor, outputs: int) -> NDArray[np.float32]:
    """Scales as [outputs, groups]."""
    scale = stored.load().to(torch.float32).numpy()
    return np.broadcast_to(scale.reshape(1, 1), (outputs, 1)) if scale.size == 1 else scale.reshape(len(scale), -1)


def _groups(
    name: str, parts: Mapping[str, StoredTensor], inputs: int, groups: int, settings: Mapping[str, Any]
) -> NDArray[np.int64] | None:
    if "weight_g_idx" not in parts:
        orders = {str(order).lower() for order in _stated(settings, "actorder")}
        if groups > 1 and not ORDERS.isdisjoint(orders):
            raise ExportError(f"{name} has no weight_g_idx, and actorder says that its groups are out of order")
        return None
    of_input = parts["weight_g_idx"].load().numpy().astype(np.int64)
    if (of_input == -1).all():  # registered and never set: groups are in order
        return None
    return check_groups(f"{name}: weight_g_idx", of_input, inputs, groups)


def _zeros(parts: Mapping[str, StoredTensor], outputs: int, bits: int, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Zero points, [outputs, groups]."""
    if "weight_zero_point" not in parts:
        return np.full(shape, 2 ** (bits - 1), np.uint8)
    stored = parts["weight_zero_point"]
    values = stored.load().numpy()
    if stored.dtype == torch.int32:
        return split_words(values.T, bits)[:, :outputs].T  # packed along the outputs
    points = _unsigned(values.astype(np.int8), bits)
    return np.broadcast_to(points.reshape(1, 1), shape) if points.size == 1 else points.reshape(shape)


def _unsigned(values: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    return (values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)  # int8 has no room for the sum
