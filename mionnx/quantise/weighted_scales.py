"""Scales of 4-bit blocks by least squares, each column weighted with the mean square of what multiplies it.

A product's error is the sum of the columns' errors times the inputs: where inputs are uncorrelated, its mean square is
the weighted sum of squares that is made small here (llama.cpp's importance matrix, `make_qx_quants` in ggml-quants.c).
For each of some ranges the numbers are rounded, and the scale is the least-squares one of these integers.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOP_LEVELS = (7.1, 7.4, 7.7, 8.0, 8.3, 8.6)  # what the largest number of a symmetric block is rounded from, in steps
SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # of the range of a block with a zero point
FAINT = 1e-6  # weight of a column whose input is always 0, as a share of the mean

Floats = NDArray[np.float32]


def weighted_scales(blocks: Floats, importance: NDArray[Any], symmetric: bool) -> tuple[Floats, Floats]:
    """Scales and zero points of 4-bit blocks with the least weighted error.

    Args:
        blocks: [rows, blocks, block_size].
        importance: of the columns, [blocks, block_size], none below 0.
        symmetric: whether all zero points are the middle.

    Returns:
        both [rows, blocks].
    """
    weights = (importance / max(float(importance.mean()), np.finfo(np.float32).tiny)).astype(np.float32) + FAINT
    best, scales = np.full(blocks.shape[:2], -1, np.float32), np.zeros(blocks.shape[:2], np.float32)
    zeros = np.full(blocks.shape[:2], 8, np.float32)
    for steps, zero in _symmetric(blocks) if symmetric else _spread(blocks):
        weighted = weights * steps
        along, squares = (weighted * blocks).sum(-1), (weighted * steps).sum(-1)
        gain = np.divide(along * along, squares, out=np.zeros_like(along), where=squares > 0)
        better = gain > best
        best[better] = gain[better]
        scales[better] = np.divide(along, squares, out=np.zeros_like(along), where=squares > 0)[better]
        zeros[better] = zero[better]
    return scales, zeros


def _symmetric(blocks: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Integers of -8 to 7 for several scales: the largest number is about -8 or 7 steps."""
    at = np.abs(blocks).argmax(axis=-1, keepdims=True)
    largest = np.take_along_axis(blocks, at, axis=-1)
    inverse = np.divide(1, largest, out=np.zeros_like(largest), where=largest != 0)
    middle = np.full(blocks.shape[:2], 8, np.float32)
    for size in TOP_LEVELS:
        for steps in (-size, size - 1):
            yield np.clip(np.rint(blocks * (inverse * np.float32(steps))), -8, 7), middle


def _spread(blocks: Floats) -> Iterator[tuple[Floats, Floats]]:
    """Integers less zero points for several ranges."""
    low, high = np.minimum(blocks.min(axis=-1), 0), np.maximum(blocks.max(axis=-1), 0)
    for share in SHRUNK:
        scale = (high - low) * np.float32(share / 15)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        zero = np.clip(np.rint(-low * np.float32(share) * inverse), 0, 15)
        yield np.clip(np.rint(blocks * inverse[..., None]), -zero[..., None], 15 - zero[..., None]), zero
