"""Blocks: a row's neighbouring numbers as integers of 4 or 8 bits with one scale, as MatMulNBits reads them.

A number is (q - z) s: q of `bits` bits, s the scale of its block, z its zero point. Symmetric blocks have
z = 2^(bits - 1). With 4 bits the number of the largest absolute value becomes q = 0, so that all 16 integers are used,
as in ggml's Q4_0; with 8 bits it becomes 127 or -127 steps, as in Q8_0: blocks of these kinds are found again, bit for
bit, from the numbers that they stand for. The others have the scale and zero point that spread their smallest and
largest number, and 0, over all integers (as ONNX' DynamicQuantizeLinear does it).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.graph.blocks import Blocks, pack

NUMBERS_AT_ONCE = 2**24  # numbers that are quantised at once
TOP_LEVELS = (7.1, 7.4, 7.7, 8.0, 8.3, 8.6)  # what the largest number of a symmetric block is rounded from, in steps
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the range of a block with a zero point
FAINT = 1e-6  # weight of a column whose input is always 0, as a share of the mean

Floats = NDArray[np.float32]


def quantise_blocks(
    matrix: NDArray[Any], bits: int, block_size: int, symmetric: bool, importance: NDArray[Any] | None = None
) -> Blocks:
    """Quantise a matrix [rows, columns], float32 or float16, mapped from a file or in memory; a part at a time."""
    # `importance` [columns] is of blocks of 4 bits, whose scales are then those of least weighted squares
    # (`weighted_scales`).
    rows, columns = matrix.shape
    count = -(-columns // block_size)
    packed = np.empty((rows, count, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, count), matrix.dtype)
    zero_points = None if symmetric else np.empty((rows, count), np.uint8)
    weights = None
    if importance is not None and bits == 4:
        # The last block is filled with columns that count nothing.
        weights = np.pad(importance, (0, count * block_size - columns)).reshape(count, block_size)
    # The search for weighted scales holds several arrays as large as the part.
    step = max(1, (NUMBERS_AT_ONCE if weights is None else NUMBERS_AT_ONCE // 8) // columns)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        numbers = np.zeros((part.stop - begin, count * block_size), np.float32)
        numbers[:, :columns] = matrix[part]
        blocks = numbers.reshape(-1, count, block_size)
        if weights is not None:
            scale, zero = weighted_scales(blocks, weights, symmetric)
        else:
            scale, zero = _symmetric(blocks, bits) if symmetric else _spread(blocks, bits)
        scale = scale.astype(matrix.dtype)  # the numbers are those nearest to what will be read
        stored = scale.astype(np.float32)[..., None]
        # A block of zeros has the scale 0, and so may one of faint numbers in float16.
        steps = np.divide(blocks, stored, out=np.zeros_like(blocks), where=stored != 0)
        integers = np.clip(np.rint(steps) + zero[..., None], 0, 2**bits - 1).astype(np.uint8)
        packed[part], scales[part] = pack(integers, bits), scale
        if zero_points is not None:
            zero_points[part] = zero
    return Blocks(packed, scales, None if zero_points is None else pack(zero_points, bits))


def _symmetric(blocks: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and zero points [rows, blocks] of blocks [rows, blocks, block_size]."""
    at = np.abs(blocks).argmax(axis=-1, keepdims=True)
    largest = np.take_along_axis(blocks, at, axis=-1)[..., 0]
    middle = np.full_like(largest, 2 ** (bits - 1))
    # Q4_0: the largest number is -8 steps, with the scale's sign; Q8_0: 127 steps up or down.
    divisor = np.float32(-8) if bits == 4 else np.float32(127) * np.sign(largest)
    scale = np.divide(largest, divisor, out=np.zeros_like(largest), where=largest != 0)
    return scale, middle


def _spread(blocks: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and zero points [rows, blocks] that spread each block over all integers."""
    # 0 is always in the range, so that it stays exactly 0.
    low = np.minimum(blocks.min(axis=-1), 0)
    high = np.maximum(blocks.max(axis=-1), 0)
    scale = (high - low) / np.float32(2**bits - 1)
    steps = np.divide(-low, scale, out=np.zeros_like(scale), where=scale != 0)
    return scale, np.clip(np.rint(steps), 0, 2**bits - 1)


def weighted_scales(blocks: Floats, importance: NDArray[Any], symmetric: bool) -> tuple[Floats, Floats]:
    """Scales and zero points [rows, blocks] of 4-bit blocks [rows, blocks, size] by weighted least squares."""
    # A product's error is the sum of the columns' errors times the inputs: where inputs are uncorrelated, its mean
    # square is the weighted sum of squares that is made small here (llama.cpp's importance matrix, `make_qx_quants` in
    # ggml-quants.c). For each of some ranges the numbers are rounded, and the scale is the least-squares one of these.
    weights = (importance / max(float(importance.mean()), np.finfo(np.float32).tiny)).astype(np.float32) + FAINT
    # -1: any gain is better, also the 0 of a block of zeros.
    best, scales = np.full(blocks.shape[:2], -1, np.float32), np.zeros(blocks.shape[:2], np.float32)
    zeros = np.full(blocks.shape[:2], 8, np.float32)
    for steps, zero in _symmetric_steps(blocks) if symmetric else _spread_steps(blocks):
        weighted = weights * steps
        along, squares = (weighted * blocks).sum(-1), (weighted * steps).sum(-1)
        # What the least-squares scale takes away from the weighted squares: along^2 / squares.
        gain = np.divide(along * along, squares, out=np.zeros_like(along), where=squares > 0)
        better = gain > best
        best[better] = gain[better]
        scales[better] = np.divide(along, squares, out=np.zeros_like(along), where=squares > 0)[better]
        zeros[better] = zero[better]
    return scales, zeros


def _symmetric_steps(blocks: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Integers of -8 to 7 for several scales: the largest number is about -8 or 7 steps."""
    at = np.abs(blocks).argmax(axis=-1, keepdims=True)
    largest = np.take_along_axis(blocks, at, axis=-1)
    inverse = np.divide(1, largest, out=np.zeros_like(largest), where=largest != 0)
    middle = np.full(blocks.shape[:2], 8, np.float32)
    for size in TOP_LEVELS:
        for steps in (-size, size - 1):
            yield np.clip(np.rint(blocks * (inverse * np.float32(steps))), -8, 7), middle


def _spread_steps(blocks: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Integers less zero points for several ranges."""
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    for share in SHRUNK:
        scale = (high - low) * np.float32(share / 15)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        zero = np.clip(np.rint(-low * np.float32(share) * inverse), 0, 15)
        yield np.clip(np.rint(blocks * inverse[..., None]), -zero[..., None], 15 - zero[..., None]), zero
