"""Linear layers of integers, in any of the formats, and their blocks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mionnx.errors import ExportError
from mionnx.graph.blocks import SIZES, Blocks, GivenBlocks, of_integers, unpack

BITS = (4, 8)
INSTEAD = "its numbers open in floats: --dtype float32"


@dataclass(frozen=True)
class Linear:
    """A layer y = x w^T with w = (q - z) s.

    Attributes:
        group_size: neighbouring inputs that share a scale; all of them for one group.
        groups: int64 [inputs], the group of each input; None where they are neighbours.
        zeros: uint8 [outputs, groups]; None where all are 2^(bits - 1).
        read: reads the integers, uint8 [outputs, inputs], and scales, float32 [outputs, groups].
    """

    name: str
    inputs: int
    outputs: int
    bits: int
    group_size: int
    groups: NDArray[np.int64] | None
    zeros: NDArray[np.uint8] | None
    read: Callable[[], tuple[NDArray[np.uint8], NDArray[np.float32]]]

    def numbers(self) -> NDArray[np.float32]:
        """The numbers that the integers stand for, [outputs, inputs].

        Raises:
            ExportError: parts that do not fit together.
        """
        integers, scales = self._parts()
        of_input = np.arange(self.inputs) // self.group_size if self.groups is None else self.groups
        zeros = np.full(scales.shape, 2 ** (self.bits - 1)) if self.zeros is None else self.zeros
        shifted = integers.astype(np.float32) - zeros.astype(np.float32)[:, of_input]
        return shifted * scales[:, of_input]

    def _parts(self) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Integers and scales in the shapes of the layer."""
        integers, scales = self.read()  # numpy would repeat rows and columns that do not fit
        last = (self.inputs - 1) // self.group_size if self.groups is None else self.groups.max(initial=0)
        fits = integers.shape == (self.outputs, self.inputs) and scales.ndim == 2 and len(scales) == self.outputs
        if not fits or last >= scales.shape[1] or (self.zeros is not None and self.zeros.shape != scales.shape):
            zeros = None if self.zeros is None else list(self.zeros.shape)
            raise ExportError(
                f"{self.name}: integers {list(integers.shape)}, scales {list(scales.shape)} and zero points {zeros} do "
                f"not fit a weight {[self.outputs, self.inputs]} in groups of {self.group_size}"
            )
        return integers, scales

    def blocks(self) -> GivenBlocks:
        """The same integers, scales and zero points in blocks of the operator.

        Raises:
            ExportError: groups that no blocks are.
        """
        size, order = self._block_size(), self._order()

        def read() -> Blocks:
            integers, scales = self._parts()
            count = -(-self.inputs // size)
            spread = self.group_size // size if scales.shape[1] > 1 else count
            zeros = None if self.zeros is None else np.repeat(self.zeros, spread, axis=1)[:, :count]
            integers = integers if order is None else integers[:, order]
            return of_integers(integers, np.repeat(scales, spread, axis=1)[:, :count], zeros, self.bits, size)

        has_zeros = self.zeros is not None
        return GivenBlocks(self.outputs, self.inputs, self.bits, size, has_zeros, False, order, read)

    def named_blocks(self, weight: str) -> dict[str, GivenBlocks]:
        """The blocks by the name that the weight has in a graph.

        Raises:
            ExportError: see `blocks`.
        """
        return {weight: self.blocks()}

    def _block_size(self) -> int:
        """The largest size of blocks that make up a group, or the row of a single group."""
        if self.group_size >= self.inputs:
            return next((size for size in SIZES if self.inputs % size == 0), min(SIZES))
        fitting = [size for size in SIZES if self.group_size % size == 0]
        if not fitting:
            raise ExportError(
                f"{self.name}: groups of {self.group_size} inputs are no blocks of {', '.join(map(str, SIZES[::-1]))}, "
                f"which ONNX Runtime multiplies with; {INSTEAD}"
            )
        return fitting[0]

    def _order(self) -> NDArray[np.int64] | None:
        """The inputs, group by group; None where they are so already."""
        if self.groups is None:
            return None
        order, regular = np.argsort(self.groups, kind="stable"), np.arange(self.inputs) // self.group_size
        if np.array_equal(self.groups, regular):
            return None
        if not np.array_equal(self.groups[order], regular):
            raise ExportError(
                f"{self.name}: its g_idx puts other than {self.group_size} inputs into some group, which no blocks "
                f"are; {INSTEAD}"
            )
        return order.astype(np.int64)


def check_bits(name: str, bits: float) -> int:
    """Refuse integers of other widths.

    Raises:
        ExportError: naming the layer.
    """
    if bits not in BITS:
        raise ExportError(f"{name} has integers of {bits:g} bits; of {' and '.join(map(str, BITS))} are read")
    return int(bits)


def split_words(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """The integers in words of 32 bits along the last axis, the one in the lowest bits first."""
    data = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return unpack(data, bits)


def without_middle(zeros: NDArray[np.uint8], bits: int) -> NDArray[np.uint8] | None:
    """Zero points; None if all of them are the middle."""
    return None if (zeros == 2 ** (bits - 1)).all() else zeros
