"""Inputs and outputs of an adopted graph, by the names, shapes and dtypes of a hooked model."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from exporters.adopt.flow import (
    FEW_ROWS,
    INDEX_TYPES,
    ROW_LOOKUPS,
    SIZE_OPERATORS,
    climb,
    find_embedding,
    present,
    rank,
    static,
    table_of,
    walk,
)
from exporters.adopt.operators.decoder_writer import MASK_INPUT, POSITIONS, TOKEN_INPUT
from exporters.op_writer import move, node_like
from mionnx.errors import ExportError
from mionnx.graph.operator_table import expansion_of

INT64_TYPE = ir.TensorType(ir.DataType.INT64)
TYPE_INPUT = "token_type_ids"
INPUT_AXES = {TOKEN_INPUT: ("batch", "seq"), MASK_INPUT: ("batch", "total"), POSITIONS: ("batch", "seq")}
TYPE_AXES = {TYPE_INPUT: ("batch", "seq")}
UNKNOWN = -1  # no axis
PLANES = ("planes", "batch", "seq")
NEAR_ANGLES = 40  # nodes from positions to a cosine


def name_inputs(model: ir.Model) -> ir.Value:
    """Name the inputs of tokens, mask, positions, types by their readers; all become int64. Returns that of tokens."""
    graph = model.graph
    tokens = climb(find_embedding(graph).inputs[1])
    _take(graph, tokens, TOKEN_INPUT)
    for value in [value for value in graph.inputs if value.name != TOKEN_INPUT and value.uses()]:
        if value.dtype is None or not value.dtype.is_floating_point():  # those of fractions are pasts
            picks_types = any(place == 1 and _has_few_rows(node) for node, place in value.uses())
            _take(graph, value, TYPE_INPUT if picks_types else POSITIONS if _feeds_angles(value) else MASK_INPUT)
    return tokens


def _take(graph: ir.Graph, value: ir.Value, name: str) -> None:
    """Give an input a name; a cast stands behind one of another dtype."""
    other = next((one for one in graph.inputs if one.name == name and one is not value), None)
    if other is not None and (rank(other) == rank(value) or name != MASK_INPUT):
        raise ExportError(
            f"the inputs {other.name} and {value.name} both look like {name}: which is which is not known"
        )
    planes = static(value, 0) if name == POSITIONS and rank(value) == len(PLANES) else None
    if planes is None and rank(value) not in (2, None):
        raise ExportError(
            f"the input {value.name} has the shape {value.shape}: a mask of another form than [batch, total]"
        )
    kind = value.dtype
    # a value inside may have the name already, and names are unique in a graph
    for inner in [inner for node in graph for inner in node.outputs if inner.name == name]:
        inner.name = f"stock.{name}"
    value.name, value.shape = name, ir.Shape((INPUT_AXES | TYPE_AXES)[name])
    if kind not in (ir.DataType.INT64, None):
        reads = list(value.uses())
        # readers keep the file's own dtype, int32 for one, as their operators may ask for it
        cast = ir.node("Cast", [value], attributes={"to": int(kind)})
        cast.outputs[0].type = ir.TensorType(kind)
        move(reads, cast.outputs[0])
        graph.insert_before(graph[0], cast)
    value.type = INT64_TYPE
    if planes is not None:  # a token's places in time, height and width (Qwen's M-RoPE): in a text they are one
        reads = list(value.uses())
        sizes = _constant(graph, f"{name}.planes", [planes, 1, 1])
        wide = node_like("Expand", [value, sizes], value)
        wide.outputs[0].shape = ir.Shape([planes, *INPUT_AXES[name]])
        move(reads, wide.outputs[0])
        graph.insert_before(graph[0], wide)


def _feeds_angles(value: ir.Value) -> bool:
    """Whether cosines, or rows of a table of fractions, follow from an input in few steps."""
    seen: set[ir.Node] = set()
    waiting = [value]
    while waiting and len(seen) < NEAR_ANGLES:
        for node, place in waiting.pop(0).uses():
            if node in seen or node.op_type in SIZE_OPERATORS:
                continue
            seen.add(node)
            expansion = expansion_of((node.domain, node.op_type))
            rotates = expansion is not None and place in expansion.angles
            if node.op_type in ("Cos", "Sin") or rotates or (place == 1 and _is_table_look_up(node)):
                return True
            # beyond a softmax nearly everything follows from any input
            if "Softmax" not in (expansion.nodes if expansion is not None else (node.op_type,)):
                waiting += node.outputs
    return False


def _is_table_look_up(node: ir.Node) -> bool:
    """Whether a node picks rows of a constant matrix: of learned positions, or of angles."""
    if node.op_type not in ROW_LOOKUPS or node.inputs[0] is None:
        return False
    table, _ = table_of(node.inputs[0])
    return table.is_initializer() and rank(table) in (2, 3)


def _has_few_rows(node: ir.Node) -> bool:
    """Whether a node picks rows of a table as small as that of token types."""
    return _is_table_look_up(node) and (static(*table_of(node.inputs[0])) or FEW_ROWS + 1) <= FEW_ROWS


def supply_positions(model: ir.Model) -> str | None:
    """Make positions an input where the graph counts them itself; returns a note on positions that it does not take."""
    graph = model.graph
    if any(value.name == POSITIONS for value in graph.inputs):
        return None
    positions = ir.Value(name=POSITIONS, type=INT64_TYPE, shape=ir.Shape(INPUT_AXES[POSITIONS]))
    graph.inputs.append(positions)
    counted = _counted(graph)  # positions that follow from the attention mask are left: they heed padding already
    for node, place, axis in counted:
        node.replace_input_with(place, positions if axis is None else _unsqueezed(graph, positions, axis))
    if counted:
        return None
    keep = node_like("Identity", [positions], positions)  # the rewriter looks for the input: an unread one would go
    keep.outputs[0].name = "adopted.positions"
    graph.insert_before(graph[0], keep)
    return "position_ids: the graph makes its positions itself; those that are given are not read"


def _unsqueezed(graph: ir.Graph, value: ir.Value, axis: int) -> ir.Value:
    node = ir.node("Unsqueeze", [value, _constant(graph, f"positions.axis{axis}", [axis])])
    node.outputs[0].type = INT64_TYPE
    graph.insert_before(graph[0], node)
    return node.outputs[0]


def _constant(graph: ir.Graph, name: str, numbers: Sequence[int]) -> ir.Value:
    name = f"adopted.{name}"
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(numbers, np.int64), name=name)
        shape = ir.Shape([len(numbers)])
        graph.register_initializer(ir.Value(name=name, type=INT64_TYPE, shape=shape, const_value=tensor))
    return graph.initializers[name]


def _counted(graph: ir.Graph) -> list[tuple[ir.Node, int, int | None]]:
    """Reads of counted positions on the way to angles: node, place, axis to add to [batch, seq]."""
    reads: dict[tuple[ir.Node, int], int | None] = {}
    for node in graph:
        if node.op_type in ("Cos", "Sin"):
            read = _counted_read(node)
        elif _is_table_look_up(node):
            entry = node.inputs[1]
            counts = entry is not None and (_is_counted(entry) or _is_cut(entry, static(*table_of(node.inputs[0]))))
            read = (node, 1) if counts else None
        else:
            continue
        if read is not None:
            reads[read] = _added_axis(read[0].inputs[read[1]])
    return [(node, place, axis) for (node, place), axis in reads.items() if axis != UNKNOWN]


def _counted_read(angle: ir.Node) -> tuple[ir.Node, int] | None:
    """The first read above a cosine of integers that a `Range` counts."""

    def makers_of_fractions(node: ir.Node) -> list[ir.Node | None]:
        sized = node.op_type in SIZE_OPERATORS
        return [] if sized else [one.producer() for one in present(node.inputs) if one.dtype not in INDEX_TYPES]

    for node in walk([angle], makers_of_fractions):
        for place, entry in enumerate(node.inputs) if node.op_type not in SIZE_OPERATORS else ():
            if entry is not None and entry.dtype in INDEX_TYPES and _is_counted(entry):
                return node, place
    return None


def _is_counted(value: ir.Value) -> bool:
    node = climb(value).producer()
    return node is not None and node.op_type == "Range"


def _is_cut(value: ir.Value, rows: int | None) -> bool:
    """Whether a value is cut from a constant of integers, one for each row of a table but a few: of all positions."""
    node = climb(value).producer()
    if node is None or node.op_type != "Slice":
        return False
    while node is not None and node.op_type == "Slice":
        value = climb(node.inputs[0])
        node = value.producer()
    count, stored = static(value, -1), value.is_initializer() or (node is not None and node.op_type == "Constant")
    return stored and value.dtype in INDEX_TYPES and FEW_ROWS < (count or 0) <= (rows or 0)


def _added_axis(value: ir.Value | None) -> int | None:
    """The axis to add to [batch, seq] for counted positions; None if none, or `UNKNOWN`."""
    if value is None or rank(value) not in (2, 3):
        return UNKNOWN
    if rank(value) == 2:
        return None
    return next((axis for axis in (2, 1) if static(value, axis) == 1 and static(value, 3 - axis) != 1), UNKNOWN)


def heeds_mask(model: ir.Model, scores: ir.Value) -> bool:
    """Whether attention scores follow from the content of the attention mask."""

    def readers(values: Sequence[ir.Value]) -> list[ir.Node]:
        return [node for value in values for node, _ in value.uses() if node.op_type not in SIZE_OPERATORS]

    masks = [value for value in model.graph.inputs if value.name == MASK_INPUT]
    return any(scores in node.outputs for node in walk(readers(masks), lambda node: readers(node.outputs)))
