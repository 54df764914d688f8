"""The tensors of a GGUF file in numbers, a piece at a time, by the `gguf` package's own rules for each type."""

from collections.abc import Iterator

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from exporters.gguf.header import Header, TensorInfo
from mionnx.errors import ExportError

PIECE = 2**24  # numbers that are in memory at a time


def read_tensor(header: Header, info: TensorInfo) -> NDArray[np.float32]:
    """A whole tensor in float32.

    Raises:
        ExportError: its type is one that gguf does not dequantise.
    """
    pieces = [*read_pieces(header, info)]
    numbers = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return numbers.reshape(info.shape)


def read_pieces(header: Header, info: TensorInfo) -> Iterator[NDArray[np.float32]]:
    """A tensor in float32, [rows, length of its last axis], some rows at a time.

    Raises:
        ExportError: see `read_tensor`.
    """
    width = info.shape[-1]
    block, size = GGML_QUANT_SIZES[info.kind]
    row = width // block * size
    rows, most = info.length // row if row else 0, max(1, PIECE // max(1, width))
    with header.file.open("rb") as file:
        file.seek(info.offset)
        for first in range(0, rows, most):
            count = min(most, rows - first)
            data = np.frombuffer(file.read(count * row), np.uint8)
            yield _numbers(header, info, data.reshape(count, row))


def _numbers(header: Header, info: TensorInfo, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    try:
        return dequantize(data, info.kind).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise ExportError(
            f"{header.file}: tensor {info.name} is stored as {info.kind.name}, which gguf does not dequantise"
        ) from error
