"""The graph of a quantised model: the same nodes and names, but for products with blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.graph.contrib_shapes import DOMAIN
from mionnx.machine.streamed_file import Kind
from mionnx.quantise.matrices import Found, Product
from mionnx.quantise.settings import Quantisation

OPSET = 1  # of ONNX Runtime's operators


class View(NamedTuple):
    """Another shape of the same bytes, under another name."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A weight that becomes blocks.

    Attributes:
        turned: whether it is held [out, in].
        bits: of its numbers.
        product: whether a product reads it.
        table: whether tokens pick its rows.
    """

    turned: bool
    bits: int
    product: bool = True
    table: bool = False

    def kinds(self, name: str, rows: NDArray[Any], settings: Quantisation) -> dict[str, Kind]:
        """Dtypes and shapes of its parts, by name; `rows` is [out, in]."""
        count = -(-rows.shape[1] // settings.block_size)
        packed, scales, zero_points = names_of(name)
        kinds: dict[str, Kind] = {
            packed: (np.dtype(np.uint8), (rows.shape[0], count, settings.block_size * self.bits // 8)),
            scales: (rows.dtype, (rows.shape[0], count)),
        }
        if not settings.symmetric:
            kinds[zero_points] = (np.dtype(np.uint8), (rows.shape[0], -(-count * self.bits // 8)))
        return kinds

    def views(self, name: str, kinds: Mapping[str, Kind]) -> dict[str, View]:
        """The shape in which a lookup reads its parts."""
        packed = names_of(name)[0]
        rows, blocks, size = kinds[packed][1]
        return {packed: View(table_name(name), (rows, blocks * size))}


def names_of(weight: str) -> tuple[str, str, str]:
    """The names of a weight's numbers, scales and zero points."""
    return f"{weight}_blocks", f"{weight}_scales", f"{weight}_zero_points"


def table_name(weight: str) -> str:
    """The name of a weight's numbers as a table of rows."""
    return f"{weight}_table"


def with_blocks(
    proto: onnx.ModelProto, found: Found, matrices: Mapping[str, Matrix], settings: Quantisation
) -> onnx.ModelProto:
    """A copy of a graph in which products read blocks; the initializers of these are not in it."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    read = [one for one in found.products if one.weight in matrices and matrices[one.weight].product]
    products = {one.node.output[0]: one for one in read if settings.unembedding or not one.head}
    lookup = found.lookup.output[0] if found.lookup is not None and found.table in matrices else None
    for node in made.graph.node:
        if not node.output:
            continue
        if node.output[0] in products:
            _multiply(node, products[node.output[0]], matrices, settings, proto)
        elif node.output[0] == lookup and found.table is not None and matrices[found.table].table:
            _look_up(node, found.table, matrices[found.table], settings)
    _drop_unread(made)
    if all(entry.domain != DOMAIN for entry in made.opset_import):
        made.opset_import.add(domain=DOMAIN, version=OPSET)
    return made


def _multiply(
    node: onnx.NodeProto,
    product: Product,
    matrices: Mapping[str, Matrix],
    settings: Quantisation,
    proto: onnx.ModelProto,
) -> None:
    """Turn a MatMul or Gemm into a MatMulNBits."""
    matrix = matrices[product.weight]
    held = next(tensor for tensor in proto.graph.initializer if tensor.name == product.weight)
    outputs, inputs = held.dims if matrix.turned else held.dims[::-1]
    packed, scales, zero_points = names_of(product.weight)
    reads = [node.input[0], packed, scales, "" if settings.symmetric else zero_points]
    if node.op_type == "Gemm" and len(node.input) > 2 and node.input[2]:
        reads += ["", node.input[2]]
    while not reads[-1]:
        reads.pop()
    given = {"K": inputs, "N": outputs, "bits": matrix.bits, "block_size": settings.block_size}
    given |= {"accuracy_level": settings.accuracy_level} if settings.accuracy_level else {}
    _become(node, "MatMulNBits", reads, given)


def _look_up(node: onnx.NodeProto, table: str, matrix: Matrix, settings: Quantisation) -> None:
    """Turn a Gather of rows into a GatherBlockQuantized."""
    _, scales, zero_points = names_of(table)
    reads = [table_name(table), node.input[1], scales] + ([] if settings.symmetric else [zero_points])
    given = {"gather_axis": 0, "quantize_axis": 1, "block_size": settings.block_size, "bits": matrix.bits}
    _become(node, "GatherBlockQuantized", reads, given)


def _become(node: onnx.NodeProto, operator: str, inputs: list[str], given: Mapping[str, int]) -> None:
    node.op_type, node.domain = operator, DOMAIN
    del node.input[:], node.attribute[:]
    node.input.extend(inputs)
    node.attribute.extend(onnx.helper.make_attribute(name, value) for name, value in given.items())


def _drop_unread(proto: onnx.ModelProto) -> None:
    """Remove turned weights, and weights of floats, that nothing reads any more."""
    graph = proto.graph
    while True:
        read = {name for node in graph.node for name in _reads(node)} | {value.name for value in graph.output}
        idle = [node for node in graph.node if node.op_type == "Transpose" and node.output[0] not in read]
        if not idle:
            break
        for node in idle:
            graph.node.remove(node)
    left = [onnx.TensorProto.FromString(one.SerializeToString()) for one in graph.initializer if one.name in read]
    del graph.initializer[:]
    graph.initializer.extend(left)


def _reads(node: onnx.NodeProto) -> list[str]:
    """The values that a node reads, in its subgraphs too."""
    inner = [name for entry in node.attribute if entry.HasField("g") for one in entry.g.node for name in _reads(one)]
    return [*node.input, *inner]
