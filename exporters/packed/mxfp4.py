"""Stacks of experts in MXFP4, as gpt_oss stores them: floats of 4 bits in blocks of 32 with one power of two.

1. NAME_blocks uint8 [experts, outputs, blocks, 16]: two numbers e2m1 in a byte, the first in its lower half; the lowest
   three bits are one of 0, 0.5, 1, 1.5, 2, 3, 4, 6, the highest is the sign.
2. NAME_scales uint8 [experts, outputs, blocks]: exponents e8m0; w = number * 2^(e - 127). 255 is no number.
3. The module's parameter NAME is [experts, inputs, outputs] (`transformers.integrations.mxfp4`,
   `convert_moe_packed_tensors`), gate and up interleaved, as they stand in the file.
4. Twice the numbers are integers of at most 12, and the scale is then 2^(e - 128). Integers of 4 bits are -8 to 7: each
   is the sum of two, which stand in one block of 64 for the 32 numbers, the inputs twice. The sign of a zero is lost.
5. Both formats: OCP Microscaling Formats (MX) Specification, version 1.0.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from exporters.checkpoint_tensors import StoredTensor
from exporters.packed.linear import Linear, Stack
from exporters.weight_files import some
from mionnx.errors import ExportError
from mionnx.graph.blocks import EXPERT, Blocks, GivenBlocks, pack, unpack

FAMILY = "gpt_oss"
PARTS = ("blocks", "scales")
SIZE = 32  # of a block
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # the 16 numbers, times two
MIDDLE = np.int8(8)  # added to integers of 4 bits, which are stored without a sign
BIAS = 127
LARGEST = 252  # exponent with which float32 holds 6


def unpacked_stacks(tensors: list[StoredTensor], family: str | None = None) -> list[StoredTensor]:
    """Replace blocks and scales by the stacks of experts that they are."""
    if family not in (None, FAMILY):
        raise ExportError(
            f"its config says mxfp4 for {family!r}: the experts of {FAMILY!r} are read, save it in floats"
        )
    stacks: dict[str, dict[str, StoredTensor]] = {}
    for tensor in tensors:
        name, _, part = tensor.name.rpartition("_")
        if part in PARTS:
            stacks.setdefault(name, {})[part] = tensor
    if not stacks:
        raise ExportError("its config says mxfp4, but no tensor's name ends in _blocks or _scales")
    others = [one for one in tensors if one.name.rpartition("_")[2] not in PARTS]
    for one in others:
        if one.dtype == torch.uint8:
            raise ExportError(f"{one.name} holds bytes, and its name ends neither in _blocks nor in _scales")
    return others + [_stack(*entry) for entry in stacks.items()]


def _stack(name: str, parts: Mapping[str, StoredTensor]) -> StoredTensor:
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
    experts = [_expert(f"{name}{EXPERT}{n}", blocks.entry(n), scales.entry(n)) for n in range(blocks.shape[0])]
    stack = Stack([[one] for one in experts], turned=True)
    return replace(blocks, name=name, dtype=torch.float32, shape=stack.shape, packed=stack)


class Expert(Linear):
    """One matrix of a stack; its integers are twice the numbers, and 8 more as in any layer of 4 bits."""

    def blocks(self) -> GivenBlocks:
        """The same in blocks of 64 integers of 4 bits, two for each number."""

        def read() -> Blocks:
            integers, scales = self.parts()
            # integers from -4 to 20, 8 more than twice the numbers: what 4 bits hold, and the rest as a second integer
            first = np.clip(integers, 0, 15)
            halves = np.stack([first, integers - first + MIDDLE]).reshape(2, *scales.shape, SIZE).astype(np.uint8)
            both = np.moveaxis(halves, 0, 2).reshape(*scales.shape, 2 * SIZE)
            return Blocks(pack(both, self.bits), scales, None)

        order = _inputs_twice(self.inputs)
        return GivenBlocks(self.outputs, self.inputs, self.bits, 2 * SIZE, False, False, order, read)


@cache  # one array for all experts: there may be thousands
def _inputs_twice(inputs: int) -> NDArray[np.int64]:
    """The input that each number of a row of blocks belongs to, int64 [2 * inputs]."""
    return np.arange(inputs).reshape(-1, 1, SIZE).repeat(2, axis=1).reshape(-1)


def _expert(name: str, packed: StoredTensor, exponents: StoredTensor) -> Expert:
    """An expert of `packed` [outputs, blocks, 16] and `exponents` [outputs, blocks]."""
    outputs, inputs = packed.shape[0], packed.shape[1] * SIZE

    def read() -> tuple[NDArray[np.int8], NDArray[np.float32]]:
        powers = exponents.load().numpy()
        if powers.max() > LARGEST:
            raise ExportError(
                f"{exponents.name}: {name} has the exponent {powers.max()}; 255 is no number, and float32 holds the "
                f"numbers of exponents up to {LARGEST}"
            )
        integers = (DOUBLED + MIDDLE)[unpack(packed.load().numpy(), 4)].reshape(outputs, inputs)
        # one less in the exponent, since the integers are twice the numbers
        return integers, np.ldexp(np.float32(1), powers.astype(np.int32) - BIAS - 1)

    return Expert(name, inputs, outputs, 4, SIZE, None, None, read)
