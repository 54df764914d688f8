"""Rewrite: the part of a graph between some values and others. The first become inputs; the rest is left out."""

from collections.abc import Collection, Iterable

import onnx

from mionnx.graph.dataflow import Dataflow


def extract(origin: onnx.ModelProto, starts: Collection[str], ends: Iterable[str]) -> onnx.ModelProto:
    """The nodes that compute some values from others, as a model of its own.

    What it needs besides, and can compute from the tokens without the values that it starts with, it still computes.

    Args:
        origin: the model, without its weights; left alone.
        starts: values that become inputs, before all others.
        ends: values that become outputs, of the model's own shape and type where it says one.
    """
    wiring, ends = Dataflow(origin), list(ends)
    kept = sorted(wiring.ancestors(ends, starts))
    read = {name for i in kept for name in wiring.read[i]} | {*ends}
    graph = origin.graph
    known = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    dtype = next(value.type.tensor_type.elem_type for value in graph.output)
    made = onnx.ModelProto(ir_version=origin.ir_version, opset_import=origin.opset_import, functions=origin.functions)
    made.graph.name = graph.name
    made.graph.node.extend(wiring.nodes[i] for i in kept)
    made.graph.initializer.extend(tensor for tensor in graph.initializer if tensor.name in read)
    made.graph.input.extend(known.get(name) or _value(name, dtype) for name in starts)
    made.graph.input.extend(value for value in graph.input if value.name in read and value.name not in starts)
    made.graph.output.extend(known.get(name) or _value(name, dtype) for name in ends)
    written = {name for i in kept for name in wiring.nodes[i].output} - {*ends}
    made.graph.value_info.extend(value for value in graph.value_info if value.name in written)
    return made


def _value(name: str, dtype: int) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, dtype, None)
