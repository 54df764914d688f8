"""Rewrite: magnitudes of all values become outputs, a few numbers of a run however large the values are.

1. Every float that a node computes has its largest magnitude; what only moves numbers is not looked at twice.
2. At a hook point with a sequence the position of the largest one is an output too, and the least of the positions'
   largest magnitudes.
3. A fused norm hides what a runtime that decomposes it computes: sums of squares, the largest and the least over
   positions. Of a norm in its own nodes the least mean square is looked at.
4. What a mask adds minus infinity to is looked at where it is above `MASKED`.
5. On request a product with a weight has the largest sum of |a||w|, which bounds every partial sum in any order.
6. The model's own outputs are gone. Numbers are gathered: one output for each of `RANGE_OUTPUTS`. What has a number for
   each position is reduced in one table of all such values: in a short text the nodes are what a pass costs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from mionnx.graph.axes import has_sequence, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.rewrite.float_graph import NORM_OPERATORS, FloatGraph

LARGEST_OUTPUT, LEAST_OUTPUT, POSITION_OUTPUT = RANGE_OUTPUTS = ("mionnx.largest", "mionnx.least", "mionnx.position")
PLAIN_VALUE, SQUARES, MEAN_SQUARE, PARTIAL_SUMS = "value", "sum of squares", "mean square", "partial sums"
MASKED = -1e30  # scores below it are a mask's


@dataclass(frozen=True)
class Observation:
    """One value whose magnitude is an output.

    Attributes:
        value: its name, that of a hook point where it has one.
        what: "value", "sum of squares" into a norm, "mean square" inside one, "partial sums" of a product.
        operator: that computes it.
        place: in the other two outputs; None where they have no entry for it.
    """

    value: str
    what: str
    operator: str
    place: int | None = None


@dataclass
class _Writer:
    """The nodes that look at values, and the entries of each output."""

    graph: GraphProto
    opset: int
    observations: list[Observation] = field(default_factory=list)
    # The values of each output, one number each, and which observation or place it is of.
    entries: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: {name: [] for name in RANGE_OUTPUTS})
    rows: list[tuple[int, int, str]] = field(default_factory=list)  # observation, place, magnitudes by position [seq]
    places: int = 0
    nodes: list[NodeProto] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)

    def constant(self, values: list[int] | float, title: str = "") -> str:
        """An initializer of int64 numbers, or of one float; many are told by a title."""
        integral = isinstance(values, list)
        name = f"mionnx.seen.{title or ('_'.join(map(str, values)) if isinstance(values, list) else values)}"
        if name not in self.constants:
            self.constants.add(name)
            array = np.array(values, np.int64 if integral else np.float32)
            self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def add(self, operator: str, inputs: list[str], end: str, **attributes: Any) -> str:
        """One node."""
        name = f"{inputs[0]}:{end}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def reduce(self, operator: str, value: str, axes: list[int], end: str, keep: int) -> str:
        """Reduce along axes; those are an attribute up to opset 17, of a sum of squares too."""
        if self.opset >= 18:
            return self.add(operator, [value, self.constant(axes)], end, keepdims=keep)
        name = f"{value}:{end}"
        self.nodes.append(helper.make_node(operator, [value], [name], name, axes=axes, keepdims=keep))
        return name

    def look(self, title: tuple[str, str, str], line: str, placed: bool = False, by_position: bool = False) -> None:
        """Enter the largest of the numbers in a line; of `placed` ones the least, and where the largest stands, too."""
        number, place = len(self.observations), self.places if placed else None
        self.observations.append(Observation(*title, place))
        if place is not None:
            self.places += 1
        if place is not None and by_position:
            self.rows.append((number, place, line))
            return
        self.entries[LARGEST_OUTPUT].append((number, self.reduce("ReduceMax", line, [0], "most", 1)))
        if place is not None:
            self.entries[LEAST_OUTPUT].append((place, self.reduce("ReduceMin", line, [0], "least", 1)))
            position = self.add("ArgMax", [line], "place", axis=0, keepdims=1)
            self.entries[POSITION_OUTPUT].append((place, position))

    def outputs(self) -> Iterator[tuple[str, int]]:
        """Write the outputs, each with its length: numbers of the rows first, then put into their own order."""
        reduced = dict.fromkeys(RANGE_OUTPUTS, "")
        if self.rows:
            joined = self.add("Concat", [line for *_, line in self.rows], "rows", axis=0)
            table = self.add("Reshape", [joined, self.constant([len(self.rows), -1])], "table")
            reduced = {
                LARGEST_OUTPUT: self.reduce("ReduceMax", table, [1], "most", 0),
                LEAST_OUTPUT: self.reduce("ReduceMin", table, [1], "least", 0),
                POSITION_OUTPUT: self.add("ArgMax", [table], "place", axis=1, keepdims=0),
            }
        for output, entries in self.entries.items():
            order = [number if output == LARGEST_OUTPUT else place for number, place, _ in self.rows]
            order += [number for number, _ in entries]
            if order:
                names = [name for name in (reduced[output], *(name for _, name in entries)) if name]
                joined = self.add("Concat", names, f"all of {output}", axis=0)
                back = self.constant([int(one) for one in np.argsort(order)], f"order of {output}")
                self.nodes.append(helper.make_node("Gather", [joined, back], [output], output))
                yield output, len(order)

    def flat(self, value: str) -> str:
        """The numbers of a value in a line."""
        return self.add("Reshape", [value, self.constant([-1])], "line")


def largest(graph: FloatGraph, products: bool = False) -> tuple[onnx.ModelProto, list[Observation]]:
    """Add the nodes and outputs above to a copy of a graph without a batch: of one row."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    writer = _Writer(proto.graph, graph.opset)
    inside = {norm.insides[1] for norm in graph.decomposed}
    for node, value, name in _values(graph):
        if node.op_type in NORM_OPERATORS:
            _squares(writer, node, node.input[0] if node.input[0] in graph.hooks else name)
        _value(writer, graph, node, value, name, inside)
        if products and node in graph.products():
            magnitudes = [writer.add("Abs", [one], f"of {value}") for one in node.input[:2]]
            sums = writer.add("MatMul", magnitudes, "bound")
            writer.look((name, PARTIAL_SUMS, node.op_type), writer.flat(sums))
    del proto.graph.output[:]
    for output, length in writer.outputs():
        kind = TensorProto.INT64 if output == POSITION_OUTPUT else TensorProto.FLOAT
        proto.graph.output.append(helper.make_tensor_value_info(output, kind, [length]))
    proto.graph.node.extend(writer.nodes)
    return proto, writer.observations


