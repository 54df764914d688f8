"""Rewrite: magnitudes of all values become outputs, a few numbers of a run however large the values are.

1. Every float that a node computes has its largest magnitude. What moves or joins numbers is not looked at twice, nor
   what is between -1 and 1 by definition, where it is no hook point.
2. At a hook point with a sequence the position of the largest one is an output too, and the least of the positions'
   largest magnitudes.
3. A fused norm hides what a runtime that decomposes it computes: sums of squares, the largest and the least over
   positions. Of a norm in its own nodes the least mean square is looked at.
4. What a mask adds minus infinity to is looked at where it is above `MASKED`.
5. On request a product with a weight has the largest sum of |a||w|, which bounds every partial sum in any order.
6. The model's own outputs are gone. Numbers are gathered: one output for each of `RANGE_OUTPUTS`.
7. ONNX Runtime's maximum of numbers with a NaN is that of the others, most often. A NaN anywhere is one in the last
   stream: the sum of its squares is `WATCHED_OUTPUT`. On request NaN counts as infinity at each value.

What it costs: in a short text nodes, in a long one the numbers that are read and written. So a value is read for its
largest and its least number, of which one is the magnitude, right behind its node: nothing of its size is written or
kept. It is reduced to a row of a number for each position, or for each head, with all cores; rows of one length are
reduced together, in a table. An engine has to run the nodes in the order that they are written in.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from mionnx.graph.axes import has_sequence, sequence_axis
from mionnx.graph.hook_points import HookPoint
from mionnx.rewrite.float_graph import NORM_OPERATORS, FloatGraph

LARGEST_OUTPUT, LEAST_OUTPUT, POSITION_OUTPUT = RANGE_OUTPUTS = ("mionnx.largest", "mionnx.least", "mionnx.position")
WATCHED_OUTPUT = "mionnx.watched"
PLAIN_VALUE, SQUARES, MEAN_SQUARE, PARTIAL_SUMS = "value", "sum of squares", "mean square", "partial sums"
MASKED = -1e30  # scores below it are a mask's
OF_POSITIONS = "positions"
POSITIVE = frozenset(("Softmax", "Sigmoid", "Relu", "Exp", "Sqrt", "Abs", "Softplus"))  # have no negative number
BOUNDED = frozenset(("Sigmoid", "HardSigmoid", "Softmax", "Tanh", "Erf", "Sin", "Cos"))  # from -1 to 1


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


class _Row(NamedTuple):
    """The largest and least numbers of a value, for each position or head; `place` as in `Observation`."""

    number: int
    place: int | None
    most: str
    least: str


@dataclass
class _Writer:
    """The nodes that look at values, and the entries of each output."""

    graph: GraphProto
    opset: int
    nan: bool = False
    watched: str = ""  # the last hook point with positions
    observations: list[Observation] = field(default_factory=list)
    # The values of each output, numbers in a line, and which observations or places they are of.
    entries: dict[str, list[tuple[list[int], str]]] = field(
        default_factory=lambda: {name: [] for name in RANGE_OUTPUTS}
    )
    # Rows of one length: of a number for each position, or by the length or name of the axis that they are left with.
    tables: dict[str | int, list[_Row]] = field(default_factory=dict)
    places: int = 0
    nodes: list[NodeProto] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)

    def constant(self, values: ArrayLike, title: str = "") -> str:
        """An initializer of int64 or float32 numbers; many are told by a title."""
        array = np.asarray(values)
        name = f"mionnx.seen.{title or '_'.join(map(str, array.tolist()))}"
        if name not in self.constants:
            self.constants.add(name)
            integral = np.issubdtype(array.dtype, np.integer)
            self.graph.initializer.append(
                numpy_helper.from_array(array.astype(np.int64 if integral else np.float32), name)
            )
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

    def observe(self, title: tuple[str, str, str], placed: bool = False) -> tuple[int, int | None]:
        """Number an observation, and its place in the outputs that only some have."""
        place = self.places if placed else None
        self.observations.append(Observation(*title, place))
        self.places += placed
        return len(self.observations) - 1, place

    def look(self, title: tuple[str, str, str], line: str, placed: bool = False) -> None:
        """Enter the largest of the magnitudes in a line; of `placed` ones the least, and where the largest stands."""
        number, place = self.observe(title, placed)
        self.entries[LARGEST_OUTPUT].append(([number], self.reduce("ReduceMax", line, [0], "most", 1)))
        if place is not None:
            self.entries[LEAST_OUTPUT].append(([place], self.reduce("ReduceMin", line, [0], "least", 1)))
            position = self.add("ArgMax", [line], "place", axis=0, keepdims=1)
            self.entries[POSITION_OUTPUT].append(([place], position))

    def look_at_rows(
        self, title: tuple[str, str, str], value: str, axes: list[int], table: str | int, placed: bool
    ) -> None:
        """Enter a value that is reduced along axes to a row of a table."""
        most = self.reduce("ReduceMax", value, axes, "row's most", 0)
        least = most if title[2] in POSITIVE else self.reduce("ReduceMin", value, axes, "row's least", 0)
        self.enter_row(title, table, most, least, placed)

    def enter_row(
        self, title: tuple[str, str, str], table: str | int, most: str, least: str, placed: bool = False
    ) -> None:
        """Enter a row of a table, by its largest and its least numbers."""
        self.tables.setdefault(table, []).append(_Row(*self.observe(title, placed), most, least))

    def finish(self, table: str | int, rows: list[_Row]) -> None:
        """Reduce a table, [rows, positions or heads], and enter its numbers."""
        joined = self.add("Concat", [side for row in rows for side in (row.most, row.least)], f"table {table}", axis=0)
        length = table if isinstance(table, int) else -1
        pairs = self.add("Reshape", [joined, self.constant([len(rows), 2, length])], "pairs")
        # the larger of most and -least; not of their sizes: of a value without numbers, as of an empty past, these are
        # -inf and inf, and its largest stays -inf
        sizes = self.reduce(
            "ReduceMax", self.add("Mul", [pairs, self.constant([[1.0], [-1.0]], "signs")], "signed"), [1], "table", 0
        )
        self.entries[LARGEST_OUTPUT].append(
            ([row.number for row in rows], self.reduce("ReduceMax", sizes, [1], "most", 0))
        )
        placed = [i for i, row in enumerate(rows) if row.place is not None]
        if not placed:
            return
        places = [place for row in rows if (place := row.place) is not None]
        if len(placed) < len(rows):
            sizes = self.add("Gather", [sizes, self.constant(placed, f"placed {table}")], "placed", axis=0)
        self.entries[LEAST_OUTPUT].append((places, self.reduce("ReduceMin", sizes, [1], "least", 0)))
        self.entries[POSITION_OUTPUT].append((places, self.add("ArgMax", [sizes], "place", axis=1, keepdims=0)))

    def outputs(self) -> Iterator[tuple[str, int]]:
        """Write the outputs, each with its length: the numbers of all entries, put into their own order."""
        for table, rows in self.tables.items():
            self.finish(table, rows)
        for output, entries in self.entries.items():
            order = [number for numbers, _ in entries for number in numbers]
            if order:
                joined = self.add("Concat", [name for _, name in entries], f"all of {output}", axis=0)
                back = self.constant([int(one) for one in np.argsort(order)], f"order of {output}")
                self.nodes.append(helper.make_node("Gather", [joined, back], [output], output))
                yield output, len(order)

    def flat(self, value: str) -> str:
        """The numbers of a value in a line."""
        return self.add("Reshape", [value, self.constant([-1])], "line")


def largest(
    graph: FloatGraph, products: bool = False, *, nan: bool = False
) -> tuple[onnx.ModelProto, list[Observation]]:
    """Add the nodes and outputs above to a copy of a graph without a batch: of one row.

    Args:
        nan: count NaN as infinity, in the place of `WATCHED_OUTPUT`.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    writer, last = _Writer(proto.graph, graph.opset, nan), ""
    inside = {norm.insides[1] for norm in graph.decomposed}
    for node, value, name in _values(graph):
        if node.op_type in NORM_OPERATORS:
            _squares(writer, graph, node, node.input[0] if node.input[0] in graph.hooks else name)
        _value(writer, graph, node, value, name, inside)
        last = value
        if products and node in graph.products():
            magnitudes = [writer.add("Abs", [one], f"of {value}") for one in node.input[:2]]
            sums = writer.add("MatMul", magnitudes, "bound")
            writer.look((name, PARTIAL_SUMS, node.op_type), writer.flat(sums))
    del proto.graph.output[:]
    for output, length in writer.outputs():
        kind = TensorProto.INT64 if output == POSITION_OUTPUT else TensorProto.FLOAT
        proto.graph.output.append(helper.make_tensor_value_info(output, kind, [length]))
    if last and not nan:
        squares = writer.reduce("ReduceSumSquare", writer.flat(writer.watched or last), [0], "watched", 1)
        writer.nodes.append(helper.make_node("Identity", [squares], [WATCHED_OUTPUT], WATCHED_OUTPUT))
        proto.graph.output.append(helper.make_tensor_value_info(WATCHED_OUTPUT, TensorProto.FLOAT, [1]))
    nodes = [*_behind(proto.graph.node, writer.nodes)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    return proto, writer.observations


def _values(graph: FloatGraph) -> Iterator[tuple[NodeProto, str, str]]:
    """Nodes, the value that each computes, and its hook point's name where that is the same numbers."""
    named: dict[str, str] = {}
    for hook in graph.hooks:
        named.setdefault(graph.origin(hook), hook)
    for node, value in graph.computed():
        if value in graph.carrying and (value in named or node.op_type != "Concat"):
            yield node, value, named.pop(value, value)


def _value(writer: _Writer, graph: FloatGraph, node: NodeProto, value: str, name: str, inside: set[str]) -> None:
    """Look at one value, at its hook point if it has one."""
    axes = HookPoint.parse(name).axes or ()
    positioned = name in graph.hooks and has_sequence(axes) and "seq_k" not in axes and graph.flow.producer(name)
    seen = name if positioned else value
    title = (name, PLAIN_VALUE, node.op_type)
    if writer.nan and value not in inside:
        is_nan = writer.add("IsNaN", [seen], "is NaN")
        inputs = [is_nan, writer.constant([np.inf], "infinity"), seen]
        writer.nodes.append(helper.make_node("Where", inputs, [f"{seen}:no NaN"], f"{seen}:no NaN"))
        seen = f"{seen}:no NaN"
    if value in graph.masked or name in graph.masked:
        seen = writer.add("ThresholdedRelu", [seen], "unmasked", alpha=MASKED)
    if positioned:
        others = [axis for axis in range(len(axes)) if axis != sequence_axis(axes)]
        writer.look_at_rows(title, seen, others, OF_POSITIONS, placed=True)
        writer.watched = name
    elif value in inside:
        writer.look((name, MEAN_SQUARE, node.op_type), writer.flat(value), placed=True)
    elif node.op_type in BOUNDED and name not in graph.hooks:
        return
    elif len(lengths := graph.flow.facts.shapes.get(value, ())) > 2:
        others = [axis for axis in range(len(lengths)) if axis != 1]
        writer.look_at_rows(title, seen, others, lengths[1], placed=False)
    else:
        writer.look(title, writer.add("Abs", [writer.flat(seen)], "size"))


def _squares(writer: _Writer, graph: FloatGraph, node: NodeProto, name: str) -> None:
    """Look at the sums of squares into a fused norm, by the name of the hook point that it reads or makes."""
    source = node.input[0]
    of_tokens = len(graph.flow.facts.shapes.get(source, ())) == 3  # [batch, seq, ...]: one sum for each position
    end = f"of {node.output[0]}"
    if node.op_type == "LayerNormalization":
        mean = writer.reduce("ReduceMean", source, [-1], f"mean {end}", 1)
        source = writer.add("Sub", [source, mean], f"centred {end}")
    sums = writer.reduce("ReduceSumSquare", source, [0, 2] if of_tokens else [-1], f"squares {end}", 0)
    title = (name, SQUARES, node.op_type)
    if of_tokens:
        writer.enter_row(title, OF_POSITIONS, sums, sums, placed=True)
    else:
        writer.look(title, writer.flat(sums), placed=True)


def _behind(nodes: Iterable[NodeProto], looking: Sequence[NodeProto]) -> Iterator[NodeProto]:
    """All nodes, those that look at a value right behind it: it is at hand then, and need not be kept."""
    makers = {name: at for at, node in enumerate(nodes) for name in node.output}
    behind: dict[int, list[NodeProto]] = {}
    for node in looking:
        at = max((makers[name] for name in node.input if name in makers), default=-1)
        makers |= dict.fromkeys(node.output, at)
        behind.setdefault(at, []).append(node)
    yield from behind.get(-1, ())
    for at, node in enumerate(nodes):
        yield onnx.NodeProto.FromString(node.SerializeToString())
        yield from behind.get(at, ())
