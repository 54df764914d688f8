"""Layers of AWQ: qweight, qzeros, scales, as AutoAWQ writes them, of 4 bits.

1. gemm: qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8]: eight neighbouring outputs in a word,
   in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on; scales float16 [groups, outputs].
2. gemv: qweight int32 [outputs, inputs / 8], qzeros int32 [outputs, groups / 8], scales float16 [outputs, groups], the
   last two filled up; neighbours in order.
3. w = (q - z) s (awq/utils/packing_utils.py, `dequantize_gemm`; awq/modules/linear/gemv.py).
"""

from collections.abc import Mapping
from typing import Any

from exporters.checkpoint_tensors import StoredTensor
from exporters.packed.linear import Linear, split_words, without_middle
from mionnx.errors import ExportError

PARTS = ("qweight", "qzeros", "scales")
VERSIONS = ("gemm", "gemv")
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of neighbouring outputs in a word of gemm
BITS = 4
GROUP = 128  # where the config says none, as in transformers' AwqConfig


def layer(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    """One layer.

    Raises:
        ExportError: another kind of AWQ, or tensors that do not fit together.
    """
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version not in VERSIONS:
        raise ExportError(f"{name}: version {version!r} of AWQ is not read; save it as gemm or gemv, which are")
    return (_gemm if version == "gemm" else _gemv)(name, parts, settings)


def _gemm(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    (inputs, words), (groups, columns), scales = (parts[part].shape for part in PARTS)
    outputs = scales[-1]
    if words * len(PLACES) != outputs:
        raise ExportError(f"{name}: qweight {[inputs, words]} has no {BITS} bits for each of {outputs} outputs")
    if scales != (groups, outputs) or columns != words or not groups or not inputs or inputs % groups:
        raise ExportError(f"{name}: scales {list(scales)} and qzeros {[groups, columns]} do not fit {inputs} inputs")

    def in_order(words: Any) -> Any:
        placed = split_words(words, BITS)
        return placed.reshape(len(placed), -1, len(PLACES))[..., PLACES].reshape(placed.shape)

    zeros = in_order(parts["qzeros"].load().numpy())

    def read() -> tuple[Any, Any]:
        return in_order(parts["qweight"].load().numpy()).T, parts["scales"].load().float().numpy().T

    return Linear(name, inputs, outputs, BITS, inputs // groups, None, without_middle(zeros.T, BITS), read)


def _gemv(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    (outputs, words), points, scales = (parts[part].shape for part in PARTS)
    inputs, stated = words * 32 // BITS, (settings.get(key) for key in ("group_size", "q_group_size"))
    group = next((size for size in stated if size is not None), GROUP)
    size = inputs if group == -1 else group
    if type(size) is not int or not 0 < size <= inputs:
        raise ExportError(f"{name}: a group_size of {group!r} is none of {inputs} inputs")
    groups = -(-inputs // size)
    if points[0] != outputs or scales[0] != outputs or points[1] * 8 < groups or scales[1] < groups:
        raise ExportError(f"{name}: scales {list(scales)} and qzeros {list(points)} do not fit {inputs} inputs")
    zeros = split_words(parts["qzeros"].load().numpy(), BITS)[:, :groups]

    def read() -> tuple[Any, Any]:
        scale = parts["scales"].load().float().numpy()[:, :groups]
        return split_words(parts["qweight"].load().numpy(), BITS), scale

    return Linear(name, inputs, outputs, BITS, size, None, without_middle(zeros, BITS), read)
