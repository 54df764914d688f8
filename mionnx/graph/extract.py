"""`extract`: the part of a graph between some values and others, as a model of its own."""

from collections.abc import Collection, Iterable

import onnx

from mionnx.graph.dataflow import Dataflow


def extract(origin: onnx.ModelProto | Dataflow, starts: Collection[str], ends: Iterable[str]) -> onnx.ModelProto:
    """Extract the nodes that compute some values from others.

    Whatever else they need is computed too, from the graph's own inputs and weights.

    Args:
        origin: the model, without its weights, or its dataflow; left alone.
        starts: values that become inputs, before all others.
        ends: values that become outputs, of the model's own shape and type where it says one.
    """
    flow, ends = origin if isinstance(origin, Dataflow) else Dataflow(origin), list(ends)
    model, graph = flow.proto, flow.proto.graph
    nodes = sorted(flow.ancestors(ends, starts))
    read = flow.read_by(nodes) | {*ends}
    infos = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
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
