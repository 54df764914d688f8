"""The tensors of a checkpoint of integers as those of one of floats: a weight for each packed layer.

GPTQ, as AutoGPTQ and GPTQModel write it (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, `forward` without CUDA):

1. qweight int32 [inputs * bits / 32, outputs]: neighbouring inputs in a word, the first in the lowest bits.
2. qzeros int32 [groups, outputs * bits / 32], packed likewise along the outputs: zero points less one (`gptq`), or as
   they are (`checkpoint_format` `gptq_v2`). A zero point of 0 is held as all ones by the first.
3. scales float16 [groups, outputs]; g_idx int32 [inputs]: the group of each input, out of order with desc_act.
4. w = (q - z) s.

AWQ, as AutoAWQ writes it, of 4 bits (awq/utils/packing_utils.py, `dequantize_gemm`; awq/modules/linear/gemv.py):

1. gemm: qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8]: eight neighbouring outputs in a word,
   in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on; scales float16 [groups, outputs].
2. gemv: qweight int32 [outputs, inputs / 8], qzeros int32 [outputs, groups / 8], scales float16 [outputs, groups], the
   last two filled up; neighbours in order.
3. w = (q - z) s.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from exporters.checkpoint_tensors import StoredTensor
from exporters.packed import compressed, mxfp4
from exporters.packed.linear import Linear, check_bits, check_groups, split_words, without_middle
from exporters.weight_files import some
from mionnx.errors import ExportError, boundary

WORDS = ("qweight", "qzeros", "scales")
GPTQ_FORMATS = ("gptq", "gptq_v2")  # values of checkpoint_format
AWQ_VERSIONS = ("gemm", "gemv")
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of neighbouring outputs in a word of gemm
AWQ_BITS = 4
AWQ_GROUP = 128  # where the config says none, as in transformers' AwqConfig
INDICES, FLOATS = (torch.int32, torch.int64), (torch.float16, torch.bfloat16, torch.float32, torch.float64)
PART_DTYPES = {  # part -> what the packages write it as; other numbers would become integers and scales by a cast
    **dict.fromkeys(("qweight", "qzeros", "weight_packed"), (torch.int32,)),
    **dict.fromkeys(("g_idx", "weight_g_idx", "weight_shape"), INDICES),
    **dict.fromkeys(("scales", "weight_scale"), FLOATS),
    "weight_zero_point": (torch.int32, torch.int8),
    "weight": (torch.int8,),
}
FIRST = ("qweight", "weight_packed", "weight_scale")  # one of these makes a module a packed layer


def gptq_layer(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    """One layer of GPTQ."""
    kind = settings.get("checkpoint_format") or "gptq"
    if kind not in GPTQ_FORMATS or settings.get("is_marlin_format"):
        raise ExportError(
            f"{name}: checkpoint_format {kind!r} is a layout of one kernel; save it as gptq or gptq_v2, which are read"
        )
    (rows, outputs), (groups, columns) = parts["qweight"].shape, parts["qzeros"].shape
    # from qzeros, packed along the outputs, whose number is known: that of the inputs follows from the bits
    bits = check_bits(name, columns * 32 / outputs if outputs else 0)
    inputs = rows * 32 // bits
    size = _group_size(name, settings.get("group_size"), inputs, groups)
    if parts["scales"].shape != (groups, outputs):
        raise ExportError(f"{name}: scales {list(parts['scales'].shape)} do not fit qzeros {[groups, columns]}")
    zeros = split_words(parts["qzeros"].load().numpy(), bits)
    if kind == "gptq":
        zeros = zeros + np.uint8(1) & np.uint8(2**bits - 1)  # one less is stored; all ones stand for 0
    if settings.get("desc_act") and "g_idx" not in parts and groups > 1:
        raise ExportError(f"{name} has no g_idx, and desc_act says that its {groups} groups of inputs are out of order")
    of_input = parts["g_idx"].load().numpy().astype(np.int64) if "g_idx" in parts else None
    if of_input is not None:
        check_groups(f"{name}: g_idx", of_input, inputs, groups)

    def read() -> tuple[Any, Any]:
        words = parts["qweight"].load().numpy()
        return split_words(words.T, bits), parts["scales"].load().float().numpy().T

    return Linear(name, inputs, outputs, bits, size, of_input, without_middle(zeros.T, bits), read)


def _group_size(name: str, stated: Any, inputs: int, groups: int) -> int:
    size = inputs if stated in (None, -1) else stated
    if type(size) is int and size > 0 and -(-inputs // size) == groups:
        return size
    if groups and inputs % groups == 0:
        return inputs // groups
    raise ExportError(f"{name}: {groups} groups of {inputs} inputs, and the config says a group_size of {stated}")


def awq_layer(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    """One layer of AWQ."""
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version not in AWQ_VERSIONS:
        raise ExportError(f"{name}: version {version!r} of AWQ is not read; save it as gemm or gemv, which are")
    return (_gemm if version == "gemm" else _gemv)(name, parts, settings)


def _gemm(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    (inputs, words), (groups, columns), scales = (parts[part].shape for part in WORDS)
    outputs = scales[-1]
    if words * len(AWQ_PLACES) != outputs:
        raise ExportError(f"{name}: qweight {[inputs, words]} has no {AWQ_BITS} bits for each of {outputs} outputs")
    if scales != (groups, outputs) or columns != words or not groups or not inputs or inputs % groups:
        raise ExportError(f"{name}: scales {list(scales)} and qzeros {[groups, columns]} do not fit {inputs} inputs")

    def in_order(words: Any) -> Any:
        placed = split_words(words, AWQ_BITS)
        return placed.reshape(len(placed), -1, len(AWQ_PLACES))[..., AWQ_PLACES].reshape(placed.shape)

    zeros = in_order(parts["qzeros"].load().numpy())

    def read() -> tuple[Any, Any]:
        return in_order(parts["qweight"].load().numpy()).T, parts["scales"].load().float().numpy().T

    return Linear(name, inputs, outputs, AWQ_BITS, inputs // groups, None, without_middle(zeros.T, AWQ_BITS), read)


def _gemv(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    (outputs, words), points, scales = (parts[part].shape for part in WORDS)
    inputs, stated = words * 32 // AWQ_BITS, (settings.get(key) for key in ("group_size", "q_group_size"))
    group = next((size for size in stated if size is not None), AWQ_GROUP)
    size = inputs if group == -1 else group
    if type(size) is not int or not 0 < size <= inputs:
        raise ExportError(f"{name}: a group_size of {group!r} is none of {inputs} inputs")
    groups = -(-inputs // size)
    if points[0] != outputs or scales[0] != outputs or points[1] * 8 < groups or scales[1] < groups:
        raise ExportError(f"{name}: scales {list(scales)} and qzeros {list(points)} do not fit {inputs} inputs")
    zeros = split_words(parts["qzeros"].load().numpy(), AWQ_BITS)[:, :groups]

    def read() -> tuple[Any, Any]:
        scale = parts["scales"].load().float().numpy()[:, :groups]
        return split_words(parts["qweight"].load().numpy(), AWQ_BITS), scale

    return Linear(name, inputs, outputs, AWQ_BITS, size, None, without_middle(zeros, AWQ_BITS), read)


class Format(NamedTuple):
    """The tensors of a packed layer, and what makes a layer of them and the `quantization_config`."""

    parts: tuple[str, ...]
    layer: Callable[[str, Mapping[str, StoredTensor], Mapping[str, Any]], Linear]


FORMATS = {
    "gptq": Format((*WORDS, "g_idx"), gptq_layer),
    "awq": Format(WORDS, awq_layer),
    "compressed-tensors": Format(compressed.PARTS, compressed.layer),
}


def unpacked_tensors(
    tensors: list[StoredTensor], settings: Mapping[str, Any], family: str | None = None
) -> list[StoredTensor]:
    """Replace the parts of packed layers by their weights, which are made when they are loaded."""
    if settings["quant_method"] == "mxfp4":
        return mxfp4.unpacked_stacks(tensors, family)
    kind = FORMATS[settings["quant_method"]]
    if kind.layer is compressed.layer:
        with boundary(ExportError, "its quantization_config is damaged"):
            compressed.check(settings)
    modules: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in tensors:
        module, _, part = tensor.name.rpartition(".")
        if part in kind.parts:
            modules[module][part] = tensor
    packed = {name: parts for name, parts in modules.items() if any(part in parts for part in FIRST)}
    if not packed:
        raise ExportError(f"its config says {settings['quant_method']}, but no tensor is {' or '.join(FIRST)}")
    inside = {tensor.name for parts in packed.values() for tensor in parts.values()}
    weights = [_weight(name, parts, kind, settings) for name, parts in packed.items()]
    return [tensor for tensor in tensors if tensor.name not in inside] + weights


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weight(name: str, parts: Mapping[str, StoredTensor], kind: Format, settings: Mapping[str, Any]) -> StoredTensor:
    for part, tensor in parts.items():
        if tensor.dtype not in PART_DTYPES[part]:
            expected, has = (" or ".join(map(_spelled, dtypes)) for dtypes in (PART_DTYPES[part], [tensor.dtype]))
            raise ExportError(f"{tensor.name} is {has}; {settings['quant_method']} writes {expected}")
    shapes = {part: list(tensor.shape) for part, tensor in parts.items()}
    with boundary(ExportError, f"{name}: tensors of other shapes than the format has: {shapes}"):
        try:
            linear = kind.layer(name, parts, settings)
        except KeyError as error:
            raise ExportError(f"{name} has {some(sorted(parts))}, and no {error.args[0]}") from error
    # place and length of the integers, for who asks in which file a weight lies
    first = next(parts[part] for part in (*FIRST, "weight") if part in parts)
    shape = (linear.outputs, linear.inputs)
    return StoredTensor(f"{name}.weight", first.file, torch.float32, shape, first.offset, first.length, linear)
