"""Inputs and outputs of a compiled graph: their names, dtypes and axes."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import onnx

# Axes of a hooked model -> the names that clients know: transformers.js makes an empty past by them.
AXES = {
    "batch": "batch_size",
    "seq": "sequence_length",
    "past": "past_sequence_length",
    "total": "total_sequence_length",
}


class Port(NamedTuple):
    """An input or output: the dtype by its ONNX name, the shape in numbers and names."""

    name: str
    dtype: str
    shape: list[Any]


class GraphInterface(NamedTuple):
    """The inputs of a graph, those that have a default, and its outputs."""

    inputs: list[Port]
    optional: list[Port]
    outputs: list[Port]


def interface_of(graph: onnx.GraphProto) -> GraphInterface:
    """The interface of a graph."""
    defaults = {tensor.name for tensor in graph.initializer}
    inputs = [_port(value) for value in graph.input]
    needed = [port for port in inputs if port.name not in defaults]
    return GraphInterface(needed, [port for port in inputs if port.name in defaults], [*map(_port, graph.output)])


def _port(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    return Port(value.name, onnx.TensorProto.DataType.Name(tensor.elem_type), dims)


def name_axes(graph: onnx.GraphProto) -> None:
    """Name the dynamic axes of a graph's values as clients do."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in AXES:
                dim.dim_param = AXES[dim.dim_param]


def renamed_ports(origin: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    """A model whose inputs and outputs have other names; inside it values keep theirs."""
    proto = onnx.ModelProto()
    proto.CopyFrom(origin)
    graph, identity = proto.graph, partial(onnx.helper.make_node, "Identity")
    first = [identity([names[one.name]], [one.name]) for one in graph.input if one.name in names]
    last = [identity([one.name], [names[one.name]]) for one in graph.output if one.name in names]
    nodes = [*first, *graph.node, *last]
    del graph.node[:]
    graph.node.extend(nodes)
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    return proto
