"""A cache for a graph that has none: keys and values behind those of a past, in each attention."""

import onnx_ir as ir

from exporters.adopt.flow import CONTENT_KEEPING, Flow, perm_of, rank
from exporters.adopt.operators.decoder_writer import DecoderWriter
from exporters.adopt.rotation import TURNED
from mionnx.errors import ExportError

SCALING_OPERATORS = frozenset(("Mul", "Div"))
WIDENING = frozenset(("Expand", "Tile"))
LARGEST = 4  # axes of a product of heads


def add_past(op: DecoderWriter, layer: int, part: str, heads: ir.Value, groups: int, width: int) -> ir.Value:
    """Append keys or values to a past, a new input, and make what they come to an output.

    Args:
        part: "key" or "value".
        heads: [batch, groups, seq, width], the keys after rotation.

    Returns:
        [batch, groups, past + seq, width]
    """
    shape = ir.Shape(["batch", groups, "past", width])
    past = ir.Value(name=f"past_key_values.{layer}.{part}", type=heads.type, shape=shape)
    op.graph.inputs.append(past)
    joined = op.Concat(past, heads, axis=2)
    joined.name, present = f"adopted.{layer}.{part}", op.Identity(joined)
    present.name, present.type = f"present.{layer}.{part}", heads.type
    present.shape = ir.Shape(["batch", groups, "total", width])
    op.graph.outputs.append(present)
    return joined


def read_joined(
    op: DecoderWriter,
    flow: Flow,
    product: ir.Node,
    heads: ir.Value,
    joined: ir.Value,
    count: int,
    groups: int,
    width: int,
) -> None:
    """Let a product read heads with their past, repeated, turned and scaled as before.

    Args:
        flow: of the graph before `joined` was made.
        product: of queries and keys, or of the pattern and values; its second operand is read from `heads`.
        heads, joined: without and with a past.
        count, groups, width: heads of queries, of keys and values, and the size of one.

    Raises:
        ExportError: something else is done to the heads on the way.
    """
    replayed, turned, widened, value = list[ir.Node](), False, False, product.inputs[1]
    while value is not heads:
        node = None if value is None else value.producer()
        text = [] if node is None else flow.text(node)
        if node is None or len(text) != 1:
            raise ExportError(f"{product.op_type} {product.name!r} reads more than keys or values of its layer")
        if node.op_type in SCALING_OPERATORS or node.op_type == "Cast":
            replayed.append(_scalar(node, text[0]))
        elif node.op_type == "Transpose":
            turned ^= perm_of(node) in TURNED
        elif node.op_type in WIDENING:
            widened = True
        elif node.op_type not in CONTENT_KEEPING:
            raise ExportError(f"{node.op_type} changes keys or values on their way to {product.op_type}")
        value = text[0]
    if rank(product.inputs[0]) not in (LARGEST, None):
        raise ExportError(f"{product.op_type} {product.name!r} multiplies heads and rows of a batch as one axis")
    operand = op.repeated(joined, count // groups, count, width) if widened else joined
    operand = op.Transpose(operand, perm=[0, 1, 3, 2]) if turned else operand
    for node in reversed(replayed):
        inputs = [operand if flow.is_text(entry) else entry for entry in node.inputs]
        operand = getattr(op, node.op_type)(
            *inputs, **({"to": node.attributes.get_int("to", 1)} if node.op_type == "Cast" else {})
        )
    product.replace_input_with(1, operand)


def _scalar(node: ir.Node, text: ir.Value) -> ir.Node:
    """A node, if it treats all numbers of its input alike.

    Raises:
        ExportError: it multiplies with more than one number.
    """
    for other in node.inputs:
        if other is not None and other is not text and other.shape is not None and any(s != 1 for s in other.shape):
            raise ExportError(f"{node.op_type} {node.name!r} multiplies keys or values with {other.shape}")
    return node
