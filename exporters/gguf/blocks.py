"""Matrices of a GGUF file as blocks of ONNX Runtime's operators: no number is rounded.

Each type has blocks of 32 neighbours with a scale. Q4_0: w = (q - 8) d. Q8_0: w = q d, q signed. Q4_1: w = q d + m, and
Q4_K, of 256 with scales and offsets of 6 bits for each 32: w = q (d s) - (e m). The last two become (q - 8) times the
scale, plus an offset of 8 scales and theirs, which is one float32 (the layouts are those of ggml-common.h and of the
`gguf` package).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import Q4_K
from numpy.typing import NDArray

from exporters.gguf.architectures import architecture_of, config_of
from exporters.gguf.header import Header
from exporters.gguf.layout import UNEMBEDDING
from exporters.gguf.renamed import Renamed, rename
from mionnx.graph.blocks import Blocks, GivenBlocks, of_integers

SIZE, MIDDLE = 32, 8


class Integers(NamedTuple):
    """Integers [rows, columns] with scales and offsets [rows, blocks]."""

    integers: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None = None


def _halves(data: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """Halves of bytes [n, bytes]: the lower ones of `count` bytes, then the upper ones."""
    parts = data.reshape(len(data), -1, 1, count) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    integers: NDArray[np.uint8] = (parts & np.uint8(15)).reshape(len(data), -1)
    return integers


def _float(data: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _q4_0(data: NDArray[np.uint8]) -> Integers:
    # d float16, then 16 bytes: the lower halves are the first 16 numbers of the block, the upper the last
    return Integers(_halves(data[:, 2:], SIZE // 2), _float(data[:, :2]))


def _q4_1(data: NDArray[np.uint8]) -> Integers:
    scales = _float(data[:, :2])
    # q d + m = (q - 8) d + (m + 8 d)
    return Integers(_halves(data[:, 4:], SIZE // 2), scales, _float(data[:, 2:4]) + MIDDLE * scales)


def _q8_0(data: NDArray[np.uint8]) -> Integers:
    # signed to unsigned: the zero point of blocks of 8 bits is 128
    return Integers(data[:, 2:] ^ np.uint8(128), _float(data[:, :2]))


def _q4_k(data: NDArray[np.uint8]) -> Integers:
    steps, offsets = Q4_K.get_scale_min(data[:, 4:16])  # d and dmin float16, 12 bytes of 6-bit numbers, then 128 bytes
    scales = _float(data[:, :2]) * steps.astype(np.float32)  # exact in float32: 11 bits times 6
    lowest = _float(data[:, 2:4]) * offsets.astype(np.float32)
    return Integers(_halves(data[:, 16:], SIZE), scales, MIDDLE * scales - lowest)


READERS: dict[Kind, tuple[int, Callable[[NDArray[np.uint8]], Integers]]] = {
    Kind.Q4_0: (4, _q4_0),
    Kind.Q4_1: (4, _q4_1),
    Kind.Q8_0: (8, _q8_0),
    Kind.Q4_K: (4, _q4_k),
}
OFFSETS = (Kind.Q4_1, Kind.Q4_K)


def blocks_of(header: Header) -> dict[str, GivenBlocks]:
    """The matrices of a file in blocks, by transformers' names; a tied table by both names."""
    tensors, table = rename(header, config_of(header)), architecture_of(header).token_table
    blocks = {one.name: _given(header, one) for one in tensors if _keeps_blocks(one)}
    if UNEMBEDDING not in {one.name for one in tensors} and table in blocks:
        blocks[UNEMBEDDING] = blocks[table]
    return blocks


def _keeps_blocks(tensor: Renamed) -> bool:
    """Whether a matrix is in whole blocks of its own rows; experts become numbers first."""
    return (
        len(tensor.shape) == 2 == len(tensor.info.shape)
        and tensor.info.kind in READERS
        and ".experts." not in tensor.name
    )


def _given(header: Header, tensor: Renamed) -> GivenBlocks:
    info = tensor.info
    (rows, columns), (bits, _) = tensor.shape, READERS[info.kind]
    order = None if tensor.columns is None else np.argsort(tensor.columns)  # which column stands at each place
    return GivenBlocks(
        rows, columns, bits, SIZE, False, info.kind in OFFSETS, order, lambda: _read(header, tensor, bits)
    )


def _read(header: Header, tensor: Renamed, bits: int) -> Blocks:
    info = tensor.info
    _, bytes_of_block = GGML_QUANT_SIZES[info.kind]
    parts = [np.fromfile(header.file, np.uint8, one.length, offset=one.offset) for one in tensor.infos]
    data = np.concatenate(parts).reshape(-1, bytes_of_block)
    numbers = READERS[info.kind][1](data)

    def rows_of(array: NDArray[Any]) -> NDArray[Any]:
        rows = array.reshape(tensor.shape[0], -1)
        return rows if tensor.rows is None else rows[tensor.rows]

    blocks = of_integers(rows_of(numbers.integers), rows_of(numbers.scales), None, bits, SIZE)
    offsets = None if numbers.offsets is None else rows_of(numbers.offsets)
    return Blocks(blocks.packed, blocks.scales, None, offsets)
