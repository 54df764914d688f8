"""Blocks: a row's neighbouring numbers as integers of 4 or 8 bits with one scale, as MatMulNBits reads them.

1. A number is (q - z) s + o: q of `bits` bits, s the scale of its block, z its zero point, 2^(bits - 1) where there are
   none, and o the offset of its block, 0 where there are none.
2. A byte holds 8 / bits integers, the first in its lowest bits. A row's last block is filled up with z.
3. Where a weight has an `order`, its column i stands at place k of the blocks with order[k] = i. It may stand at
   several places, at as many as any other: then it is the sum of what stands there.
4. `GivenBlocks` are a checkpoint's own: integers, scales, zero points and offsets are those of its file, in the wider
   dtype of the graph, and nothing is rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXPERT = ".expert"  # behind the name of a stack of experts, before the number of one of its matrices
SIZES = (256, 128, 64, 32, 16)  # of blocks that ONNX Runtime's kernels take


@dataclass(frozen=True)
class Blocks:
    """A matrix [rows, columns] in blocks along its rows."""

    # uint8 [rows, blocks, block_size * bits / 8]; of 4 bits, two in a byte, the first in its lower half.
    packed: NDArray[np.uint8]
    scales: NDArray[Any]  # [rows, blocks], in the matrix' dtype
    # uint8 [rows, ceil(blocks * bits / 8)], packed likewise, or [rows, blocks] in the scales' dtype; None for symmetric
    # blocks.
    zero_points: NDArray[Any] | None
    offsets: NDArray[Any] | None = None  # [rows, blocks], in the matrix' dtype; None where no fraction is added


@dataclass(frozen=True)
class GivenBlocks:
    """A weight that a checkpoint holds as integers."""

    # rows, columns: outputs and inputs of its product.
    rows: int
    columns: int
    bits: int
    block_size: int
    zero_points: bool
    offsets: bool
    # int64 [places]: which input each place of a row of blocks belongs to, each input as often as any other; None where
    # they stand in order.
    order: NDArray[np.int64] | None
    read: Callable[[], Blocks]  # reads the blocks from the file, scales and offsets in float32

    @property
    def places(self) -> int:
        return self.columns if self.order is None else len(self.order)

    def numbers(self) -> NDArray[np.float32]:
        """The numbers that the blocks stand for, [rows, columns]."""
        return in_order(numbers_of(self.read(), self.bits, self.places), self.order)


def numbers_of(blocks: Blocks, bits: int, columns: int) -> NDArray[Any]:
    """The numbers that blocks stand for, [rows, columns], in the scales' dtype; rounded once."""
    rows, count, _ = blocks.packed.shape
    # in float64, and rounded to the scales' dtype once at the end: each step in float16 would round
    scales = blocks.scales.astype(np.float64)[..., None]
    zero: Any = 2.0 ** (bits - 1)
    if blocks.zero_points is not None:
        # bytes are packed integers; floats are zero points with fractions, one for each block
        points = unpack(blocks.zero_points, bits) if blocks.zero_points.dtype == np.uint8 else blocks.zero_points
        zero = points[:, :count, None].astype(np.float64)  # rows of packed zero points are filled up to whole bytes
    numbers = (unpack(blocks.packed, bits).astype(np.float64) - zero) * scales
    if blocks.offsets is not None:
        numbers += blocks.offsets.astype(np.float64)[..., None]
    return numbers.reshape(rows, -1)[:, :columns].astype(blocks.scales.dtype)


def in_order(matrix: NDArray[Any], order: NDArray[np.int64] | None) -> NDArray[Any]:
    """The columns of a matrix in the order of the inputs; those of the same input are added."""
    if order is None:
        return matrix
    # sorted: the places of one input come to stand side by side
    columns, times = matrix[:, np.argsort(order, kind="stable")], len(order) // (int(order.max()) + 1)
    return columns if times == 1 else columns.reshape(len(columns), -1, times).sum(axis=-1, dtype=matrix.dtype)


def of_integers(
    integers: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[np.uint8] | None, bits: int, block_size: int
) -> Blocks:
    """Make blocks of integers [rows, columns] as they are; scales and zeros are [rows, blocks]."""
    rows, columns = integers.shape
    count = -(-columns // block_size)
    # filled up with the number that stands for 0, see rule 2
    padded = np.full((rows, count * block_size), 2 ** (bits - 1), np.uint8)
    padded[:, :columns] = integers
    points = None if zeros is None else pack(zeros, bits)
    return Blocks(pack(padded.reshape(rows, count, block_size), bits), scales, points)


def pack(integers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Integers as bytes along the last axis, the first in the lower half of a byte."""
    if bits == 8:
        return integers
    if integers.shape[-1] % 2:
        integers = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, 1)])
    joined: NDArray[np.uint8] = integers[..., ::2] | (integers[..., 1::2] << np.uint8(4))
    return joined


def unpack(data: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Numbers of 2, 4 or 8 bits out of the bytes of the last axis: [..., bytes] to [..., bytes * 8 / bits]."""
    if bits == 8:
        return data
    parts = [(data >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*data.shape[:-1], -1)
