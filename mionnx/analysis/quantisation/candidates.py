"""Matrices in the place of a model's own: those of a quantised model, and those that blocks would give."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.analysis.quantisation.matrix_loss import Candidate, FloatModel
from mionnx.graph import matrices as of_graph
from mionnx.graph import onnx_file
from mionnx.graph.blocks import numbers_of
from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.packed_weight import matmul_nbits
from mionnx.quantise.blocks import quantise_blocks
from mionnx.quantise.matrices import WeightUses
from mionnx.quantise.quantised_graph import BlockNames, Matrix, table_name
from mionnx.quantise.settings import Quantisation


def of_blocks(
    model: FloatModel, name: str, matrix: Matrix, settings: Quantisation, importance: NDArray[Any] | None = None
) -> Candidate:
    """A weight in blocks: the numbers that quantising would leave."""
    rows = model.own(name)

    def in_blocks(part: of_graph.Matrix) -> of_graph.Matrix:
        blocks = quantise_blocks(part, matrix.bits, settings.block_size, settings.symmetric, importance)
        return numbers_of(blocks, matrix.bits, part.shape[1])

    def numbers() -> of_graph.Matrix:
        return in_blocks(rows) if rows.ndim == 2 else np.stack([in_blocks(one) for one in rows])

    *stacked, outputs, inputs = rows.shape
    kinds = matrix.kinds(name, (outputs, inputs), rows.dtype).values()
    size = prod(stacked) * sum(dtype.itemsize * prod(shape) for dtype, shape in kinds)
    return Candidate(name, matrix.bits, size, numbers, matrix.product, matrix.table)


def of_model(uses: WeightUses, other: HookedModel, experts: bool = False) -> list[Candidate]:
    """The matrices of a quantised model, by the names that they have in the model of floats.

    Args:
        experts: whether each expert of a stack is one too, besides the stack.
    """
    flow = Dataflow(other.proto)
    tensors = {tensor.name: tensor for tensor in other.proto.graph.initializer}
    names = dict.fromkeys([one.weight for one in uses.products] + ([uses.table] if uses.table else []))
    candidates = [one for name in names if (one := _held(other, flow, tensors, name, name == uses.table)) is not None]
    for stack in uses.stacks:
        of_stack = [one for name in stack.experts if (one := _held(other, flow, tensors, name, False)) is not None]
        if len(of_stack) == stack.count:
            candidates += [_together(stack.weight, of_stack), *(of_stack if experts else ())]
    return candidates


def _together(name: str, experts: Sequence[Candidate]) -> Candidate:
    bits, size = max(one.bits for one in experts), sum(one.bytes for one in experts)
    return Candidate(name, bits, size, lambda: np.stack([one.numbers() for one in experts]))


def _held(
    other: HookedModel, flow: Dataflow, tensors: Mapping[str, onnx.TensorProto], name: str, table: bool
) -> Candidate | None:
    """A weight of a quantised model; None if it has no blocks of this name."""
    packed = BlockNames.of(name).packed
    product, looked_up = packed in tensors, table and table_name(name) in tensors
    if not product and not looked_up:
        return None
    reader = flow.nodes[flow.consumers[packed if product else table_name(name)][0]]
    parts = [packed if product else table_name(name), *(part for part in reader.input[2:] if part in tensors)]
    size = sum(onnx_file.weight(other.proto, other.folder, part).nbytes for part in parts)

    def numbers() -> of_graph.Matrix:
        return matmul_nbits(flow, other.folder, reader) if product else of_graph.embedding(other)

    return Candidate(name, attributes(reader).get("bits", 4), size, numbers, product, looked_up)
