"""Arithmetic in bfloat16 inside of models of other dtypes, in a form for every runtime, and what ONNX lacks in it.

Falcon rounds its ALiBi biases so. Sums and products of two bfloat16 numbers, computed in float32 and rounded once more,
are the numbers that bfloat16 arithmetic gives (float32 has more than twice its digits), and ONNX Runtime has kernels.
Models of bfloat16 keep it, but for operators that ONNX defines for other numbers alone.
"""

from collections.abc import Container

import onnx_ir as ir

NARROW_TYPE, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
LACKING = ("TopK",)  # operators without bfloat16, in the opsets before 24


def widen(model: ir.Model, only: Container[str] | None = None) -> int:
    """Compute in float32 what is computed in bfloat16, and round, in place.

    Args:
        only: names of operators; None for all of them.

    Returns:
        how many operators there were.
    """
    nodes = [
        node
        for node in model.graph
        if node.op_type != "Cast" and (only is None or node.op_type in only) and any(map(_is_narrow, node.outputs))
    ]
    for node in nodes:
        for place, value in enumerate(node.inputs):
            if value is not None and _is_narrow(value):
                cast = _cast(value, WIDE)
                model.graph.insert_before(node, cast)
                node.replace_input_with(place, cast.outputs[0])
        for value in [value for value in node.outputs if _is_narrow(value)]:
            readers = list(value.uses())
            value.dtype = WIDE
            rounded = _cast(value, NARROW_TYPE)
            model.graph.insert_after(node, rounded)
            for reader, place in readers:
                reader.replace_input_with(place, rounded.outputs[0])
    return len(nodes)


def _is_narrow(value: ir.Value) -> bool:
    return value.dtype == NARROW_TYPE


def _cast(value: ir.Value, kind: ir.DataType) -> ir.Node:
    node = ir.node("Cast", [value], {"to": kind})
    node.outputs[0].dtype, node.outputs[0].shape = kind, value.shape
    return node
