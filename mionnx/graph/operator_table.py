"""The table of fused operators and of those without a schema in onnx; one row each.

A row says how large the outputs are, of operators that onnx has no schema of (shapes follow ONNX Runtime's
documentation of its contrib operators), and what stands for a fused operator in the graph of an adopted file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

DOMAIN = "com.microsoft"  # of the operators of ONNX Runtime
Operator = tuple[str, str]  # domain, name
Dims = tuple[int | None, ...]
Shapes = Sequence[Dims | None]
Attributes = Mapping[str, Any]
Outputs = Callable[[Shapes, Attributes], tuple[Dims | None, ...]]
Typed = tuple[int, Dims | None]  # number of the ONNX dtype, shape


@dataclass(frozen=True)
class Expansion:
    """The standard operators that stand for a fused one in an adopted graph."""

    function: str  # writes them, "module.function" of `exporters/adopt/operators`
    # The operators that it writes; no others may stand between what the fused operator reads and makes.
    nodes: frozenset[str]
    inputs: int  # how many inputs it knows; a node with a later one is refused
    angles: tuple[int, ...] = ()  # places of the inputs that are positions, cosines or sines
    # Of an operator that takes lengths and positions from the call in its own way, right for texts without padding
    # only, the attributes that do not change that; None of any other.
    unpadded: frozenset[str] | None = None
    masked: bool = False  # whether it adds a mask where its nodes read the booleans of it
    # Function that gives it the inputs of its nodes once these read an added cache or another mask, as above.
    moved: str | None = None
    # False of one whose nodes pass over padding and have gates: it knows neither, and is never put back.
    put_back: bool = True


@dataclass(frozen=True)
class OperatorRow:
    """Facts about one operator."""

    # Of the outputs, from the shapes of the inputs and the attributes; None where onnx infers them.
    shapes: Outputs | None = None
    dtype_of: int = 0  # place of the input whose dtype the outputs have
    expansion: Expansion | None = None


def contrib_outputs(node: onnx.NodeProto, inputs: Sequence[Typed | None]) -> list[Typed]:
    """Dtype and shape of each output of a node of com.microsoft; LookupError where the table knows no sizes."""
    row = OPERATORS.get((DOMAIN, node.op_type))
    if row is None or row.shapes is None:
        raise LookupError(f"mionnx knows no sizes of {node.op_type} in the domain {DOMAIN!r}")
    attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
    dtypes, shapes = [one[0] if one else 0 for one in inputs], [one[1] if one else None for one in inputs]
    outputs = row.shapes(shapes, attributes)
    return [(dtypes[row.dtype_of], outputs[min(place, len(outputs) - 1)]) for place in range(len(node.output))]


def _columns(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None]:
    """A linear map to N outputs."""
    return (None if shapes[0] is None else (*shapes[0][:-1], int(attributes["N"])),)


def _product(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None]:
    """A matrix product, either factor turned."""
    left, right = shapes[0], shapes[1]
    if left is None or right is None or min(len(left), len(right)) < 2:
        return (None,)
    rows = left[-1] if attributes.get("transA", 0) else left[-2]
    columns = right[-2] if attributes.get("transB", 0) else right[-1]
    longer = left if len(left) >= len(right) else right
    return ((*longer[:-2], rows, columns),)


def _rows(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None]:
    """Rows of a quantised table: with 4 bits in bytes, a row is twice as wide as it is stored."""
    table, indices, scales = shapes[0], shapes[1], shapes[2]
    if table is None or indices is None or scales is None or int(attributes.get("gather_axis", 0)) != 0:
        return (None,)
    blocks, size = scales[-1], int(attributes.get("block_size", 128))
    width = table[-1]
    # the attributes do not say whether two numbers share an element: the number of blocks in a row of scales does
    if width is not None and blocks is not None and width < blocks * size and attributes.get("bits", 4) == 4:
        width = min(2 * width, blocks * size) if 2 * width > (blocks - 1) * size else width
    return ((*indices, *table[1:-1], width),)


def _same(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None]:
    return (shapes[0],)


def _normed(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None, ...]:
    """The norm, mean and deviation of each row, and the sum that is normed."""
    row = None if shapes[0] is None else (*shapes[0][:-1], 1)
    return shapes[0], row, row, shapes[0]


def _grouped(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None, ...]:
    """Heads together: as wide as the queries, or as their share of queries, keys and values."""
    query, past = shapes[0], shapes[3] if len(shapes) > 3 else None
    if query is None:
        return None, None
    present = None
    if past is not None and len(past) == 4 and past[2] is not None and query[1] is not None:
        present = (*past[:2], past[2] + query[1], past[3])
    if len(shapes) > 1 and shapes[1] is not None:
        return query, present
    width, heads, groups = query[-1], int(attributes["num_heads"]), int(attributes["kv_num_heads"])
    return (*query[:-1], None if width is None else width // (heads + 2 * groups) * heads), present


def _heads_together(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None, ...]:
    """As wide as the values."""
    query, value = shapes[0], shapes[2] if len(shapes) > 2 else None
    if query is None or value is None or len(query) != 3:
        return None, None
    return (*query[:-1], value[-1]), None


def _packed(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None, ...]:
    """As wide as the values, of queries, keys and values that one matrix makes."""
    x, weight, past = shapes[0], shapes[1], shapes[4] if len(shapes) > 4 else (0,) * 5
    if x is None or len(x) != 3 or weight is None or weight[-1] is None:
        return None, None
    sizes, heads = attributes.get("qkv_hidden_sizes"), int(attributes["num_heads"])
    width = int(sizes[2]) if sizes else weight[-1] // 3  # queries, keys, values: of one width unless it says others
    total = None if past is None or past[3] is None or x[1] is None else past[3] + x[1]
    return (*x[:-1], width), None if total is None else (2, x[0], heads, total, width // heads)


def _convolved(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None, ...]:
    """As many columns as it reads, and those that it carries on."""
    return shapes[0], shapes[3] if len(shapes) > 3 else None


def _recurred(shapes: Shapes, attributes: Attributes) -> tuple[Dims | None, ...]:
    """As wide as the values of all heads, and the state."""
    value, heads = shapes[2], int(attributes["kv_num_heads"])
    state = shapes[3] if len(shapes) > 3 else None
    if value is None or len(value) != 3 or value[2] is None:
        return None, state
    return (*value[:2], value[2] // heads * max(heads, int(attributes["q_num_heads"]))), state


NORM = frozenset(("Mul", "Add", "Sqrt", "Div", "ReduceMean", "LayerNormalization", "Identity"))
ROTATION = frozenset(
    ("Gather", "Unsqueeze", "Squeeze", "Split", "Mul", "Sub", "Add", "Concat", "Reshape", "Transpose", "Identity")
)
GELU = frozenset(("Mul", "Add", "Tanh", "Erf", "Sigmoid", "Identity"))
PRODUCT = frozenset(("MatMul", "Transpose", "Mul", "Identity"))
GATED_NORM = NORM | {"Reshape", "Sigmoid"}
RECURRENT_NODES = frozenset(
    ("Reshape", "Transpose", "Unsqueeze", "Expand", "Concat", "Slice", "Shape", "Neg", "Cast", "Where", "Clip", "Mul")
) | {"Recurrence"}
CONVOLVED_NODES = frozenset(
    ("Reshape", "Transpose", "Squeeze", "Concat", "Slice", "Shape", "Neg", "Split", "Gather", "Mul", "Add", "Sigmoid")
) | {"Columns"}
ATTENTION = ROTATION | {"MatMul", "Div", "Tanh", "Where", "Softmax", "Expand", "Slice", "Shape"}

OPERATORS: dict[Operator, OperatorRow] = {
    (DOMAIN, "MatMulNBits"): OperatorRow(_columns),
    (DOMAIN, "MatMulBnb4"): OperatorRow(_columns),
    (DOMAIN, "DynamicQuantizeMatMul"): OperatorRow(_product),
    (DOMAIN, "MatMulIntegerToFloat"): OperatorRow(_product, dtype_of=2),
    (DOMAIN, "GatherBlockQuantized"): OperatorRow(_rows, dtype_of=2),
    (DOMAIN, "MoE"): OperatorRow(_same),
    (DOMAIN, "QMoE"): OperatorRow(_same),
    (DOMAIN, "LayerNormalization"): OperatorRow(_normed),
    # In the standard domain, which has no such operator; its shapes are looked up in the other one.
    ("", "SimplifiedLayerNormalization"): OperatorRow(_normed, expansion=Expansion("norms.simplified_norm", NORM, 2)),
    (DOMAIN, "SimplifiedLayerNormalization"): OperatorRow(_normed),
    (DOMAIN, "SkipSimplifiedLayerNormalization"): OperatorRow(_normed, expansion=Expansion("norms.skip_norm", NORM, 4)),
    (DOMAIN, "SkipLayerNormalization"): OperatorRow(_normed, expansion=Expansion("norms.skip_norm", NORM, 5)),
    (DOMAIN, "RotaryEmbedding"): OperatorRow(
        _same, expansion=Expansion("rotary.rotary", ROTATION, 4, angles=(1, 2, 3))
    ),
    (DOMAIN, "MRotaryEmbedding"): OperatorRow(
        _same, expansion=Expansion("rotary.rotary", ROTATION, 4, angles=(1, 2, 3), put_back=False)
    ),
    ("", "RotaryEmbedding"): OperatorRow(expansion=Expansion("rotary.standard_rotary", ROTATION, 4, angles=(1, 2, 3))),
    (DOMAIN, "GroupQueryAttention"): OperatorRow(
        _grouped,
        expansion=Expansion(
            "attention.grouped_query",
            ATTENTION,
            16,
            angles=(7, 8, 9),
            unpadded=frozenset(("num_heads", "kv_num_heads", "scale", "local_window_size", "softcap"))
            | {"do_rotary", "rotary_interleaved", "smooth_softmax"},
        ),
    ),
    (DOMAIN, "MultiHeadAttention"): OperatorRow(
        _heads_together,
        expansion=Expansion("attention.multi_head", ATTENTION, 8, masked=True, moved="moved_attention.with_added_mask"),
    ),
    (DOMAIN, "Attention"): OperatorRow(
        _packed,
        expansion=Expansion(
            "attention.packed_attention",
            ATTENTION,
            6,
            unpadded=frozenset(("num_heads", "scale", "unidirectional", "mask_filter_value")),
        ),
    ),
    ("", "Attention"): OperatorRow(
        expansion=Expansion("attention.standard_attention", ATTENTION, 6, moved="moved_attention.with_keys_and_mask")
    ),
    (DOMAIN, "Gelu"): OperatorRow(_same, expansion=Expansion("elementwise.gelu", GELU, 1)),
    (DOMAIN, "BiasGelu"): OperatorRow(_same, expansion=Expansion("elementwise.gelu", GELU, 2)),
    (DOMAIN, "FastGelu"): OperatorRow(_same, expansion=Expansion("elementwise.gelu", GELU, 2)),
    (DOMAIN, "QuickGelu"): OperatorRow(_same, expansion=Expansion("elementwise.gelu", GELU, 1)),
    (DOMAIN, "GatedRMSNorm"): OperatorRow(_same, expansion=Expansion("norms.gated_norm", GATED_NORM, 3)),
    (DOMAIN, "GatedAdd"): OperatorRow(
        _same, expansion=Expansion("elementwise.gated_sum", frozenset(("Mul", "Add", "Identity")), 3)
    ),
    ("", "LpNormalization"): OperatorRow(
        expansion=Expansion("norms.unit_length", frozenset(("ReduceL2", "Clip", "Div", "Identity")), 1)
    ),
    (DOMAIN, "LinearAttentionGate"): OperatorRow(
        lambda shapes, attributes: (shapes[0], shapes[0]),
        expansion=Expansion(
            "recurrence.gates", frozenset(("Add", "Softplus", "Mul", "Sigmoid", "Cast", "Identity")), 4
        ),
    ),
    (DOMAIN, "CausalConvWithState"): OperatorRow(
        _convolved, expansion=Expansion("recurrence.convolution", CONVOLVED_NODES, 4, put_back=False)
    ),
    (DOMAIN, "LinearAttention"): OperatorRow(
        _recurred, expansion=Expansion("recurrence.linear_attention", RECURRENT_NODES, 6, put_back=False)
    ),
    (DOMAIN, "FusedMatMul"): OperatorRow(_product, expansion=Expansion("elementwise.fused_product", PRODUCT, 2)),
    # Only where it brings heads first and turns the keys in one step.
    ("", "Transpose"): OperatorRow(
        expansion=Expansion("elementwise.turned_keys", frozenset(("Transpose", "Identity")), 1)
    ),
}
# Operators that are right for texts without padding only.
UNPADDED = frozenset(
    operator for operator, row in OPERATORS.items() if row.expansion and row.expansion.unpadded is not None
)


def expansion_of(operator: Operator) -> Expansion | None:
    """The expansion of a fused operator; None of any other."""
    row = OPERATORS.get(operator)
    return None if row is None else row.expansion
