"""`Dataflow`: the nodes that make and read each value of a graph, and what is written down of the values.

The one place in mionnx that reads a graph: producers, readers, initializers, types, shapes and constants hang on it.
It edits nothing; `extract` copies a part of it.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

# Operators whose outputs are booleans or counts, whatever they read.
BOOLEAN = frozenset(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"))
BOOLEAN |= {"And", "Or", "Xor", "Not", "IsNaN", "IsInf"}
COUNTING = frozenset(("Shape", "Size", "NonZero", "ArgMax", "ArgMin"))
Axes = tuple[int | str, ...]  # numbers, or names of lengths that the run decides


class Dataflow:
    """The nodes of a graph and the values between them."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto, self.nodes = proto, list(proto.graph.node)
        # Value -> index of the node that makes it; inputs and weights have none.
        self.producers = {name: i for i, node in enumerate(self.nodes) for name in node.output if name}
        # For each node, the values that it reads, those that its subgraphs take from outside included.
        self.reads = [tuple(reads(node)) for node in self.nodes]

    @cached_property
    def initializers(self) -> dict[str, TensorProto]:
        """Name -> the weight or constant beside the nodes."""
        return {tensor.name: tensor for tensor in self.proto.graph.initializer}

    @cached_property
    def varying(self) -> set[str]:
        """The values that depend on an input of the graph."""
        return self.descendants(value.name for value in self.proto.graph.input)

    @cached_property
    def facts(self) -> "Facts":
        """Types, shapes and constants of its values, as far as they are written down."""
        return Facts(self.proto.graph)

    def readers(self, value: str) -> list[NodeProto]:
        """The nodes that read a value, in order."""
        return [self.nodes[i] for i in self.consumers.get(value, ())]

    @cached_property
    def consumers(self) -> dict[str, list[int]]:
        """Value -> indices of the nodes that read it."""
        consumers = defaultdict(list)
        for i, names in enumerate(self.reads):
            for name in dict.fromkeys(names):
                consumers[name].append(i)
        return consumers

    def producer(self, value: str) -> onnx.NodeProto | None:
        """The node that makes a value; None for an input or a weight."""
        return self.nodes[self.producers[value]] if value in self.producers else None

    def ancestors(self, ends: Iterable[str], sources: Collection[str] = ()) -> set[int]:
        """Indices of the nodes that compute some values from others."""
        nodes: set[int] = set()
        waiting = [name for name in ends if name not in sources]
        while waiting:
            node = self.producers.get(waiting.pop())
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [name for name in self.reads[node] if name not in sources]
        return nodes

    def descendants(self, sources: Iterable[str], barriers: Collection[str] = ()) -> set[str]:
        """Some values and all computed from them, up to and including the barriers."""
        values = {*sources}
        passing = {*values}  # barriers are reached, but nothing behind them is
        for node, names in zip(self.nodes, self.reads, strict=True):
            if not passing.isdisjoint(names):
                values.update(name for name in node.output if name)
                passing.update(name for name in node.output if name and name not in barriers)
        return values

    def needed(self, sources: Iterable[str], ends: Sequence[str]) -> list[str]:
        """The sources that some values are computed from, each taken as it is."""
        sources = [*sources]
        read = self.read_by(self.ancestors(ends, {*sources}))
        return [name for name in sources if name in read]

    def read_by(self, nodes: Iterable[int]) -> set[str]:
        """The values that some nodes read."""
        return {name for node in nodes for name in self.reads[node]}

    def crossings(
        self, cuts: Sequence[Collection[str]], ends: Sequence[str], sources: Iterable[str]
    ) -> list[tuple[str, ...]]:
        """The values that cross each cut of a graph, in its order: made before it, and read after it."""
        # `cuts` are the values that end each segment but the last, in execution order; none depends on another of its
        # cut. A node belongs to the first segment that reads what it makes, so that little crosses. What does not
        # follow from `sources` (masks, tables of positions, turned weights) belongs to every segment that reads it, and
        # crosses nothing. One of `ends` that is made before a cut crosses it.
        cut_of = {name: number for number, names in enumerate(cuts) for name in names}
        moving = self.descendants({*sources, *cut_of})
        first: dict[str, int] = {}  # value -> the first segment that reads it
        last = dict.fromkeys(ends, len(cuts))  # and the last one
        crossing: list[list[str]] = [[] for _ in cuts]
        # backwards: a node's readers, and so the first segment that reads what it makes, are known when it is reached
        for i in sorted(self.ancestors([*cut_of, *ends]), reverse=True):
            outputs = [name for name in self.nodes[i].output if name in moving]
            if not outputs:
                continue
            segment = min(cut_of.get(name, first.get(name, len(cuts))) for name in outputs)
            for name in outputs:
                for number in range(segment, last.get(name, segment)):
                    crossing[number].append(name)
            for name in self.reads[i]:
                first[name] = min(segment, first.get(name, segment))
                last[name] = max(segment, last.get(name, segment))
        return [tuple(reversed(names)) for names in crossing]


def subgraphs(node: NodeProto) -> list[GraphProto]:
    """The branches of an `If`, the body of a `Scan`."""
    return [one.g for one in node.attribute if one.type == AttributeProto.GRAPH]


def reads(node: NodeProto) -> list[str]:
    """The values that a node reads, in its subgraphs too."""
    return [name for name in node.input if name] + [name for graph in subgraphs(node) for name in from_outside(graph)]


