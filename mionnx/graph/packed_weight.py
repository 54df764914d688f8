"""Weights of ONNX Runtime's block-quantised operators, several numbers in a byte, as the numbers that they stand for.

1. A byte holds 8 / bits numbers, the first in its lowest bits.
2. MatMulNBits: the weight is [N, blocks, bytes of a block], its scales [N, blocks] in any shape, its zero points
   likewise and packed by row, or of the scales' dtype and not packed; 2^(bits - 1) where there are none.
3. GatherBlockQuantized: the table is [rows, width] of 4-bit integers, or of bytes that are packed along the width; zero
   points are held as the table is, and are 2^(bits - 1) for bytes, 0 for 4-bit integers where there are none.
4. What is not understood (a reordering `g_idx`, other widths of numbers) is refused by its name.
"""

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph import onnx_file
from mionnx.graph.blocks import Blocks, in_order, numbers_of, unpack
from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.offset_products import offsets_of, order_of

PACKED_BITS = (2, 4, 8)
LEVEL = "accuracy_level"  # attribute of a MatMulNBits


def matmul_nbits(flow: Dataflow, folder: Path, node: onnx.NodeProto) -> NDArray[np.floating]:
    """The weight of a MatMulNBits as numbers, [N, K], turned beside that of a MatMul."""
    # Offsets of its blocks and an order of its inputs (`mionnx.graph.offset_products`) are part of the weight; columns
    # in another order (`g_idx`) are refused.
    settings, bits = attributes(node), _bits(node)
    width, count, blocks = settings["K"], settings["N"], -(-settings["K"] // settings["block_size"])
    if len(node.input) > 4 and node.input[4]:
        raise ModelError(f"{node.name}: MatMulNBits with g_idx, weights in another order, is not read")
    packed, scale = (onnx_file.weight(flow.proto, folder, name) for name in node.input[1:3])
    zero = onnx_file.weight(flow.proto, folder, node.input[3]) if len(node.input) > 3 and node.input[3] else None
    offsets = offsets_of(flow, node)
    as_held = Blocks(
        packed.reshape(count, blocks, -1),
        scale.reshape(count, blocks),
        None if zero is None else zero.reshape(count, -1),
        # the graph multiplies by [blocks, N]
        None if offsets is None else onnx_file.weight(flow.proto, folder, offsets).T,
    )
    return in_order(numbers_of(as_held, bits, width), order_of(flow, folder, node))


def gather_integers(
    node: onnx.NodeProto, data: NDArray, zero: NDArray | None, blocks: int
) -> tuple[NDArray, NDArray, int, int]:
    """The table of a GatherBlockQuantized as arguments of `dequantise`: integers, zero points, axis, block size."""
    settings, bits = attributes(node), _bits(node)
    axis = settings.get("quantize_axis", 1)
    if settings.get("gather_axis", 0) != 0 or axis not in (1, -1) or data.ndim != 2:
        raise ModelError(f"{node.name}: GatherBlockQuantized of a table {list(data.shape)} that is not [rows, width]")
    # bytes hold unsigned integers with their zero in the middle; int4 tensors are signed, around 0
    if data.dtype == np.uint8:
        data = unpack(data, bits)
        zero = np.array(2 ** (bits - 1)) if zero is None else unpack(zero, bits)[:, :blocks]
    return data, np.array(0) if zero is None else zero, 1, settings.get("block_size", 128)


def at_accuracy_level(proto: onnx.ModelProto, level: int) -> tuple[onnx.ModelProto, int]:
    """Copy a graph with the accuracy level (0 or 4) of every MatMulNBits set; also count these."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    products = [node for node in result.graph.node if node.op_type == "MatMulNBits"]
    for node in products:
        others = [entry for entry in node.attribute if entry.name != LEVEL]
        del node.attribute[:]
        node.attribute.extend(others)
        if level:
            node.attribute.append(onnx.helper.make_attribute(LEVEL, level))
    return result, len(products)


def _bits(node: onnx.NodeProto) -> int:
    bits = attributes(node).get("bits", 4)
    if bits not in PACKED_BITS:
        raise ModelError(f"{node.name}: {node.op_type} with numbers of {bits} bits; {PACKED_BITS} are read")
    return bits
