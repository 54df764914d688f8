"""Matrices in the place of a model's own: those of a quantised model, and those that blocks would give."""

from collections.abc import Mapping
from math import prod
from typing import Any

import onnx
from numpy.typing import NDArray

from mionnx.graph import matrices as of_graph
from mionnx.graph import onnx_file
from mionnx.graph.blocks import numbers_of
from mionnx.graph.dataflow import Dataflow
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.packed_weight import attributes
from mionnx.graph.quantised_weight import weight_numbers
from mionnx.quantise.blocks import quantise_blocks
from mionnx.quantise.matrices import Found
from mionnx.quantise.quantised_graph import Matrix, Parts, table_name
from mionnx.quantise.settings import Quantisation
from mionnx.verify.matrix_loss import Candidate, FloatModel


def of_blocks(
    model: FloatModel, name: str, matrix: Matrix, settings: Quantisation, importance: NDArray[Any] | None = None
) -> Candidate:
    """A weight in blocks: the numbers that quantising would leave.

    Args:
        model: of floats.
        name: of the weight.
        matrix: how it is held, its bits among that.
        settings: of the blocks.
        importance: of its inputs.
    """
    rows = model.own(name)

    def numbers() -> of_graph.Matrix:
        blocks = quantise_blocks(rows, matrix.bits, settings.block_size, settings.symmetric, importance)
        return numbers_of(blocks, matrix.bits, rows.shape[1])

    size = sum(dtype.itemsize * prod(shape) for dtype, shape in matrix.kinds(name, rows.shape, rows.dtype).values())
    return Candidate(name, matrix.bits, size, numbers, matrix.product, matrix.table)


def of_model(found: Found, other: HookedModel) -> list[Candidate]:
    """The matrices of a quantised model, by the names that they have in the model of floats.

    Args:
        found: the matrices of the model of floats.
        other: the quantised model.
    """
    flow = Dataflow(other.proto)
    held = {tensor.name: tensor for tensor in other.proto.graph.initializer}
    names = dict.fromkeys([one.weight for one in found.products] + ([found.table] if found.table else []))
    return [one for name in names if (one := _held(other, flow, held, name, name == found.table)) is not None]


def _held(
    other: HookedModel, flow: Dataflow, held: Mapping[str, onnx.TensorProto], name: str, table: bool
) -> Candidate | None:
    """A weight of a quantised model; None if it has no blocks of this name."""
    packed = Parts.of(name).packed
    product, looked_up = packed in held, table and table_name(name) in held
    if not product and not looked_up:
        return None
    reader = flow.nodes[flow.consumers[packed if product else table_name(name)][0]]
    parts = [packed if product else table_name(name), *(part for part in reader.input[2:] if part in held)]
    size = sum(onnx_file.weight(other.proto, other.folder, part).nbytes for part in parts)

    def numbers() -> of_graph.Matrix:
        return weight_numbers(other.proto, other.folder, packed) if product else of_graph.embedding(other)

    return Candidate(name, attributes(reader).get("bits", 4), size, numbers, product, looked_up)
