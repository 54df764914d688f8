"""Products with weights of 8 bits, computed in floats, as two products with weights of 4 bits.

ONNX Runtime (1.32) has no kernel on the CPU for 8 bits in floats: each call makes floats of all blocks first (213 ms
for SmolLM2's unembedding and one token). For 4 bits it has one (7 ms for both halves).

A number q of 8 bits is 16 h + l, its zero point 16 a + b: scale (q - zero) = 16 scale (h - a) + scale (l - b). The
weights are the same numbers, to the last bit; a sum differs in its last bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from mionnx.graph.dataflow import attributes
from mionnx.graph.hooked_model import ROUNDING_LEVEL
from mionnx.graph.operator_table import DOMAIN
from mionnx.graph.packed_weight import LEVEL

BLOCK_PRODUCT = "MatMulNBits"
FOLDED_PREFIX = "mionnx.folded."  # begins names in a graph that constant folding has to compute a part of, once
WEIGHT, SCALE, ZERO, ORDER, BIAS = range(1, 6)  # inputs of a product
END = np.iinfo(np.int64).max
CONSTANTS: dict[str, NDArray[Any]] = {
    "first": np.array([0]),
    "second": np.array([1]),
    "end": np.array([END]),
    "last_axis": np.array([-1]),
    "step": np.array([2]),
    "four": np.array(4, np.uint8),
    "high": np.array(0xF0, np.uint8),
    "low": np.array(0x0F, np.uint8),
}


def replace_nodes(graph: onnx.GraphProto, replacements: Mapping[int, Sequence[onnx.NodeProto]]) -> None:
    """Put other nodes in the place of some, given by their indices, in place."""
    nodes = [one for at, node in enumerate(graph.node) for one in replacements.get(at, (node,))]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]  # they live in the list
    del graph.node[:]
    graph.node.extend(copies)


def constants_of(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """The initializers of a graph that cannot be fed, by name."""
    inputs = {entry.name for entry in graph.input}
    return {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}


def halve_products(model: onnx.ModelProto) -> int:
    """Replace products with constant weights of 8 bits in floats by two of 4 bits, in place; return their number."""
    graph, tensors = model.graph, constants_of(model.graph)
    fitting = [(at, node) for at, node in enumerate(graph.node) if _fits(node, tensors)]
    halves = {at: _Halves(node, tensors, graph).nodes for at, node in fitting}
    if halves:
        replace_nodes(graph, halves)
        graph.initializer.extend(numpy_helper.from_array(value, _name(key)) for key, value in CONSTANTS.items())
    return len(halves)


def _fits(node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto]) -> bool:
    """Whether a product of 8 bits in floats has constant blocks and whole zero points."""
    if node.op_type != BLOCK_PRODUCT or (settings := attributes(node)).get("bits", 4) != 8:
        return False
    inputs = _inputs(node)
    constant = all(not name or name in tensors for name in inputs[WEIGHT:ORDER])
    fits = constant and (not inputs[ZERO] or tensors[inputs[ZERO]].data_type == onnx.TensorProto.UINT8)
    return fits and not inputs[ORDER] and settings.get(LEVEL, 0) != ROUNDING_LEVEL


def _inputs(node: onnx.NodeProto) -> list[str]:
    """All inputs that a product may have; "" where it has none."""
    return [*node.input, *("",) * (BIAS + 1 - len(node.input))]


def _name(constant: str) -> str:
    return FOLDED_PREFIX + constant


class _Halves:
    """The nodes instead of one product; constant folding computes the halves once, when the session is opened."""

    def __init__(self, node: onnx.NodeProto, tensors: dict[str, onnx.TensorProto], graph: onnx.GraphProto) -> None:
        self.prefix, self.graph, self.nodes = f"{node.output[0]}.halves", graph, list[onnx.NodeProto]()
        inputs = _inputs(node)
        columns, blocks, _ = tensors[inputs[WEIGHT]].dims
        scales = inputs[SCALE]
        kind = helper.tensor_dtype_to_np_dtype(tensors[scales].data_type)
        more = self._node("Mul", [scales, self._constant("sixteen", np.array(16, kind))], "scales")
        weights = self._split(inputs[WEIGHT], "weights")
        zeros = self._zero_points(inputs[ZERO], int(columns), int(blocks))
        bias = inputs[BIAS]
        parts = [
            self._product(node, [weights[0], more, zeros[0]], "high"),
            self._product(node, [weights[1], scales, zeros[1], *(["", bias] if bias else [])], "low"),
        ]
        self.nodes.append(helper.make_node("Add", parts, [node.output[0]], f"{self.prefix}.sum"))

    def _node(self, operator: str, inputs: list[str], name: str, **settings: str) -> str:
        output = f"{self.prefix}.{name}"
        self.nodes.append(helper.make_node(operator, inputs, [output], output, **settings))
        return output

    def _constant(self, name: str, value: NDArray[Any]) -> str:
        output = f"{self.prefix}.{name}"
        self.graph.initializer.append(numpy_helper.from_array(value, output))
        return output

    def _split(self, numbers: str, name: str) -> tuple[str, str]:
        """The high and the low halves of pairs of bytes along the last axis, a pair's in one byte."""
        even, odd = (
            self._node("Slice", [numbers, *map(_name, (begin, "end", "last_axis", "step"))], f"{name}.{begin}")
            for begin in ("first", "second")
        )
        even_high = self._node("BitShift", [even, _name("four")], f"{name}.even_high", direction="RIGHT")
        odd_high = self._node("BitwiseAnd", [odd, _name("high")], f"{name}.odd_high")
        even_low = self._node("BitwiseAnd", [even, _name("low")], f"{name}.even_low")
        odd_low = self._node("BitShift", [odd, _name("four")], f"{name}.odd_low", direction="LEFT")
        high = self._node("BitwiseOr", [even_high, odd_high], f"{name}.high")
        return high, self._node("BitwiseOr", [even_low, odd_low], f"{name}.low")

    def _zero_points(self, points: str, columns: int, blocks: int) -> tuple[str, str]:
        """Zero points of the halves; 8 and 0 where the product has none, as 128 is its own."""
        if not points:
            return "", self._constant("zero", np.zeros((columns, (blocks + 1) // 2), np.uint8))
        shape = self._constant("shape", np.array([columns, blocks]))
        zeros = self._node("Reshape", [points, shape], "zeros")
        if blocks % 2:  # a byte holds two
            pad = self._constant("pad", np.zeros((columns, 1), np.uint8))
            self.nodes.append(helper.make_node("Concat", [zeros, pad], [f"{zeros}.even"], f"{zeros}.even", axis=1))
            zeros = f"{zeros}.even"
        return self._split(zeros, "zero_points")

    def _product(self, node: onnx.NodeProto, parts: list[str], name: str) -> str:
        output = f"{self.prefix}.{name}"
        inputs = [node.input[0], *(parts if any(parts[2:]) else parts[:2])]
        product = helper.make_node(BLOCK_PRODUCT, inputs, [output], output, domain=DOMAIN)
        product.attribute.extend(entry for entry in node.attribute if entry.name != "bits")
        product.attribute.append(helper.make_attribute("bits", 4))
        self.nodes.append(product)
        return output
