"""Rewrite: inputs and outputs of a graph in float16 become float32, by a Cast behind each input, before each output.

What runs the graph then needs no arrays of float16, which JavaScript has had for a short time only. Inside nothing
changes: a number that is fed is rounded where it enters.
"""

import onnx
from onnx import NodeProto, TensorProto, helper

from mionnx.graph.exponents import renamed

INSIDE_END = ".float16"  # end of the names of inputs and outputs as the graph has them


def with_float32_ports(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model whose inputs and outputs of float16 are float32."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    body, before, behind, names = result.graph, list[NodeProto](), list[NodeProto](), dict[str, str]()
    fixed = {tensor.name for tensor in body.initializer}  # of inputs with a default
    for value in body.input:
        if _narrow(value) and value.name not in fixed:
            names[value.name] = f"{value.name}{INSIDE_END}"
            before.append(_cast(value.name, names[value.name], TensorProto.FLOAT16))
    for value in body.output:
        if _narrow(value):
            names[value.name] = f"{value.name}{INSIDE_END}"
            behind.append(_cast(names[value.name], value.name, TensorProto.FLOAT))
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in body.node]
    for node in nodes:
        renamed(node, names)
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*body.input, *body.output):
        if value.name in names:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for value in body.value_info:
        value.name = names.get(value.name, value.name)
    del body.node[:]
    body.node.extend([*before, *nodes, *behind])
    return result


def _narrow(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type == TensorProto.FLOAT16)


def _cast(source: str, into: str, kind: int) -> NodeProto:
    return helper.make_node("Cast", [source], [into], f"{source}:port", to=kind)
