"""Stacks of experts in MXFP4, as gpt_oss stores them: floats of 4 bits in blocks of 32 with one power of two.

1. NAME_blocks uint8 [experts, outputs, blocks, 16]: two numbers e2m1 in a byte, the first in its lower half; the lowest
   three bits are one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, the highest is the sign.
2. NAME_scales uint8 [experts, outputs, blocks]: exponents e8m0; w = number * 2^(e - 127). 255 is no number.
3. The module's parameter NAME is [experts, inputs, outputs] (`transformers.integrations.mxfp4`,
   `convert_moe_packed_tensors`), gate and up interleaved, as they stand in the file.
4. Twice the numbers are integers of at most 12: symmetric blocks of 8 bits with the scale 2^(e - 128) hold them
   exactly; those of 4 bits end at 7. The sign of a zero is lost.
5. Both formats: OCP Microscaling Formats (MX) Specification, version 1.0.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from exporters.checkpoint_tensors import Stored
from exporters.packed.linear import Linear
from exporters.packed.stack import Stack
from exporters.weight_files import some
from mionnx.errors import ExportError
from mionnx.graph.blocks import EXPERT, unpack

FAMILY = "gpt_oss"
PARTS = ("blocks", "scales")
SIZE = 32  # of a block
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.uint8)
INTEGERS = np.concatenate([128 + DOUBLED, 128 - DOUBLED])  # of each number of 4 bits
BIAS = 127
LARGEST = 252  # exponent with which float32 holds 6


def unpacked_stacks(tensors: list[Stored], family: str | None = None) -> list[Stored]:
    """Replace blocks and scales by the stacks of experts that they are.

    Args:
        tensors: of the checkpoint.
        family: its model_type; None where nobody says.

    Raises:
        ExportError: another family, no such tensors, or some that do not fit together.
    """
    if family not in (None, FAMILY):
        raise ExportError(
            f"its config says mxfp4 for {family!r}: the experts of {FAMILY!r} are read, save it in floats"
        )
    found: dict[str, dict[str, Stored]] = {}
    for tensor in tensors:
        name, _, part = tensor.name.rpartition("_")
        if part in PARTS:
            found.setdefault(name, {})[part] = tensor
    if not found:
        raise ExportError("its config says mxfp4, but no tensor's name ends in _blocks or _scales")
    inside = {tensor.name for parts in found.values() for tensor in parts.values()}
    others = [one for one in tensors if one.name not in inside]
    for one in others:
        if one.dtype == torch.uint8:
            raise ExportError(f"{one.name} holds bytes, and its name ends neither in _blocks nor in _scales")
    return others + [_stack(*entry) for entry in found.items()]


def _stack(name: str, parts: Mapping[str, Stored]) -> Stored:
    lacking = [f"{name}_{part}" for part in PARTS if part not in parts]
    if lacking:
        raise ExportError(f"the checkpoint has {some(one.name for one in parts.values())}, and no {lacking[0]}")
    blocks, scales = parts["blocks"], parts["scales"]
    fits = len(blocks.shape) == 4 and blocks.shape[3] * 2 == SIZE and scales.shape == blocks.shape[:3]
    if not fits or 0 in blocks.shape or {blocks.dtype, scales.dtype} != {torch.uint8}:
        raise ExportError(
            f"{blocks.name} is {blocks.dtype} {list(blocks.shape)} and {scales.name} {scales.dtype} "
            f"{list(scales.shape)}; MXFP4 is uint8 [experts, outputs, blocks, {SIZE // 2}], without the last axis for "
            "the scales"
        )
    stack = Stack(tuple((_expert(name, n, blocks, scales),) for n in range(blocks.shape[0])), turned=True)
    return replace(blocks, name=name, dtype=torch.float32, shape=stack.shape, packed=stack)


def _expert(name: str, number: int, blocks: Stored, scales: Stored) -> Linear:
    _, outputs, count, _ = blocks.shape

    def read() -> tuple[Any, Any]:
        integers = INTEGERS[unpack(blocks.entry(number).load().numpy(), 4)]
        exponents = scales.entry(number).load().numpy()
        if exponents.max() > LARGEST:
            raise ExportError(
                f"{scales.name}: expert {number} has the exponent {exponents.max()}; 255 is no number, and float32 "
                f"holds the numbers of exponents up to {LARGEST}"
            )
        return integers.reshape(outputs, count * SIZE), np.ldexp(np.float32(1), exponents.astype(np.int32) - BIAS - 1)

    return Linear(f"{name}{EXPERT}{number}", count * SIZE, outputs, 8, SIZE, None, None, read)
