"""The graph of a quantised model: the same nodes and names, but for products with blocks.

1. A product becomes a MatMulNBits, the look-up of tokens a GatherBlockQuantized.
2. Blocks with offsets o: y = MatMulNBits(x) + sums(x) o, where sums(x) are those of each block's inputs. Products that
   read the same value share its sums.
3. Blocks in another order than their inputs, or with several numbers for each: the product reads Gather(x, order); it
   too is shared, and experts of one order share it before their rows are taken.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph.blocks import Blocks, GivenBlocks
from mionnx.graph.operator_table import DOMAIN
from mionnx.machine.streamed_file import Kind
from mionnx.quantise.matrices import ExpertStack, Product, WeightUses
from mionnx.quantise.settings import Quantisation

CONTRIB_OPSET = 1  # of ONNX Runtime's operators
BYTES, FLOAT, INT64_DTYPE = np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.int64)


@dataclass(frozen=True)
class Matrix:
    """A weight that becomes blocks."""

    turned: bool  # whether its numbers are [out, in]
    bits: int
    block_size: int
    zero_points: bool
    # product, table: whether a product reads it, whether tokens pick its rows.
    product: bool = True
    table: bool = False
    own: GivenBlocks | None = None  # the checkpoint's own blocks; None where they are made of floats

    def places(self, columns: int) -> int:
        """The numbers of a row of its blocks, for so many inputs."""
        return columns if self.own is None else self.own.places

    def kinds(self, name: str, shape: tuple[int, int], scales: np.dtype[Any]) -> dict[str, Kind]:
        """Dtypes and shapes of its parts, by name; `shape` is [out, in]."""
        rows, count = shape[0], -(-self.places(shape[1]) // self.block_size)
        parts = BlockNames.of(name)
        kinds: dict[str, Kind] = {
            parts.packed: (BYTES, (rows, count, self.block_size * self.bits // 8)),
            parts.scales: (scales, (rows, count)),
        }
        if self.zero_points:
            kinds[parts.zero_points] = (BYTES, (rows, -(-count * self.bits // 8)))  # each row begins at a whole byte
        if self.own is not None and self.own.offsets:
            kinds |= {parts.offsets: (FLOAT, (count, rows))} if self.product else {}
            kinds |= {parts.row_offsets: (FLOAT, (rows, count))} if self.table else {}
        if self.own is not None and self.own.order is not None:
            kinds[parts.order] = (INT64_DTYPE, self.own.order.shape)
        return kinds

    def arrays(self, name: str, blocks: Blocks) -> dict[str, NDArray[Any]]:
        parts = BlockNames.of(name)
        arrays_of_node = {
            parts.packed: blocks.packed,
            parts.scales: blocks.scales,
            parts.zero_points: blocks.zero_points,
            # A product multiplies sums [.., blocks] with offsets [blocks, out].
            parts.offsets: None if blocks.offsets is None else blocks.offsets.T,
            parts.row_offsets: blocks.offsets,
            parts.order: None if self.own is None else self.own.order,
        }
        return {part: values for part, values in arrays_of_node.items() if values is not None}


class BlockNames(NamedTuple):
    """Names of the parts of blocks: numbers, scales, zero points, offsets, order."""

    packed: str
    scales: str
    zero_points: str
    offsets: str
    row_offsets: str
    order: str

    @classmethod
    def of(cls, weight: str) -> "BlockNames":
        """The names of a weight's parts."""
        names = ("blocks", "scales", "zero_points", "offsets", "row_offsets", "order")
        return cls(*(f"{weight}_{name}" for name in names))


def order_of_all(blocks: Sequence[GivenBlocks | None]) -> NDArray[np.int64] | None:
    """The order that the blocks of several matrices have in common; None if they have none."""
    orders = [None if one is None else one.order for one in blocks]
    first = orders[0]
    same = first is not None and all(order is not None and np.array_equal(order, first) for order in orders)
    return first if same else None


def table_name(weight: str) -> str:
    """The name of a weight's numbers as a table of rows."""
    return f"{weight}_table"


