"""Rewrite: logits of the last position only. What follows the final norm then runs on one token a row."""

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.hookpoint import HookPoint
from mionnx.rewrite.build import Builder
from mionnx.rewrite.plan import Report


def last_position(graph: gs.Graph, report: Report) -> None:
    """Let everything that reads `hook_final_norm` read its last position; logits become [batch, 1, vocab]."""
    value = graph.tensors()[str(HookPoint.FinalNorm)]
    build = Builder(graph, value.name, f"{value.name}.last", report)
    readers = list(value.outputs)
    end = build.ints("end", np.iinfo(np.int64).max)
    last = build.node("Slice", [value, build.ints("start", -1), end, build.ints("axis", 1)], "position")
    for node in readers:
        node.inputs = [last if entry is value else entry for entry in node.inputs]
    for output in graph.outputs:
        if output.name in ("logits", str(HookPoint.Logits)) and output.shape:
            output.shape = [output.shape[0], 1, output.shape[2]]
