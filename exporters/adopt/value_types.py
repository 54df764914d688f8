"""Dtypes and shapes of the values of a graph, as far as they follow without running it."""

import onnx_ir as ir
import onnx_ir.passes.common as passes

BOOLEAN = frozenset(
    "Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not IsNaN IsInf".split()  # noqa: SIM905
)
INTEGER = frozenset("Shape Size NonZero ArgMax ArgMin".split())  # noqa: SIM905
FRACTIONS = frozenset("DynamicQuantizeMatMul MatMulIntegerToFloat".split())  # noqa: SIM905
SECOND_INPUT = frozenset(("Where",))


def infer_types(model: ir.Model) -> None:
    """Write down shapes by onnx's inference, and dtypes, those of other domains' operators too."""
    passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    for node in model.graph:
        set_types(node)


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
