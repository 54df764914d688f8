"""Rewrite: a graph of float32 in a narrow dtype, with islands that stay as they are.

1. A node outside the islands computes in the narrow dtype; one inside in float32, with a Cast on every edge between.
   A value has its name where it is computed, and in the other dtype the name with `.half` or `.single` behind it.
2. Islands by themselves: positions up to their cosines and sines, nodes with subgraphs (recurrences), and what has no
   kernel in a narrow dtype; and those that are asked for.
3. The model's inputs and outputs are in the narrow dtype, but for those that only islands read or make (the state of a
   recurrence), and for inputs that have a default.
4. Numbers in the graph are narrowed at once; minus infinity of masks becomes the dtype's lowest number. Weights in
   files are left to `WeightJob`s: which initializer, times which power of two, in which dtype.
5. A product of a weight with a power of two, which a rescale puts there, becomes a part of the weight's job.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mionnx.errors import ModelError
from mionnx.graph.dataflow import attributes, reads, subgraphs
from mionnx.graph.exponents import power_of, renamed
from mionnx.rewrite.float_graph import MOVING_OPERATORS, FloatGraph
from mionnx.rewrite.rounded import NARROW_DTYPES, NUMBER

SINGLE = TensorProto.FLOAT
WIDE_OPERATORS = frozenset(("Range", "Cos", "Sin", "CumSum", "Mod", "NonZero", "OneHot", "TopK"))  # few kernels
STANDS_FOR_INFINITY = 1e30  # what is beyond it stands for infinity


@dataclass(frozen=True)
class WeightJob:
    """One initializer of the narrow graph, to be written from one of the wide graph.

    Attributes:
        source: the initializer that it is made of, times 2^exponent.
        wide: whether it stays float32.
    """

    name: str
    source: str
    exponent: int = 0
    wide: bool = False


@dataclass
class NarrowGraph:
    """A graph in a narrow dtype, whose weights are still to be written.

    Attributes:
        jobs: of the initializers that lie in files.
        wide: hook points whose values are float32.
    """

    proto: onnx.ModelProto
    jobs: list[WeightJob] = field(default_factory=list)
    wide: set[str] = field(default_factory=set)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Initializer of a job -> its shape."""
        names = {job.name for job in self.jobs}
        return {one.name: tuple(one.dims) for one in self.proto.graph.initializer if one.name in names}

    @property
    def untouched(self) -> list[str]:
        """Initializers in files that stay as they are: integers of blocks."""
        shapes, external = self.shapes, TensorProto.EXTERNAL
        initializers = self.proto.graph.initializer
        return [one.name for one in initializers if one.data_location == external and one.name not in shapes]

    def point(self, file: str, places: Mapping[str, int], kinds: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
        """Let initializers be what is in a file: name -> first byte, dtype and shape."""
        for tensor in self.proto.graph.initializer:
            if tensor.name not in kinds:
                continue
            kind, shape = kinds[tensor.name]
            number = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
            reference = TensorProto(name=tensor.name, dims=shape, data_type=number)
            reference.data_location = TensorProto.EXTERNAL
            length = np.dtype(kind).itemsize * prod(shape)
            for key, value in (("location", file), ("offset", places[tensor.name]), ("length", length)):
                reference.external_data.add(key=key, value=str(value))
            tensor.CopyFrom(reference)

    def describe(self, props: Mapping[str, str]) -> None:
        """Set the metadata."""
        del self.proto.metadata_props[:]
        for key, value in props.items():
            self.proto.metadata_props.add(key=key, value=value)


def narrow(graph: FloatGraph, dtype: str, islands: frozenset[str] = frozenset()) -> NarrowGraph:
    """Narrow a graph; `islands` are values whose nodes stay float32."""
    return _Narrower(graph, dtype, islands).narrowed()


class _Narrower:
    def __init__(self, graph: FloatGraph, dtype: str, islands: frozenset[str]) -> None:
        self.graph, self.dtype, self.kind = graph, dtype, NUMBER[dtype]
        self.nodes: list[NodeProto] = []
        self.cast: set[tuple[str, int]] = set()
        body = graph.proto.graph
        defaults = {value.name for value in body.input}  # of inputs that may be left out, as a recurrence's gates
        singles = [tensor for tensor in body.initializer if tensor.data_type == SINGLE]
        self.weights = {tensor.name: tensor for tensor in singles if tensor.name not in defaults}
        self.gates = {tensor.name: tensor for tensor in singles if tensor.name in defaults}
        self.folded = dict(self._folded())
        self.wide_nodes = self._islands(islands)
        self.wide_values = {name for at in self.wide_nodes for name in graph.flow.nodes[at].output} | {*self.gates}
        readers = graph.flow.consumers
        inputs = [value.name for value in body.input if graph.is_float(value.name)]
        self.wide_values |= {name for name in inputs if {*readers.get(name, [-1])} <= self.wide_nodes}
        self.used: dict[str, WeightJob] = {}
        self.tensors: dict[str, TensorProto] = {}

    def _folded(self) -> Iterator[tuple[str, tuple[str, int]]]:
        """Products of a weight and a power of two -> the weight and the exponent."""
        for node in self.graph.flow.nodes:
            powers = [power_of(name) for name in node.input]
            if node.op_type == "Mul" and len(powers) == 2 and powers[1] is not None and node.input[0] in self.weights:
                yield node.output[0], (node.input[0], powers[1])

    def _islands(self, islands: frozenset[str]) -> set[int]:
        """Indices of the nodes that stay float32."""
        wide, flow = islands | self.graph.angles, self.graph.flow
        nodes = {
            at
            for at, node in enumerate(flow.nodes)
            if subgraphs(node)
            or node.op_type in WIDE_OPERATORS
            or not wide.isdisjoint(node.output)
            or any(".rwkv." in name for name in node.output)  # of a recurrence, its hook points among them
        }
        for output in self.graph.proto.graph.output:  # of the model, moved there from an island: a recurrence's state
            way, at = list[int](), flow.producers.get(output.name)
            while at is not None and at not in nodes and flow.nodes[at].op_type in MOVING_OPERATORS:
                way.append(at)
                at = flow.producers.get(flow.nodes[at].input[0])
            nodes |= {*way} if at in nodes else set()
        return nodes

    def narrowed(self) -> NarrowGraph:
        proto = onnx.ModelProto()
        proto.CopyFrom(self.graph.proto)
        body = proto.graph
        outputs = {value.name for value in body.output}
        for at, origin in enumerate(self.graph.flow.nodes):
            if origin.output[0] in self.folded:
                continue
            node = NodeProto.FromString(origin.SerializeToString())
            self._node(node, at in self.wide_nodes, {*self.graph.flow.reads[at]})
        del body.node[:]
        body.node.extend(_needed(self.nodes, outputs))
        for value in (*body.input, *body.output):
            if value.type.tensor_type.elem_type == SINGLE and value.name not in self.wide_values:
                value.type.tensor_type.elem_type = self.kind
        declared = [value for value in body.value_info if value.name in self.graph.hooks]
        for value in declared:
            if value.type.tensor_type.elem_type == SINGLE and value.name not in self.wide_values:
                value.type.tensor_type.elem_type = self.kind
        copies_of = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in declared]
        del body.value_info[:]
        body.value_info.extend(copies_of)
        initializers = [tensor for tensor in body.initializer if tensor.data_type != SINGLE]
        initializers += [*self.tensors.values(), *self.gates.values()]
        copies = [TensorProto.FromString(tensor.SerializeToString()) for tensor in initializers]
        del body.initializer[:]
        body.initializer.extend(copies)
        read = {name for node in body.node for name in reads(node)} | outputs | {*self.gates}
        for extra in [tensor for tensor in body.initializer if tensor.name not in read]:
            body.initializer.remove(extra)
        jobs = [job for job in self.used.values() if job.name in read]
        wide = {name for name in self.graph.hooks if name in self.wide_values and self.graph.is_float(name)}
        return NarrowGraph(proto, jobs, wide)

    def _node(self, node: NodeProto, wide: bool, read: set[str]) -> None:
        """Write one node in its dtype, what it reads cast to that."""
        names = {name: self._read(name, wide) for name in read if self.graph.is_float(name)}
        renamed(node, names)
        if not wide:
            self._narrow_attributes(node)
        self.nodes.append(node)

    def _read(self, name: str, wide: bool) -> str:
        """The name of a value, or of a weight, in the dtype of its reader."""
        source, exponent = self.folded.get(name, (name, 0))
        if source in self.weights:
            return self._weight(name, source, exponent, wide)
        if wide == (name in self.wide_values):
            return name
        other = f"{name}.single" if wide else f"{name}.half"
        if (other, wide) not in self.cast:
            self.cast.add((other, wide))
            self.nodes.append(self._cast(name, other, SINGLE if wide else self.kind))
        return other

    @staticmethod
    def _cast(value: str, into: str, kind: int) -> NodeProto:
        return helper.make_node("Cast", [value], [into], f"{into}:cast", to=kind)

    def _weight(self, name: str, source: str, exponent: int, wide: bool) -> str:
        """A weight in the dtype of its reader: one of its own for each dtype and power."""
        into = f"{name}.single" if wide else name
        tensor = self.weights[source]
        if into in self.tensors:
            return into
        result = TensorProto(name=into, data_type=SINGLE if wide else self.kind, dims=tensor.dims)
        if tensor.data_location == TensorProto.EXTERNAL:
            self.used[into] = WeightJob(into, source, exponent, wide)
        else:
            array = narrowed_array(numpy_helper.to_array(tensor), exponent, "" if wide else self.dtype, source)
            result = numpy_helper.from_array(array, into)
        self.tensors[into] = result
        return into

    def _narrow_attributes(self, node: NodeProto) -> None:
        """Let casts and constants of float32 be narrow."""
        for entry in node.attribute:
            if node.op_type == "Cast" and entry.name == "to" and entry.i == SINGLE:
                entry.i = self.kind
            elif entry.HasField("t") and entry.t.data_type == SINGLE:
                array = narrowed_array(numpy_helper.to_array(entry.t), 0, self.dtype, node.name)
                entry.t.CopyFrom(numpy_helper.from_array(array, entry.t.name))
        if node.op_type == "Constant" and "value_float" in attributes(node):
            number = np.array(attributes(node)["value_float"], np.float32)
            del node.attribute[:]
            array = narrowed_array(number, 0, self.dtype, node.name)
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(array)))


def narrowed_array(array: NDArray[Any], exponent: int, dtype: str, name: str) -> NDArray[Any]:
    """Numbers times 2^exponent in a narrow dtype, or in float32 where it is empty.

    Raises:
        ModelError: a number is beyond the dtype's range, and stands for no infinity.
    """
    scaled = np.ldexp(np.asarray(array, np.float32), exponent).astype(np.float32)
    if not dtype:
        return scaled
    limit = float(ml_dtypes.finfo(NARROW_DTYPES[dtype]).max)
    beyond = (np.abs(scaled) > limit) & (np.abs(scaled) < STANDS_FOR_INFINITY)
    if beyond.any():
        largest = float(np.abs(scaled[beyond]).max())
        raise ModelError(f"{name} has {largest:,.0f}, beyond the {limit:,.0f} of {dtype}: keep it in float32")
    return np.asarray(np.clip(scaled, -limit, limit).astype(NARROW_DTYPES[dtype]))


def _needed(nodes: list[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """The nodes that outputs depend on; a cast that nobody reads is none of them."""
    read, live = {*outputs}, []
    for node in reversed(nodes):
        if not read.isdisjoint(node.output):
            live.append(node)
            read.update(reads(node))
    return live[::-1]