def with_blocks(
    proto: onnx.ModelProto, uses: WeightUses, matrices: Mapping[str, Matrix], settings: Quantisation
) -> onnx.ModelProto:
    """A copy of a graph in which products read blocks; the initializers of these are not in it."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.graph.node[:]
    read = [one for one in uses.products if one.weight in matrices and matrices[one.weight].product]
    products = {
        one.node.output[0]: one
        for one in read
        # A tied unembedding stays in floats where that is asked for, though the table's blocks are there.
        if settings.unembedding or not one.head or matrices[one.weight].own is not None
    }
    stacks = {one.node.output[0]: one for one in uses.stacks if one.experts[0] in matrices}
    lookup = uses.lookup.output[0] if uses.lookup is not None and uses.table in matrices else None
    writer = _Writer(result.graph, settings, _ranks(proto, matrices))
    for node in proto.graph.node:
        name = node.output[0] if node.output else ""
        if name in stacks:
            writer.multiply_chosen(stacks[name], matrices, proto)
        elif name in products:
            writer.multiply(node, products[name], matrices[products[name].weight], proto)
        elif name and name == lookup and uses.table is not None and matrices[uses.table].table:
            writer.look_up(node, uses.table, matrices[uses.table])
        else:
            result.graph.node.append(node)
    _drop_unread(result)
    if all(entry.domain != DOMAIN for entry in result.opset_import):
        result.opset_import.add(domain=DOMAIN, version=CONTRIB_OPSET)
    return result


def _ranks(proto: onnx.ModelProto, matrices: Mapping[str, Matrix]) -> dict[str, int]:
    """The ranks of values, where blocks have offsets."""
    # Ranks are needed for sums of blocks alone.
    if not any(matrix.own is not None and matrix.own.offsets for matrix in matrices.values()):
        return {}
    graph = onnx.shape_inference.infer_shapes(proto).graph
    return {value.name: len(value.type.tensor_type.shape.dim) for value in (*graph.value_info, *graph.input)}


class _Writer:
    """Appends nodes of blocks to a graph; `ranks` are those of its values, where blocks have offsets."""

    def __init__(self, graph: onnx.GraphProto, settings: Quantisation, ranks: Mapping[str, int]) -> None:
        self.graph, self.settings, self.ranks = graph, settings, ranks
        self._shared: dict[tuple[str, Any], str] = {}  # of a value, by block size or order: its sums, or it in order

    def multiply(self, node: onnx.NodeProto, product: Product, matrix: Matrix, proto: onnx.ModelProto) -> None:
        """A MatMul or Gemm as a MatMulNBits."""
        weight = next(tensor for tensor in proto.graph.initializer if tensor.name == product.weight)
        sizes = weight.dims if matrix.turned else weight.dims[::-1]
        parts, own = BlockNames.of(product.weight), matrix.own
        x, y = node.input[0], node.output[0]
        read = x if own is None or own.order is None else self._in_order(x, parts.order, own.order)
        bias = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
        if own is None or not own.offsets:
            self._product(product.weight, read, y, matrix, sizes, bias)
            return
        result = self._product(product.weight, read, f"{y}.of_blocks", matrix, sizes, bias)
        sums = self._sums(read, matrix.block_size)
        self._add("Add", [result, self._add("MatMul", [sums, parts.offsets], f"{y}.of_offsets")], y)

    def multiply_chosen(self, stack: ExpertStack, matrices: Mapping[str, Matrix], proto: onnx.ModelProto) -> None:
        """A Scan over experts as a MatMulNBits of each: one without rows costs nothing."""
        # Their rows are joined, and taken apart again into as many places for each expert as the most popular one has.
        begin, end, y = stack.node.input[1], stack.node.input[2], stack.node.output[0]
        begins, ends = self._apart(begin, stack.count), self._apart(end, stack.count)
        weight = next(tensor for tensor in proto.graph.initializer if tensor.name == stack.weight)
        sizes, products = weight.dims[1:] if stack.turned else weight.dims[:0:-1], []
        order = order_of_all([matrices[name].own for name in stack.experts])
        read = stack.rows
        if order is not None:
            read = self._in_order(read, BlockNames.of(stack.experts[0]).order, order)
        for number, name in enumerate(stack.experts):
            matrix, rows = matrices[name], self._add("Slice", [read, begins[number], ends[number]], f"{y}.rows{number}")
            if order is None and matrix.own is not None and matrix.own.order is not None:
                rows = self._in_order(rows, BlockNames.of(name).order, matrix.own.order)
            products.append(self._product(name, rows, f"{y}.expert{number}", matrix, sizes))
        # Behind all rows the one of zeros, for places that no row fills.
        joined = self._add("Concat", [*products, stack.nobody], f"{y}.joined", axis=0)
        self._add("Gather", [joined, self._places(begin, end, stack.slots)], y, axis=0)
        shapes = {name: [None, sizes[0]] for name in (*products, joined)} | {y: [stack.count, None, sizes[0]]}
        described = {value.name for value in self.graph.value_info}
        self.graph.value_info.extend(
            onnx.helper.make_tensor_value_info(name, weight.data_type, shape)
            for name, shape in shapes.items()
            if name not in described
        )

    def _product(self, name: str, x: str, y: str, matrix: Matrix, sizes: Sequence[int], bias: str = "") -> str:
        parts, level = BlockNames.of(name), self.settings.accuracy_level
        reads = [x, parts.packed, parts.scales, parts.zero_points if matrix.zero_points else ""]
        reads += ["", bias] if bias else []
        while not reads[-1]:
            reads.pop()  # inputs left out at the end are not named
        facts = {"K": matrix.places(sizes[1]), "N": sizes[0], "bits": matrix.bits, "block_size": matrix.block_size}
        # 0 is the operator's default.
        return self._add("MatMulNBits", reads, y, DOMAIN, **facts, **({"accuracy_level": level} if level else {}))

    def _apart(self, value: str, count: int) -> list[str]:
        """The numbers [count, 1], each as a value [1]."""
        if (value, count) not in self._shared:
            flat = self._add("Reshape", [value, self._constant(f"{value}.flat", [-1])], f"{value}.in_row")
            names = [f"{value}.of{number}" for number in range(count)]
            node = onnx.helper.make_node("Split", [flat], names, f"{value}.Split", axis=0, num_outputs=count)
            self.graph.node.append(node)
            self._shared[value, count] = f"{value}.of"
        return [f"{value}.of{number}" for number in range(count)]

    def _places(self, begin: str, end: str, slots: str) -> str:
        """Numbers of the joined rows at the places of each expert, [experts, places]."""
        # Nobody reads the places behind an expert's own rows; the row of zeros stands there, as the Scan has it, so
        # that the value is the same in both graphs.
        key = (begin, (end, slots))
        if key not in self._shared:
            rows = self._add("Sub", [end, begin], f"{begin}.counts")
            along = self._constant(f"{begin}.along", 0)
            first = self._add("CumSum", [rows, along], f"{begin}.firsts", exclusive=1)
            total = self._add("ReduceSum", [rows, self._constant(f"{begin}.axis", [0])], f"{begin}.total")
            place = self._add("Add", [first, slots], f"{begin}.at")
            own = self._add("Less", [slots, rows], f"{begin}.own")
            self._shared[key] = self._add("Where", [own, place, total], f"{begin}.places")
        return self._shared[key]

    def look_up(self, node: onnx.NodeProto, table: str, matrix: Matrix) -> None:
        """A Gather of rows as a GatherBlockQuantized."""
        parts, ids, y = BlockNames.of(table), node.input[1], node.output[0]
        reads = [table_name(table), ids, parts.scales] + ([parts.zero_points] if matrix.zero_points else [])
        sizes = {"gather_axis": 0, "quantize_axis": 1, "block_size": matrix.block_size, "bits": matrix.bits}
        if matrix.own is None or not matrix.own.offsets:
            self._add("GatherBlockQuantized", reads, y, DOMAIN, **sizes)
            return
        rows = self._add("GatherBlockQuantized", reads, f"{y}.of_blocks", DOMAIN, **sizes)
        picked = self._add("Gather", [parts.row_offsets, ids], f"{y}.row_offsets", axis=0)
        # Each block's offset, once for each of its numbers.
        last = self._add("Unsqueeze", [picked, self._constant(f"{y}.last", [-1])], f"{y}.each")
        sides = [1] * (self._rank(ids) + 1) + [matrix.block_size]
        wide = self._add("Expand", [last, self._constant(f"{y}.sides", sides)], f"{y}.wide")
        shape = self._constant(f"{y}.width", [0] * self._rank(ids) + [-1])
        self._add("Add", [rows, self._add("Reshape", [wide, shape], f"{y}.of_offsets")], y)

    def _in_order(self, x: str, name: str, order: NDArray[np.int64]) -> str:
        key = (x, order.tobytes())
        if key not in self._shared:
            self._shared[key] = self._add("Gather", [x, name], f"{name}.of_input", axis=-1)
        return self._shared[key]

    def _sums(self, x: str, size: int) -> str:
        if (x, size) not in self._shared:
            shape = self._constant(f"{x}.blocks", [0] * (self._rank(x) - 1) + [-1, size])
            blocks = self._add("Reshape", [x, shape], f"{x}.in_blocks")
            last = self._constant(f"{x}.last", [-1])
            self._shared[x, size] = self._add("ReduceSum", [blocks, last], f"{x}.block_sums", keepdims=0)
        return self._shared[x, size]

    def _rank(self, name: str) -> int:
        if not self.ranks.get(name):
            raise ModelError(f"the rank of {name!r} is not known: blocks with offsets cannot multiply it")
        return self.ranks[name]

    def _constant(self, name: str, values: int | list[int]) -> str:
        self.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _add(self, operator: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        name = f"{output}.{operator}"
        self.graph.node.append(onnx.helper.make_node(operator, inputs, [output], name, domain=domain, **attributes))
        return output


def _drop_unread(proto: onnx.ModelProto) -> None:
    """Remove turned weights, and weights of floats, that nothing reads any more."""
    graph = proto.graph
    while True:
        read = {name for node in graph.node for name in _reads(node)} | {value.name for value in graph.output}
        # A Transpose that nothing reads may be all that reads another one: again until none is left.
        idle = [node for node in graph.node if node.op_type == "Transpose" and node.output[0] not in read]
        if not idle:
            break
        for node in idle:
            graph.node.remove(node)
    # Copies: clearing the list would take the tensors with it.
    left = [onnx.TensorProto.FromString(one.SerializeToString()) for one in graph.initializer if one.name in read]
    del graph.initializer[:]
    graph.initializer.extend(left)


def _reads(node: onnx.NodeProto) -> list[str]:
    inner = [name for entry in node.attribute if entry.HasField("g") for one in entry.g.node for name in _reads(one)]
    return [*node.input, *inner]
