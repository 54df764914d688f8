"""Fused attention whose nodes read an added cache, or another mask than before."""

from dataclasses import replace

import onnx_ir as ir

from exporters.adopt.flow import CONTENT_KEEPING, climb
from exporters.adopt.operators.expand import named
from exporters.adopt.operators.fused import Fused, Read
from mionnx.graph.operator_table import expansion_of

KEYS_PLACE, VALUES, MASK_PLACE = 1, 2, 3  # places of its inputs
HEAD_OPERATORS = CONTENT_KEEPING | {"Transpose"}
REPEATED = ("Reshape", "Expand", "Unsqueeze")  # of keys and values, from below
SCORES = frozenset(("Mul", "Div", "Tanh", "Identity"))
BIAS = 5  # place of the added mask in MultiHeadAttention


def moved(fused: Fused) -> Fused:
    """An operator with the present inputs of its nodes; itself where it stands, or where its nodes are others."""
    # Its nodes mask scores by one `Where`, as those do that masks and caches are added to.
    expansion = expansion_of((fused.domain, fused.name))
    stays = fused.proto() is not None or expansion is None or expansion.moved is None
    return fused if stays else named(expansion.moved)(fused)


def with_keys_and_mask(fused: Fused) -> Fused:
    """Attention of opset 23 with the keys, values and mask of its nodes."""
    flat = any(attribute.name == "q_num_heads" for attribute in fused.attributes)
    if flat or fused.outputs[0] is None:
        return fused
    product, masked = _product_and_mask(fused.outputs[0])
    scores = None if masked is None else climb(masked.inputs[1], SCORES).producer()
    if not _is(scores, "MatMul"):
        return fused
    places = {KEYS_PLACE: _read(scores, turned=True), VALUES: _read(product, turned=False), MASK_PLACE: (masked, 0)}
    inputs, reads = [*fused.inputs, None, None, None][: MASK_PLACE + 1], [*fused.reads, (), (), ()][: MASK_PLACE + 1]
    for place, (node, at) in places.items():
        inputs[place], reads[place] = node.inputs[at], ((node, at),)
    # the mask that it reads now is causal already
    attributes = tuple(attribute for attribute in fused.attributes if attribute.name != "is_causal")
    return replace(fused, attributes=attributes, inputs=tuple(inputs), reads=tuple(reads))


def with_added_mask(fused: Fused) -> Fused:
    """MultiHeadAttention with the mask that `masking` adds for its nodes' booleans."""
    z = fused.outputs[0]
    masked = None if z is None else _product_and_mask(z)[1]
    readers = [] if masked is None else [node for node, _ in masked.inputs[0].uses() if node.op_type == "Where"]
    added = [node for node in readers if all(value.is_initializer() for value in node.inputs[1:])]
    if len(added) != 1 or len(fused.inputs) <= BIAS:
        return fused
    inputs, reads = list(fused.inputs), list(fused.reads)
    inputs[BIAS], reads[BIAS] = added[0].outputs[0], ()
    return replace(fused, inputs=tuple(inputs), reads=tuple(reads))


def _product_and_mask(z: ir.Value) -> tuple[ir.Node | None, ir.Node | None]:
    """The product of pattern and values, and the `Where` before the softmax; None for others."""
    product = climb(z, HEAD_OPERATORS).producer()
    softmax = climb(product.inputs[0]).producer() if _is(product, "MatMul") else None
    masked = softmax.inputs[0].producer() if _is(softmax, "Softmax") else None
    return product, masked if _is(masked, "Where") else None


def _is(node: ir.Node | None, operator: str) -> bool:
    return node is not None and node.op_type == operator


def _read(product: ir.Node, turned: bool) -> Read:
    """The first read of keys or values on their way to a product."""
    read = product, 1
    turn = product.inputs[1].producer()
    if turned and _is(turn, "Transpose"):
        read = turn, 0
    repeats, value = list[ir.Node](), read[0].inputs[read[1]]
    # the operator repeats keys and values for its groups itself: it reads them before that
    for operator in REPEATED:
        node = value.producer()
        if not _is(node, operator):
            return read
        repeats.append(node)
        value = node.inputs[0]
    return repeats[-1], 0
