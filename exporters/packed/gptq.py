"""Layers of GPTQ: qweight, qzeros, scales, g_idx, as AutoGPTQ and GPTQModel write them.

1. qweight int32 [inputs * bits / 32, outputs]: neighbouring inputs in a word, the first in the lowest bits.
2. qzeros int32 [groups, outputs * bits / 32], packed likewise along the outputs: zero points less one (`gptq`), or as
   they are (`checkpoint_format` `gptq_v2`). A zero point of 0 is held as all ones by the first.
3. scales float16 [groups, outputs]; g_idx int32 [inputs]: the group of each input, out of order with desc_act.
4. w = (q - z) s (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py, `forward` without CUDA).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from exporters.checkpoint_tensors import StoredTensor
from exporters.packed.linear import Linear, check_bits, split_words, without_middle
from mionnx.errors import ExportError

PARTS = ("qweight", "qzeros", "scales", "g_idx")
FORMATS = ("gptq", "gptq_v2")  # values of checkpoint_format


def layer(name: str, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]) -> Linear:
    """One layer.

    Raises:
        ExportError: another kind of GPTQ, or tensors that do not fit together.
    """
    kind = settings.get("checkpoint_format") or "gptq"
    if kind not in FORMATS or settings.get("is_marlin_format"):
        raise ExportError(
            f"{name}: checkpoint_format {kind!r} is a layout of one kernel; save it as gptq or gptq_v2, which are read"
        )
    (rows, outputs), (groups, columns) = parts["qweight"].shape, parts["qzeros"].shape
    bits = check_bits(name, columns * 32 / outputs if outputs else 0)
    inputs = rows * 32 // bits
    size = _group_size(name, settings.get("group_size"), inputs, groups)
    if parts["scales"].shape != (groups, outputs):
        raise ExportError(f"{name}: scales {list(parts['scales'].shape)} do not fit qzeros {[groups, columns]}")
    zeros = split_words(parts["qzeros"].load().numpy(), bits)
    if kind == "gptq":
        zeros = zeros + np.uint8(1) & np.uint8(2**bits - 1)
    if settings.get("desc_act") and "g_idx" not in parts and groups > 1:
        raise ExportError(f"{name} has no g_idx, and desc_act says that its {groups} groups of inputs are out of order")
    of_input = parts["g_idx"].load().numpy().astype(np.int64) if "g_idx" in parts else None
    if of_input is not None and not (of_input.shape == (inputs,) and ((of_input >= 0) & (of_input < groups)).all()):
        raise ExportError(f"{name}: g_idx {list(of_input.shape)} names no groups of {inputs} inputs, of {groups}")

    def read() -> tuple[Any, Any]:
        words = parts["qweight"].load().numpy()
        return split_words(words.T, bits), parts["scales"].load().float().numpy().T

    return Linear(name, inputs, outputs, bits, size, of_input, without_middle(zeros.T, bits), read)


def _group_size(name: str, stated: Any, inputs: int, groups: int) -> int:
    """The size of a group: as the config says, or else as many inputs as groups share."""
    size = inputs if stated in (None, -1) else stated
    if type(size) is int and size > 0 and -(-inputs // size) == groups:
        return size
    if groups and inputs % groups == 0:
        return inputs // groups
    raise ExportError(f"{name}: {groups} groups of {inputs} inputs, and the config says a group_size of {stated}")
