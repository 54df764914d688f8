"""Rewrite: logits of the last position only.

The head's matrix product is found by going back from the logits over what works on each number alone (a scale, a soft
cap, a cast); its input is cut down to the last position, and logits become [batch, 1, vocab]. A graph whose logits come
about in another way is left as it is: its logits are right, and only more of them.
"""

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.rewrite.build import Builder
from mionnx.rewrite.plan import Report

ELEMENTWISE = frozenset({"Identity", "Cast", "Mul", "Div", "Add", "Tanh", "CastLike"})
LOGITS = ("logits", "hook_logits")


def last_position(graph: gs.Graph, report: Report) -> None:
    """Compute the logits of the last position of each row only."""
    head = _head(graph.tensors()["logits"])
    if head is None:
        return
    value = head.inputs[0]
    build = Builder(graph, value.name, f"{value.name}.last", report)
    end = build.ints("end", np.iinfo(np.int64).max)
    last = build.node("Slice", [value, build.ints("start", -1), end, build.ints("axis", 1)], "position")
    head.inputs[0] = last
    for output in graph.outputs:
        if output.name in LOGITS and output.shape:
            output.shape = [output.shape[0], 1, output.shape[2]]


def _head(value: gs.Tensor) -> gs.Node | None:
    """The matrix product that a value comes from, number by number."""
    while value.inputs:
        node = value.inputs[0]
        if node.op in ("MatMul", "Gemm"):
            return node
        computed = [entry for entry in node.inputs if entry.inputs]
        if node.op not in ELEMENTWISE or len(computed) != 1:
            return None
        value = computed[0]
    return None