def made_in(graph: GraphProto) -> set[str]:
    """The values that a graph makes or is given: outputs of nodes, inputs, initializers."""
    outputs = {name for node in graph.node for name in node.output}
    return outputs | {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}


def from_outside(graph: GraphProto) -> list[str]:
    """The values that a subgraph takes from the graph around it."""
    own = made_in(graph)
    names = [name for node in graph.node for name in reads(node)] + [value.name for value in graph.output]
    return [name for name in dict.fromkeys(names) if name not in own]


class Facts:
    """Element types, shapes and constants of a graph's values, and of the graphs around it, as far as written down."""

    def __init__(self, graph: GraphProto | None = None, outer: "Facts | None" = None) -> None:
        self.types: dict[str, int] = dict(outer.types) if outer else {}  # value -> ONNX's number of its element type
        # Value -> its axes; lengths that are not known have names of their own, "?...".
        self.shapes: dict[str, Axes] = dict(outer.shapes) if outer else {}
        # Value -> its tensor, where that lies in the graph.
        self.constants: dict[str, TensorProto] = dict(outer.constants) if outer else {}
        self.makers: dict[str, NodeProto] = dict(outer.makers) if outer else {}  # value -> the node that makes it
        if graph is not None:
            for tensor in graph.initializer:
                self.types[tensor.name], self.shapes[tensor.name] = tensor.data_type, tuple(tensor.dims)
                if tensor.data_location != TensorProto.EXTERNAL:  # weights stay in their files
                    self.constants[tensor.name] = tensor
            self.tell([*graph.value_info, *graph.input, *graph.output])
            self.follow(graph.node)

    def tell(self, values: Iterable[onnx.ValueInfoProto]) -> None:
        """Take over what is declared of some values."""
        for value in values:
            kind = value.type.tensor_type
            if kind.elem_type:
                self.types[value.name] = kind.elem_type
            if kind.HasField("shape"):
                self.shapes[value.name] = tuple(
                    dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"?{value.name}.{i}"
                    for i, dim in enumerate(kind.shape.dim)
                )

    def follow(self, nodes: Iterable[NodeProto]) -> None:
        """Take over the makers of some nodes' outputs, and their types where none is declared."""
        for node in nodes:
            self.makers |= dict.fromkeys(node.output, node)
            for place, output in enumerate(node.output):
                if output not in self.types and (kind := self._type_of(node, place)):
                    self.types[output] = kind
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
                self.shapes.setdefault(node.output[0], tuple(node.attribute[0].t.dims))

    def _type_of(self, node: NodeProto, output: int) -> int | None:
        """The element type of a node's output; None if it cannot be told from its inputs."""
        if node.op_type in BOOLEAN:
            return TensorProto.BOOL
        if node.op_type in COUNTING or (node.op_type == "TopK" and output):
            return TensorProto.INT64
        if node.op_type == "Cast":
            return int(attributes(node)["to"])
        if node.op_type in ("Constant", "ConstantOfShape"):
            return next((one.t.data_type for one in node.attribute if one.name == "value"), TensorProto.FLOAT)
        # the input with the output's type: behind a Where's condition, a CastLike's value, a DequantizeLinear's
        # integers
        sources = node.input[{"Where": 1, "CastLike": 1, "DequantizeLinear": 1}.get(node.op_type, 0) :]
        return next((self.types[name] for name in sources if name in self.types), None)

    def type(self, name: str) -> int:
        """The element type of a value; float32 where nothing tells."""
        return self.types.get(name, TensorProto.FLOAT)

    def number(self, name: str) -> NDArray[Any] | None:
        """The numbers of a constant that lies in the graph; None of any other value."""
        return numpy_helper.to_array(self.constants[name]) if name in self.constants else None


def attributes(node: NodeProto) -> dict[str, Any]:
    """A node's attributes by name; texts as `str`."""
    values = {one.name: helper.get_attribute_value(one) for one in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def extract(origin: onnx.ModelProto | Dataflow, starts: Collection[str], ends: Iterable[str]) -> onnx.ModelProto:
    """Extract the nodes that compute some values from others."""
    # `starts` become inputs, before all others; what else is needed is computed too, from the graph's own inputs and
    # weights. `ends` become outputs, of the model's own shape and type where it says one.
    flow, ends = origin if isinstance(origin, Dataflow) else Dataflow(origin), list(ends)
    model, graph = flow.proto, flow.proto.graph
    nodes = sorted(flow.ancestors(ends, starts))
    read = flow.read_by(nodes) | {*ends}
    infos = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    # for values without a declaration: the dtype of the model's first output
    dtype = next(value.type.tensor_type.elem_type for value in graph.output)
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    part.graph.name = graph.name
    part.graph.node.extend(flow.nodes[i] for i in nodes)
    part.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    part.graph.input.extend(infos.get(name) or _value(name, dtype) for name in starts)
    part.graph.input.extend(value for value in graph.input if value.name in read and value.name not in starts)
    part.graph.output.extend(infos.get(name) or _value(name, dtype) for name in ends)
    inner = {name for i in nodes for name in flow.nodes[i].output} - {*ends}
    part.graph.value_info.extend(value for value in graph.value_info if value.name in inner)
    return part


def _value(name: str, dtype: int) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, dtype, None)
