"""Shapes of ONNX Runtime's own operators: quantised linear maps, look-ups, experts, norms, rotation, attention.

onnx has no schema of them. Shapes follow ONNX Runtime's documentation of its contrib operators.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx

DOMAIN = "com.microsoft"
Dims = tuple[int | None, ...]
Typed = tuple[int, Dims | None]  # number of the ONNX dtype, shape


def contrib_outputs(node: onnx.NodeProto, inputs: Sequence[Typed | None]) -> list[Typed]:
    """Dtype and shape of each of a node's outputs.

    Args:
        node: of the domain com.microsoft.
        inputs: dtype and shape of each; None where one is left out.

    Raises:
        LookupError: an operator that is none of those above.
    """
    if node.op_type not in SHAPES:
        raise LookupError(f"mionnx knows no sizes of {node.op_type} in the domain {DOMAIN!r}")
    attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    kinds, shapes = [one[0] if one else 0 for one in inputs], [one[1] if one else None for one in inputs]
    dtype, made = DTYPES.get(node.op_type, _first)(kinds), SHAPES[node.op_type](shapes, attributes)
    later = PRESENTS[node.op_type](shapes, attributes) if node.op_type in PRESENTS else made
    return [(dtype, made if place == 0 else later) for place in range(len(node.output))]


def _first(kinds: Sequence[int]) -> int:
    return kinds[0]


def _columns(shapes: Sequence[Dims | None], attributes: Mapping[str, Any]) -> Dims | None:
    """A linear map to N outputs."""
    return None if shapes[0] is None else (*shapes[0][:-1], int(attributes["N"]))


def _product(shapes: Sequence[Dims | None], attributes: Mapping[str, Any]) -> Dims | None:
    """A matrix product, either factor turned."""
    left, right = shapes[0], shapes[1]
    if left is None or right is None or min(len(left), len(right)) < 2:
        return None
    rows = left[-1] if attributes.get("transA", 0) else left[-2]
    columns = right[-2] if attributes.get("transB", 0) else right[-1]
    longer = left if len(left) >= len(right) else right
    return (*longer[:-2], rows, columns)


def _rows(shapes: Sequence[Dims | None], attributes: Mapping[str, Any]) -> Dims | None:
    """Rows of a quantised table: with 4 bits in bytes, a row is twice as wide as it is stored."""
    table, indices, scales = shapes[0], shapes[1], shapes[2]
    if table is None or indices is None or scales is None or int(attributes.get("gather_axis", 0)) != 0:
        return None
    blocks, size = scales[-1], int(attributes.get("block_size", 128))
    width = table[-1]
    if width is not None and blocks is not None and width < blocks * size and attributes.get("bits", 4) == 4:
        width = min(2 * width, blocks * size) if 2 * width > (blocks - 1) * size else width
    return (*indices, *table[1:-1], width)


def _same(shapes: Sequence[Dims | None], attributes: Mapping[str, Any]) -> Dims | None:
    return shapes[0]


def _grouped(shapes: Sequence[Dims | None], attributes: Mapping[str, Any]) -> Dims | None:
    """Heads together: as wide as the queries, or as their share of queries, keys and values."""
    query = shapes[0]
    if query is None or (len(shapes) > 1 and shapes[1] is not None):
        return query
    width, heads, groups = query[-1], int(attributes["num_heads"]), int(attributes["kv_num_heads"])
    return (*query[:-1], None if width is None else width // (heads + 2 * groups) * heads)


def _grouped_present(shapes: Sequence[Dims | None], attributes: Mapping[str, Any]) -> Dims | None:
    """Keys or values of the past and of this call."""
    query, past = shapes[0], shapes[3] if len(shapes) > 3 else None
    if query is None or past is None or len(past) != 4 or past[2] is None or query[1] is None:
        return None
    return (*past[:2], past[2] + query[1], past[3])


def _heads_together(shapes: Sequence[Dims | None], attributes: Mapping[str, Any]) -> Dims | None:
    """As wide as the values."""
    query, value = shapes[0], shapes[2] if len(shapes) > 2 else None
    return None if query is None or value is None or len(query) != 3 else (*query[:-1], value[-1])


def _unknown(shapes: Sequence[Dims | None], attributes: Mapping[str, Any]) -> Dims | None:
    return None


SHAPES: dict[str, Callable[[Sequence[Dims | None], Mapping[str, Any]], Dims | None]] = {
    "MatMulNBits": _columns,
    "MatMulBnb4": _columns,
    "DynamicQuantizeMatMul": _product,
    "MatMulIntegerToFloat": _product,
    "FusedMatMul": _product,
    "GatherBlockQuantized": _rows,
    "MoE": _same,
    "QMoE": _same,
    "LayerNormalization": _same,
    "SimplifiedLayerNormalization": _same,
    "SkipSimplifiedLayerNormalization": _same,
    "SkipLayerNormalization": _same,
    "RotaryEmbedding": _same,
    "Gelu": _same,
    "BiasGelu": _same,
    "FastGelu": _same,
    "QuickGelu": _same,
    "GroupQueryAttention": _grouped,
    "MultiHeadAttention": _heads_together,
}
# Of operators whose later outputs are keys and values; those of others are no larger than the first.
PRESENTS: dict[str, Callable[[Sequence[Dims | None], Mapping[str, Any]], Dims | None]] = {
    "GroupQueryAttention": _grouped_present,
    "MultiHeadAttention": _unknown,
}
# Operators whose output has not the dtype of their first input.
DTYPES: dict[str, Callable[[Sequence[int]], int]] = {
    "GatherBlockQuantized": lambda kinds: kinds[2],
    "MatMulIntegerToFloat": lambda kinds: kinds[2],
}
