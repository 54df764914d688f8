"""Dtypes and shapes of the values of a graph, as far as they follow without running it."""

import onnx
import onnx.shape_inference
import onnx_ir as ir

BOOLEAN = frozenset(
    "Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not IsNaN IsInf".split()  # noqa: SIM905
)
INTEGER = frozenset("Shape Size NonZero ArgMax ArgMin".split())  # noqa: SIM905
FRACTIONS = frozenset("DynamicQuantizeMatMul MatMulIntegerToFloat".split())  # noqa: SIM905
SECOND_INPUT = frozenset(("Where",))
LOOKUPS = frozenset(("Gather", "GatherBlockQuantized"))
NORMS = frozenset(
    "SimplifiedLayerNormalization SkipSimplifiedLayerNormalization SkipLayerNormalization LayerNormalization".split()  # noqa: SIM905
)
ALIKE = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Cast",
        "Identity",
        "Sigmoid",
        "Tanh",
        "Gelu",
        "FastGelu",
        "QuickGelu",
        "BiasGelu",
        "Softmax",
        "RotaryEmbedding",
        "DynamicQuantizeLinear",
    ]
)


def infer_types(model: ir.Model) -> list[onnx.ValueInfoProto]:
    """Write down shapes and dtypes, beyond the operators that onnx's inference knows.

    Returns:
        what onnx inferred. ONNX Runtime opens a graph that says so in a third of the time.
    """
    inferred = _inferred(model)
    values = {value.name: value for node in model.graph for value in node.outputs}
    for name, entry in inferred.items():
        shape, kind = ir.serde.deserialize_type_proto_for_shape(entry.type), entry.type.tensor_type.elem_type
        if name in values and shape is not None:
            values[name].shape = shape
        if name in values and kind:
            values[name].dtype = ir.DataType(kind)
    for node in model.graph:
        set_types(node)
        first = node.outputs[0]
        if first.shape is None:
            first.shape = _shape(node)
        also = (3,) if node.op_type in NORMS else (1,) if node.op_type == "TopK" else ()
        for place in also:
            if place < len(node.outputs) and node.outputs[place].shape is None:
                node.outputs[place].shape = first.shape
    return list(inferred.values())


def _inferred(model: ir.Model) -> dict[str, onnx.ValueInfoProto]:
    """Types by name of value, from onnx's own inference; empty if it fails."""
    try:
        proto = onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True)
    except Exception:  # its errors share no base class
        return {}
    return {entry.name: entry for entry in (*proto.graph.value_info, *proto.graph.output)}


def _shape(node: ir.Node) -> ir.Shape | None:
    """The shape of a first output, of the operators before queries and before chosen experts."""
    shapes = [None if value is None else value.shape for value in node.inputs]
    if node.op_type == "Gemm" and shapes[1] is not None:
        return ir.Shape([None, shapes[1][0 if node.attributes.get_int("transB", 0) else 1]])
    if node.op_type == "Reshape" and (asked := _constant(node.inputs[1])) is not None and (0 not in asked):
        return ir.Shape([None if size == -1 else size for size in asked])
    if not shapes or shapes[0] is None:
        return None
    if node.op_type == "TopK" and node.attributes.get_int("axis", -1) in (-1, shapes[0].rank() - 1):
        return ir.Shape([*shapes[0][:-1], *(_constant(node.inputs[1]) or [None])])
    if node.op_type in NORMS:
        return shapes[0]
    if node.op_type in ALIKE:
        known = [shape for value, shape in zip(node.inputs, shapes, strict=True) if value is not None]
        return None if None in known else max(known, key=lambda shape: shape.rank())
    if node.op_type in LOOKUPS and shapes[1] is not None:
        return ir.Shape([*shapes[1], *shapes[0][1:]])
    if node.op_type == "MatMulNBits":
        return ir.Shape([*shapes[0][:-1], node.attributes.get_int("N", 0)])
    if node.op_type in ("MatMul", "FusedMatMul", "MatMulInteger") and shapes[1] is not None and shapes[1].rank() == 2:
        turned = node.attributes.get_int("transB", 0)
        return ir.Shape([*shapes[0][:-1], shapes[1][0 if turned else 1]])
    return None


def _constant(value: ir.Value | None) -> list[int] | None:
    """The numbers of a constant list; None if it is none."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else [int(number) for number in tensor.numpy().ravel()]


def set_types(node: ir.Node) -> None:
    """Write down the dtypes of a node's outputs where they are not known."""
    for place, value in enumerate(node.outputs):
        if value.type is None:
            kind = _kind(node, place)
            value.type = None if kind is None else ir.TensorType(kind)


def _kind(node: ir.Node, place: int) -> ir.DataType | None:
    if node.op_type in BOOLEAN:
        return ir.DataType.BOOL
    if node.op_type in INTEGER or (node.op_type == "TopK" and place == 1):
        return ir.DataType.INT64
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", int(ir.DataType.FLOAT)))
    if node.op_type == "MatMulInteger":
        return ir.DataType.INT32
    if node.op_type == "DequantizeLinear" or node.op_type in FRACTIONS:
        scale = node.inputs[1] if node.op_type == "DequantizeLinear" else None
        return scale.dtype if scale is not None and scale.dtype is not None else ir.DataType.FLOAT
    if node.op_type == "GatherBlockQuantized":
        return node.inputs[2].dtype if node.inputs[2] is not None else None
    typed = node.inputs[1 if node.op_type in SECOND_INPUT else 0] if node.inputs else None
    return None if typed is None else typed.dtype
