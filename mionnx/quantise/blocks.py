"""Blocks: a row's neighbouring numbers as integers of 4 or 8 bits with one scale, as MatMulNBits reads them.

A number is (q - z) s: q of `bits` bits, s the scale of its block, z its zero point. Symmetric blocks have
z = 2^(bits - 1). With 4 bits the number of the largest absolute value becomes q = 0, so that all 16 integers are used,
as in ggml's Q4_0; with 8 bits it becomes 127 or -127 steps, as in Q8_0: blocks of these kinds are found again, bit for
bit, from the numbers that they stand for. The others have the scale and zero point that spread their smallest and
largest number, and 0, over all integers (as ONNX' DynamicQuantizeLinear does it).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mionnx.graph.blocks import Blocks, pack
from mionnx.quantise.weighted_scales import weighted_scales

NUMBERS_AT_ONCE = 2**24  # numbers that are quantised at once


def quantise_blocks(
    matrix: NDArray[Any], bits: int, block_size: int, symmetric: bool, importance: NDArray[Any] | None = None
) -> Blocks:
    """Quantise a matrix.

    Args:
        matrix: [rows, columns], float32 or float16, mapped from a file or in memory; read a part at a time.
        bits, block_size, symmetric: see `Quantisation`.
        importance: [columns], of blocks of 4 bits, whose scales are then those of least weighted squares
            (`mionnx.quantise.weighted_scales`); 8 bits are as they are without.
    """
    rows, columns = matrix.shape
    count = -(-columns // block_size)
    packed = np.empty((rows, count, block_size * bits // 8), np.uint8)
    scales = np.empty((rows, count), matrix.dtype)
    zero_points = None if symmetric else np.empty((rows, count), np.uint8)
    weights = None
    if importance is not None and bits == 4:
        weights = np.pad(importance, (0, count * block_size - columns)).reshape(count, block_size)
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
        held = scale.astype(np.float32)[..., None]
        steps = np.divide(blocks, held, out=np.zeros_like(blocks), where=held != 0)
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
    divisor = np.float32(-8) if bits == 4 else np.float32(127) * np.sign(largest)
    scale = np.divide(largest, divisor, out=np.zeros_like(largest), where=largest != 0)
    return scale, middle


def _spread(blocks: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and zero points [rows, blocks] that spread each block over all integers."""
    low = np.minimum(blocks.min(axis=-1), 0)
    high = np.maximum(blocks.max(axis=-1), 0)
    scale = (high - low) / np.float32(2**bits - 1)
    steps = np.divide(-low, scale, out=np.zeros_like(scale), where=scale != 0)
    return scale, np.clip(np.rint(steps), 0, 2**bits - 1)
