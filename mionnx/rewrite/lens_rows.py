"""Rewrite: the head reads chosen rows of the residual stream, of any layer and position.

One graph so gives next tokens, a lens of all layers or of one, and never computes a row that nobody asked for.

1. The given residual streams, [batch, seq, hidden] each, stand one after the other: row `layer * seq + position`.
2. What read the last of them on the way to the logits, the final norm and the head, reads the rows in the input `ROWS`,
   int64 [n]; a reshape to the shape that a value has already is removed, as it names the length of the text. `logits`
   are those of the rows whose places in `ROWS` the input `WHOLE` has, int64 [m].
3. Every row gives its `K` (int64 [1]) largest log-probabilities, `TOP`, and their tokens, `TOP_IDS`, [batch, n, k]; and
   the log-probabilities of the tokens in the input `TRACKED`, int64 [t]: `TRACKED_LOG_PROBS`, [batch, n, t].
"""

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from mionnx.errors import ModelError
from mionnx.graph.builder import Builder
from mionnx.graph.output_head import LOGITS
from mionnx.graph.report import Report

PREFIX = "mionnx.rows"
ROWS, WHOLE, K, TRACKED = PREFIX, f"{PREFIX}.whole", f"{PREFIX}.k", f"{PREFIX}.tracked"
TOP, TOP_IDS, TRACKED_LOG_PROBS = f"{PREFIX}.top", f"{PREFIX}.top_ids", f"{PREFIX}.tracked_log_probs"


def lens_rows(graph: gs.Graph, streams: Sequence[str], report: Report) -> None:
    """Let the head read chosen rows; see the module's text.

    Args:
        graph: with logits of all positions.
        streams: names of the residual streams, the one that the head reads last.

    Raises:
        ModelError: something else than the head reads the last stream, or it reads more than that.
    """
    tensors = graph.tensors()
    op = Builder(graph, LOGITS, PREFIX, report)
    last = tensors[streams[-1]]
    readers = list(last.outputs)
    rows = op.input(ROWS, np.int64, 1)
    stack = op.Concat(*(tensors[name] for name in streams), axis=1, name="stack")
    chosen = op.Gather(stack, rows, axis=1, name="chosen", dtype=last.dtype)
    _replace(last, chosen, readers)
    _bypass_reshapes(graph, chosen)
    logits = tensors[LOGITS]
    if not _reaches(logits, chosen):
        raise ModelError(f"the logits are not computed from {streams[-1]} alone: a lens of rows cannot be built")
    _forget_shapes(chosen)
    _largest(graph, op, logits)
    _cut(graph, op, logits)
    graph.toposort()


def _replace(old: gs.Tensor, new: gs.Tensor, readers: Sequence[gs.Node]) -> None:
    for node in readers:
        node.inputs = [new if entry is old else entry for entry in node.inputs]


def _bypass_reshapes(graph: gs.Graph, value: gs.Variable) -> None:
    """Remove what reshapes a text to the shape that it has: exporters write the text's length into it."""
    for node in list(value.outputs):
        for output in list(node.outputs):
            if node.op == "Reshape" and value.shape is not None and value.shape == output.shape:
                _replace(output, value, list(output.outputs))
                graph.nodes.remove(node)
                node.inputs.clear()
                node.outputs.clear()
                return _bypass_reshapes(graph, value)
            _bypass_reshapes(graph, output)
    return None


def _forget_shapes(value: gs.Variable) -> None:
    """Forget the shapes of what is computed from a value: they were those of a whole text."""
    value.shape = None
    for node in value.outputs:
        for output in node.outputs:
            _forget_shapes(output)


def _reaches(value: gs.Tensor, source: gs.Tensor) -> bool:
    """Whether a value is computed from a source alone, constants aside."""
    seen: set[int] = set()
    open_, found = [value], False
    while open_:
        one = open_.pop()
        if one is source:
            found = True
        elif id(one) not in seen and not isinstance(one, gs.Constant):
            seen.add(id(one))
            if not one.inputs:
                return False
            open_ += [entry for node in one.inputs for entry in node.inputs]
    return found


def _largest(graph: gs.Graph, op: Builder, logits: gs.Tensor) -> None:
    """The largest log-probabilities of every row, and those of tracked tokens."""
    numbers = op.Cast(logits, to=np.float32)
    total = op.ReduceLogSumExp(numbers, [2], keepdims=1)
    values, ids = op.TopK(numbers, op.input(K, np.int64, 1), axis=2, outputs=2)
    tracked = op.Gather(numbers, op.input(TRACKED, np.int64, 1), axis=2)
    found = {
        TOP: (op.Sub(values, total), "k"),
        TOP_IDS: (op.Cast(ids, to=np.int32), "k"),
        TRACKED_LOG_PROBS: (op.Sub(tracked, total), "t"),
    }
    for name, (value, axis) in found.items():
        value.name, value.shape = name, ["batch", f"{PREFIX}.n", f"{PREFIX}.{axis}"]
        graph.outputs.append(value)
        op.report.outputs.append(name)


def _cut(graph: gs.Graph, op: Builder, logits: gs.Tensor) -> None:
    """The logits of some rows only are an output."""
    index = next(i for i, output in enumerate(graph.outputs) if output is logits)
    part = op.Gather(logits, op.input(WHOLE, np.int64, 1), axis=1, dtype=logits.dtype)
    logits.name, logits.shape = f"{PREFIX}.all", None
    part.name, part.shape = LOGITS, ["batch", f"{PREFIX}.m", "vocab"]
    graph.outputs[index] = part
