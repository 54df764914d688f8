"""Dtypes and shapes of the values of a graph, as far as they follow without running it."""

from collections.abc import Mapping

import onnx
import onnx.shape_inference
import onnx_ir as ir

from mionnx.graph.known_value import MOST_FOLLOWED, infer_types_of
from mionnx.graph.operator_table import OPERATORS, Typed, contrib_outputs


def infer_types(model: ir.Model) -> list[onnx.ValueInfoProto]:
    """Write down shapes and dtypes beyond onnx's inference, and return what onnx inferred."""
    inferred = _inferred(model)
    values = {value.name: value for node in model.graph for value in node.outputs}
    for name, entry in inferred.items():
        shape, kind = ir.serde.deserialize_type_proto_for_shape(entry.type), entry.type.tensor_type.elem_type
        if name in values and shape is not None:
            values[name].shape = shape
        if name in values and kind:
            values[name].dtype = ir.DataType(kind)
    for node in model.graph:
        set_types(node, model.opset_imports, shapes=True)
    return list(inferred.values())


def _inferred(model: ir.Model) -> dict[str, onnx.ValueInfoProto]:
    """Types by name of value, from onnx's own inference; empty if it fails."""
    try:
        proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True)
    except Exception:  # its errors share no base class
        return {}
    return {entry.name: entry for entry in (*proto.graph.value_info, *proto.graph.output)}


def set_types(node: ir.Node, opsets: Mapping[str, int], shapes: bool = False) -> None:
    """Write down unknown dtypes of a node's outputs, and unknown shapes if `shapes`."""
    if all(value.type is not None and (value.shape is not None or not shapes) for value in node.outputs):
        return
    inner = next((one.as_graph() for one in node.attributes.values() if one.type == ir.AttributeType.GRAPH), None)
    if inner is not None:  # the body of a loop gives one step of what its node gives: of the same dtype only
        steps = inner.outputs[node.op_type == "Loop" :]  # the first of a Loop's says whether it goes on
        for value, step in zip(node.outputs, steps, strict=False):  # as many, unless the file is damaged
            value.type = value.type or step.type
        return
    for value, inferred in zip(node.outputs, _output_types(node, opsets), strict=False):
        if value.type is None and inferred.tensor_type.elem_type:
            value.type = ir.TensorType(ir.DataType(inferred.tensor_type.elem_type))
        if shapes and value.shape is None:
            value.shape = ir.serde.deserialize_type_proto_for_shape(inferred)


def _output_types(node: ir.Node, opsets: Mapping[str, int]) -> list[onnx.TypeProto]:
    row = OPERATORS.get((node.domain, node.op_type))
    names = ["" if value is None else f"input.{place}" for place, value in enumerate(node.inputs)]
    proto = onnx.NodeProto(
        op_type=node.op_type,
        domain=node.domain,
        input=names,
        output=[f"output.{place}" for place in range(len(node.outputs))],
        attribute=[ir.to_proto(attribute) for attribute in node.attributes.values()],
    )
    try:
        if row is not None and row.shapes is not None:
            typed = [None if value is None else _typed(value) for value in node.inputs]
            return [onnx.helper.make_tensor_type_proto(*output) for output in contrib_outputs(proto, typed)]
        inputs = {name: value for name, value in zip(names, node.inputs, strict=True) if value is not None}
        content = {name: tensor for name, value in inputs.items() if (tensor := _content(value)) is not None}
        types = infer_types_of(proto, {name: _type(value) for name, value in inputs.items()}, content, opsets)
    except Exception:  # onnx's errors share no base class
        return []
    return [types.get(name, onnx.TypeProto()) for name in proto.output]


def _typed(value: ir.Value) -> Typed:
    dims = None if value.shape is None else tuple(dim if isinstance(dim, int) else None for dim in value.shape)
    return 0 if value.dtype is None else int(value.dtype), dims


def _type(value: ir.Value) -> onnx.TypeProto:
    dims = None if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return onnx.helper.make_tensor_type_proto(0 if value.dtype is None else int(value.dtype), dims)


def _content(value: ir.Value) -> onnx.TensorProto | None:
    """A small constant that lies in the graph; None of any other value."""
    tensor = ir.convenience.get_const_tensor(value)
    inside = tensor is not None and not isinstance(tensor, ir.ExternalTensor) and tensor.size <= MOST_FOLLOWED
    return onnx.numpy_helper.from_array(tensor.numpy()) if inside else None
