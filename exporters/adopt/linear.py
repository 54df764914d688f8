"""Linear maps of the text: products with a constant matrix, quantised or not, with what belongs to them."""

import onnx_ir as ir

from exporters.adopt.flow import SIZE_OPERATORS, Flow, Origin, rank

LINEAR_PRODUCTS = frozenset(
    "MatMul Gemm FusedMatMul MatMulNBits MatMulBnb4 MatMulInteger DynamicQuantizeMatMul MatMulIntegerToFloat "  # noqa: SIM905
    "QLinearMatMul".split()
)
SHAPE_OPERATORS = frozenset(("Reshape", "Cast", "Identity"))
ROUNDING_OPERATORS = frozenset(("DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear"))


def is_linear(flow: Flow, node: ir.Node) -> bool:
    """Whether a node multiplies the text with a constant matrix."""
    if node.op_type not in LINEAR_PRODUCTS or not flow.is_text(node.inputs[0]):
        return False
    weight = node.inputs[3] if node.op_type == "QLinearMatMul" else node.inputs[1]
    return weight is not None and flow.origin.get(weight) == Origin.CONSTANT


def linear_maps(flow: Flow, top: ir.Value, bottom: ir.Value) -> list[ir.Node]:
    """The linear maps between two values, in order."""
    return [node for node in flow.between(top, bottom) if is_linear(flow, node)]


def output_of(flow: Flow, node: ir.Node) -> ir.Value:
    """The value after a linear map: its scale of dequantisation, bias and reshaping included."""
    value = node.outputs[0]
    while True:
        users = [user for user, _ in value.uses() if user.op_type not in SIZE_OPERATORS]
        if len(users) != 1 or not _belongs(flow, node, value, users[0]):
            return value
        value = users[0].outputs[0]


def _belongs(flow: Flow, node: ir.Node, value: ir.Value, user: ir.Node) -> bool:
    """Whether the only reader of a linear map's value is part of the map."""
    if user.op_type in SHAPE_OPERATORS or user.op_type in ROUNDING_OPERATORS:
        return user.op_type != "Reshape" or rank(user.outputs[0]) in (3, None)
    others = [flow.origin.get(other) for other in user.inputs if other is not None and other is not value]
    constant = all(origin == Origin.CONSTANT for origin in others)
    if user.op_type == "Add":
        return constant
    made_by = value.producer()
    unscaled = made_by is not None and made_by.op_type in ("Cast", node.op_type)
    return node.op_type == "MatMulInteger" and user.op_type == "Mul" and (constant or unscaled)


def input_of(flow: Flow, node: ir.Node) -> ir.Value:
    """The value that a linear map reads, before it is rounded or reshaped."""
    value = node.inputs[0]
    while (above := value.producer()) is not None and above.op_type in (SHAPE_OPERATORS | ROUNDING_OPERATORS):
        if not flow.is_text(above.inputs[0]):
            break
        value = above.inputs[0]
    return value


def weight_of(node: ir.Node) -> tuple[ir.Value, bool]:
    """The stored matrix of a linear map, and whether it is stored [in, out]."""
    value = node.inputs[3] if node.op_type == "QLinearMatMul" else node.inputs[1]
    rows = node.op_type != "MatMulNBits"
    if node.op_type in ("Gemm", "FusedMatMul"):
        rows = not node.attributes.get_int("transB", 0)
    while (above := value.producer()) is not None and above.inputs and above.inputs[0] is not None:
        rows ^= above.op_type == "Transpose"
        value = above.inputs[0]
    return value, rows
