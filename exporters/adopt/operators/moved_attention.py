"""Fused attention of opset 23 whose nodes read an added cache, or another mask than before."""

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir

from exporters.adopt.flow import PASSING
from exporters.adopt.operators.fused import Fused, Read

KEYS, VALUES, MASK = 1, 2, 3  # places of its inputs
HEADS = PASSING | {"Transpose"}
REPEATED = ("Reshape", "Expand", "Unsqueeze")  # of keys and values, from below
SCORES = frozenset(("Mul", "Div", "Tanh", "Identity"))


def moved(fused: Fused) -> Fused:
    """An operator with the present inputs of its nodes; itself where its nodes are others.

    Its nodes mask scores by one `Where`, as those do that masks and caches are added to.
    """
    flat = any(attribute.name == "q_num_heads" for attribute in fused.attributes)
    if (fused.domain, fused.name) != ("", "Attention") or flat or fused.outputs[0] is None:
        return fused
    product = _above(fused.outputs[0], HEADS)
    softmax = _above(product.inputs[0], PASSING) if _is(product, "MatMul") else None
    masked = softmax.inputs[0].producer() if _is(softmax, "Softmax") else None
    scores = _above(masked.inputs[1], SCORES) if _is(masked, "Where") else None
    if not _is(scores, "MatMul"):
        return fused
    found = {KEYS: _read(scores, turned=True), VALUES: _read(product, turned=False), MASK: (masked, 0)}
    inputs, reads = [*fused.inputs, None, None, None][: MASK + 1], [*fused.reads, (), (), ()][: MASK + 1]
    for place, (node, at) in found.items():
        inputs[place], reads[place] = node.inputs[at], ((node, at),)
    kept = tuple(attribute for attribute in fused.attributes if attribute.name != "is_causal")
    return replace(fused, attributes=kept, inputs=tuple(inputs), reads=tuple(reads))


def _is(node: ir.Node | None, operator: str) -> bool:
    return node is not None and node.op_type == operator


def _above(value: ir.Value, operators: Collection[str]) -> ir.Node | None:
    """The node that a chain of operators begins behind."""
    while (node := value.producer()) is not None and node.op_type in operators and node.inputs[0] is not None:
        value = node.inputs[0]
    return node


def _read(product: ir.Node, turned: bool) -> Read:
    """The first read of keys or values on their way to a product."""
    read = product, 1
    turn = product.inputs[1].producer()
    if turned and _is(turn, "Transpose"):
        read = turn, 0
    repeats, value = list[ir.Node](), read[0].inputs[read[1]]
    for operator in REPEATED:
        node = value.producer()
        if not _is(node, operator):
            return read
        repeats.append(node)
        value = node.inputs[0]
    return repeats[-1], 0
