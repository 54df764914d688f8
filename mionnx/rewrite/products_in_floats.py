"""Rewrite: products with weights of 4 or 8 bits become products of floats; the weight files stay as they are.

1. The weight of a `MatMulNBits` goes through a `DequantizeLinear` of the same bytes, scales and zero points, [N, K],
   and a `Gemm` multiplies by it. All of that follows from weights: a runtime that folds constants computes it once,
   while it opens the graph, and holds floats from then on.
2. That takes 4 to 8 times the memory of the blocks; runs are some 8 times faster where the kernel for blocks unpacks
   them in every run, as in WebAssembly.
3. Blocks that end beyond the weight's width, columns in another order, zero points of floats: such a product stays, and
   so does a token table in blocks, of which a run reads few rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

INTEGERS = {4: TensorProto.UINT4, 8: TensorProto.UINT8}


def products_in_floats(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """Copy a model with its products of blocks replaced; also the bytes of floats that the weights become."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    initializers = {tensor.name: tensor for tensor in result.graph.initializer}
    writer = _Writer(result.graph, initializers)
    nodes = [one for node in proto.graph.node for one in writer.nodes(node)]
    del result.graph.node[:]
    result.graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input}
    tensors = [tensor for tensor in result.graph.initializer if tensor.name in read]
    del result.graph.initializer[:]
    result.graph.initializer.extend(tensors)
    return result, writer.size


@dataclass
class _Writer:
    """Nodes and initializers in place of one product after another."""

    graph: onnx.GraphProto
    tensors: dict[str, TensorProto]
    size: int = 0
    done: set[str] = field(default_factory=set)

    def nodes(self, node: NodeProto) -> Iterator[NodeProto]:
        """The nodes in place of one; itself if it is no product with blocks."""
        sizes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if node.op_type != "MatMulNBits" or not self._understood(node, sizes):
            yield node
            return
        rows, width, block = sizes["N"], sizes["K"], sizes["block_size"]
        weight, name = f"{node.input[1]}.floats", node.output[0]
        if weight not in self.done:
            self.done.add(weight)
            self.size += 4 * rows * width  # float32
            numbers = self._numbers(node, sizes)
            yield helper.make_node("DequantizeLinear", numbers, [weight], f"{weight}:unpack", axis=1, block_size=block)
        bias = [node.input[5]] if len(node.input) > 5 and node.input[5] else []
        flat, product, shape = f"{name}.flat", f"{name}.product", f"{name}.shape"
        # Gemm takes two axes: all before the last are joined, and split again behind it
        yield helper.make_node("Reshape", [node.input[0], self._list([-1, width])], [flat], f"{name}:flat")
        yield helper.make_node("Gemm", [flat, weight, *bias], [product], f"{name}:product", transB=1)
        yield helper.make_node("Shape", [node.input[0]], [f"{name}.lead"], f"{name}:lead", end=-1)
        yield helper.make_node("Concat", [f"{name}.lead", self._list([rows])], [shape], f"{name}:shape", axis=0)
        yield helper.make_node("Reshape", [product, shape], [name], node.name)

    def _understood(self, node: NodeProto, sizes: dict[str, int]) -> bool:
        """Whether the product can be written so; see rule 3."""
        inputs = dict(enumerate(node.input))
        zero = self.tensors.get(inputs.get(3, ""))
        # rows of zero points are filled up to whole bytes: an odd number of 4-bit ones does not lie without gaps
        even = sizes["K"] // sizes["block_size"] % 2 == 0
        packed = zero is None or (zero.data_type == TensorProto.UINT8 and (even or sizes.get("bits", 4) == 8))
        constant = {node.input[1], node.input[2]} <= self.tensors.keys() and bool(inputs.get(3)) == (zero is not None)
        divisible = sizes["K"] % sizes["block_size"] == 0 and sizes.get("bits", 4) in INTEGERS
        return constant and divisible and packed and not inputs.get(4)

    def _numbers(self, node: NodeProto, sizes: dict[str, int]) -> list[str]:
        """Numbers, scales and zero points, as DequantizeLinear reads them."""
        rows, width, bits = sizes["N"], sizes["K"], sizes.get("bits", 4)
        blocks = [rows, width // sizes["block_size"]]
        numbers = self._as(node.input[1], "numbers", [rows, width], INTEGERS[bits])
        scales = self._as(node.input[2], "by_block", blocks)
        if len(node.input) > 3 and node.input[3]:
            return [numbers, scales, self._as(node.input[3], "by_block", blocks, INTEGERS[bits])]
        return [numbers, scales, self._middle(blocks, bits)]

    def _as(self, name: str, ending: str, dims: list[int], dtype: int | None = None) -> str:
        alias = f"{name}.{ending}"
        if alias not in self.tensors:
            tensor = self.graph.initializer.add()
            tensor.CopyFrom(self.tensors[name])  # a reference into the weight file: the bytes stay where they are
            tensor.name, tensor.data_type = alias, dtype or tensor.data_type
            del tensor.dims[:]
            tensor.dims.extend(dims)
            self.tensors[alias] = tensor
        return alias

    def _middle(self, dims: list[int], bits: int) -> str:
        """Zero points in the middle of the range, one for all weights of a shape."""
        name = f"mionnx.middle_of_{bits}_bits.{dims[0]}x{dims[1]}"
        if name not in self.tensors:
            size = -(-dims[0] * dims[1] * bits // 8)
            tensor = TensorProto(name=name, dims=dims, data_type=INTEGERS[bits])
            tensor.raw_data = bytes([0x80 if bits == 8 else 0x88]) * size  # 128, or two numbers of 8 in a byte
            self.tensors[name] = self.graph.initializer.add()
            self.tensors[name].CopyFrom(tensor)
        return name

    def _list(self, numbers: list[int]) -> str:
        name = f"mionnx.list.{'_'.join(map(str, numbers))}"
        if name not in self.tensors:
            self.tensors[name] = self.graph.initializer.add()
            self.tensors[name].CopyFrom(numpy_helper.from_array(np.array(numbers, np.int64), name))
        return name