def _values(graph: FloatGraph) -> Iterator[tuple[NodeProto, str, str]]:
    """Nodes, the value that each computes, and its hook point's name where that is the same numbers."""
    named: dict[str, str] = {}
    for hook in graph.hooks:
        named.setdefault(graph.origin(hook), hook)
    for node, value in graph.computed():
        if value in graph.carrying:
            yield node, value, named.pop(value, value)


def _value(writer: _Writer, graph: FloatGraph, node: NodeProto, value: str, name: str, inside: set[str]) -> None:
    """Look at one value, at its hook point if it has one."""
    point = HookPoint.parse(name)
    axes = point.axes or ()
    positioned = name in graph.hooks and has_sequence(axes) and "seq_k" not in axes and graph.flow.producer(name)
    seen = name if positioned else value
    if value in graph.masked or name in graph.masked:
        real = writer.add("Greater", [seen, writer.constant(MASKED)], "real")
        magnitude = writer.add("Abs", [seen], "size")
        unmasked = f"{seen}:unmasked"
        inputs = [real, magnitude, writer.constant(0.0)]
        writer.nodes.append(helper.make_node("Where", inputs, [unmasked], unmasked))
        writer.look((name, PLAIN_VALUE, node.op_type), writer.flat(unmasked))
    elif positioned:
        others = [axis for axis in range(len(axes)) if axis != sequence_axis(axes)]
        lines = writer.reduce("ReduceMax", writer.add("Abs", [seen], "size"), others, "by position", 0)
        writer.look((name, PLAIN_VALUE, node.op_type), lines, placed=True, by_position=True)
    elif value in inside:
        writer.look((name, MEAN_SQUARE, node.op_type), writer.flat(value), placed=True)
    else:
        line = writer.add("Abs", [writer.flat(value)], "size")
        writer.look((name, PLAIN_VALUE, node.op_type), line)


def _squares(writer: _Writer, node: NodeProto, name: str) -> None:
    """Look at the sums of squares into a fused norm, by the name of the hook point that it reads or makes."""
    source = node.input[0]
    end = f"of {node.output[0]}"
    if node.op_type == "LayerNormalization":
        mean = writer.reduce("ReduceMean", source, [-1], f"mean {end}", 1)
        source = writer.add("Sub", [source, mean], f"centred {end}")
    sums = writer.reduce("ReduceSumSquare", source, [-1], f"squares {end}", 0)
    writer.look((name, SQUARES, node.op_type), writer.flat(sums), placed=True)
