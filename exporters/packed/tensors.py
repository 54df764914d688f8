"""The tensors of a checkpoint of integers as those of one of floats: a weight for each packed layer."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from exporters.checkpoint_tensors import StoredTensor
from exporters.packed import awq, compressed, gptq, mxfp4
from exporters.packed.linear import Linear
from exporters.weight_files import some
from mionnx.errors import ExportError, boundary

FORMATS: dict[str, Any] = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed}
INDICES, FLOATS = (torch.int32, torch.int64), (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = {  # part -> what the packages write it as; other numbers would become integers and scales by a cast
    **dict.fromkeys(("qweight", "qzeros", "weight_packed"), (torch.int32,)),
    **dict.fromkeys(("g_idx", "weight_g_idx", "weight_shape"), INDICES),
    **dict.fromkeys(("scales", "weight_scale"), FLOATS),
    "weight_zero_point": (torch.int32, torch.int8),
    "weight": (torch.int8,),
}
FIRST = ("qweight", "weight_packed", "weight_scale")  # one of these makes a module a packed layer


def unpacked_tensors(
    tensors: list[StoredTensor], settings: Mapping[str, Any], family: str | None = None
) -> list[StoredTensor]:
    """Replace the parts of packed layers by their weights, which are made when they are loaded.

    Args:
        family: its model_type; None where nobody says.

    Raises:
        ExportError: layers that are not read, or none.
    """
    if settings["quant_method"] == "mxfp4":
        return mxfp4.unpacked_stacks(tensors, family)
    kind = FORMATS[settings["quant_method"]]
    if kind is compressed:
        with boundary(ExportError, "its quantization_config is damaged"):
            compressed.check(settings)
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in tensors:
        module, _, part = tensor.name.rpartition(".")
        if part in kind.PARTS:
            modules[module][part] = tensor
    packed = {name: parts for name, parts in modules.items() if any(part in parts for part in FIRST)}
    if not packed:
        raise ExportError(f"its config says {settings['quant_method']}, but no tensor is {' or '.join(FIRST)}")
    inside = {tensor.name for parts in packed.values() for tensor in parts.values()}
    weights = [_weight(name, parts, kind, settings) for name, parts in packed.items()]
    return [tensor for tensor in tensors if tensor.name not in inside] + weights


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weight(name: str, parts: Mapping[str, StoredTensor], kind: Any, settings: Mapping[str, Any]) -> StoredTensor:
    for part, tensor in parts.items():
        if tensor.dtype not in DTYPES[part]:
            expected, has = (" or ".join(map(_spelled, dtypes)) for dtypes in (DTYPES[part], [tensor.dtype]))
            raise ExportError(f"{tensor.name} is {has}; {settings['quant_method']} writes {expected}")
    shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
    with boundary(ExportError, f"{name}: tensors of other shapes than the format has: {shapes}"):
        try:
            linear: Linear = kind.layer(name, parts, settings)
        except KeyError as error:
            raise ExportError(f"{name} has {some(sorted(parts))}, and no {error.args[0]}") from error
    first = next(parts[part] for part in (*FIRST, "weight") if part in parts)
    shape = (linear.outputs, linear.inputs)
    return StoredTensor(f"{name}.weight", first.file, torch.float32, shape, first.offset, first.length, linear)
