"""Dtypes and shapes of the values of a graph, as far as they follow without running it."""

import onnx_ir as ir
import onnx_ir.passes.common as passes

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
    "Add Sub Mul Div Cast Identity Sigmoid Tanh Gelu FastGelu QuickGelu BiasGelu Softmax RotaryEmbedding".split()  # noqa: SIM905
)


def infer_types(model: ir.Model) -> None:
    """Write down shapes and dtypes, beyond the operators that onnx's inference knows."""
    passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    for node in model.graph:
        set_types(node)
        first = node.outputs[0]
        if first.shape is None:
            first.shape = _shape(node)
        if node.op_type in NORMS and len(node.outputs) > 3 and node.outputs[3].shape is None:
            node.outputs[3].shape = first.shape


def _shape(node: ir.Node) -> ir.Shape | None:
    """The shape of a node's first output, of the operators between an embedding and queries."""
    shapes = [None if value is None else value.shape for value in node.inputs]
    if not shapes or shapes[0] is None:
        return None
    if node.op_type in NORMS:
        return shapes[0]
    if node.op_type in ALIKE:
        known = [shape for value, shape in zip(node.inputs, shapes, strict=True) if value is not None]
        return None if None in known else max(known, key=lambda shape: shape.rank())
    if node.op_type in LOOKUPS and shapes[1] is not None:
        return ir.Shape([*shapes[1], *shapes[0][1:]])
    if node.op_type == "MatMulNBits":
        return ir.Shape([*shapes[0][:-1], node.attributes.get_int("N", 0)])
    if node.op_type in ("MatMul", "FusedMatMul") and shapes[1] is not None and shapes[1].rank() == 2:
        turned = node.attributes.get_int("transB", 0)
        return ir.Shape([*shapes[0][:-1], shapes[1][0 if turned else 1]])
    return None


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
