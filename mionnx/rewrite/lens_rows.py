"""Rewrite: the head reads chosen rows of the residual stream, of any layer and position.

One graph so gives next tokens, a lens of all layers or of one, and never computes a row that nobody asked for.

1. The given residual streams, [batch, seq, hidden] each, stand one after the other: row `layer * seq + position`.
2. What read the last of them on the way to the logits, the final norm and the head, reads the rows in the input `ROWS`,
   int64 [n]; `logits` are those of the rows whose places in it the input `WHOLE` has, int64 [m].
   Where the head asks for the shape of the token ids, it gets that of the rows.
3. Every row gives its `K` (int64 [1]) largest log-probabilities, `TOP`, and their tokens, `TOP_IDS`, [batch, n, k]; and
   the log-probabilities of the tokens in the input `TRACKED`, int64 [t]: `TRACKED_LOG_PROBS`, [batch, n, t].
4. Maps of streams, h J^T + b, are further rows behind all of those, of the positions in the input `MAPPED`, int64 [m]:
   the n-th map's at `streams * seq + n * m`. With no positions nothing is mapped.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from mionnx.errors import ModelError
from mionnx.graph.builder import Builder
from mionnx.graph.edited_graph import named, sort_nodes
from mionnx.graph.output_head import LOGITS
from mionnx.graph.report import Report

ROWS_PREFIX, INPUT_IDS = "mionnx.rows", "input_ids"
LENS_ROWS, WHOLE, K, TRACKED = ROWS_PREFIX, f"{ROWS_PREFIX}.whole", f"{ROWS_PREFIX}.k", f"{ROWS_PREFIX}.tracked"
MAPPED = f"{ROWS_PREFIX}.mapped"
TOP, ROWS_TOP_IDS, TRACKED_LOG_PROBS = (
    f"{ROWS_PREFIX}.top",
    f"{ROWS_PREFIX}.top_ids",
    f"{ROWS_PREFIX}.tracked_log_probs",
)


class RowMap(NamedTuple):
    """A linear map of one stream, of its dtype, before the head reads it."""

    stream: str
    matrix: NDArray[Any]  # J, [hidden, hidden]
    bias: NDArray[Any] | None = None  # b, [hidden]


def lens_rows(graph: gs.Graph, streams: Sequence[str], report: Report, maps: Sequence[RowMap] = ()) -> None:
    """Let the head read chosen rows of streams, the one that it reads last; see the module's text."""
    tensors = named(graph)
    op = Builder(graph, LOGITS, ROWS_PREFIX, report)
    last = tensors[streams[-1]]
    readers = list(last.outputs)  # before the stack becomes one of them
    rows = op.input(LENS_ROWS, np.int64, 1)
    stack = op.Concat(*(tensors[name] for name in streams), *_mapped(op, tensors, maps), axis=1, name="stack")
    chosen = op.Gather(stack, rows, axis=1, name="chosen", dtype=last.dtype)
    for node in readers:
        node.inputs = [chosen if entry is last else entry for entry in node.inputs]
    logits = tensors[LOGITS]
    _Head(op, chosen, last.name).follow(logits)
    _forget_shapes(chosen)
    _largest(graph, op, logits)
    _cut(graph, op, logits)
    sort_nodes(graph)


def _mapped(op: Builder, tensors: dict[str, gs.Tensor], maps: Sequence[RowMap]) -> list[gs.Variable]:
    """The rows of streams that maps give, [batch, m, hidden] each."""
    if not maps:
        return []
    positions, rows = op.input(MAPPED, np.int64, 1), []
    for stream, matrix, bias in maps:
        chosen = op.Gather(tensors[stream], positions, axis=1)
        row = op.MatMul(chosen, np.ascontiguousarray(matrix.T), name="map")
        rows.append(row if bias is None else op.Add(row, bias))
    return rows


class _Head:
    """The nodes from the chosen rows to the logits, made to read those rows alone."""

    def __init__(self, op: Builder, chosen: gs.Variable, last: str) -> None:
        self.op, self.chosen, self.last = op, chosen, last
        self._known: dict[int, gs.Tensor] = {}  # by identity: graphsurgeon's tensors are equal where their names are
        self._tokens: gs.Variable | None = None

    def follow(self, logits: gs.Variable) -> None:
        """Follow the logits back to the rows; weights and the shape of the token ids alone may take part."""
        if not self._from_rows(logits):
            raise self._refusal()
        self._read(logits)

    def _refusal(self) -> ModelError:
        return ModelError(f"the logits are not computed from {self.last} alone: a lens of rows cannot be built")

    def _from_rows(self, value: gs.Tensor) -> bool:
        seen, waiting = {id(value)}, [value]
        while waiting:
            one = waiting.pop()
            if one is self.chosen:
                return True
            fresh = [entry for node in one.inputs for entry in node.inputs if id(entry) not in seen]
            seen |= {id(entry) for entry in fresh}
            waiting += fresh
        return False

    def _read(self, value: gs.Tensor) -> gs.Tensor:
        """The value that the head reads in the place of one: itself, or one of the rows' number."""
        if id(value) not in self._known:
            self._known[id(value)] = self._value(value)
        return self._known[id(value)]

    def _value(self, value: gs.Tensor) -> gs.Tensor:
        if value is self.chosen or isinstance(value, gs.Constant) or value.is_empty():
            return value
        if not value.inputs:  # an input of the graph: the token ids or their mask
            raise self._refusal()
        (node,) = value.inputs
        if node.op == "Shape" and node.inputs[0].name == INPUT_IDS:
            return self._copy(node, [self._row_tokens()], value)
        inputs = [self._read(entry) for entry in node.inputs]
        # reads the rows: changed in place, for nothing else reads it; the rest may serve the layers too, and is copied
        if self._from_rows(value):
            node.inputs = inputs
            return value
        same = all(one is other for one, other in zip(inputs, node.inputs, strict=True))
        return value if same else self._copy(node, inputs, value)

    def _copy(self, node: gs.Node, inputs: list[gs.Tensor], value: gs.Tensor) -> gs.Tensor:
        """A value's node once more, with other inputs."""
        place = next(i for i, output in enumerate(node.outputs) if output is value)
        dtypes = [output.dtype for output in node.outputs]
        copies = getattr(self.op, node.op)(*inputs, outputs=len(dtypes), dtype=dtypes[place], **node.attrs)
        return copies[place] if isinstance(copies, tuple) else copies

    def _row_tokens(self) -> gs.Variable:
        """Numbers of the shape that the token ids of the rows would have, [batch, n]."""
        if self._tokens is None:
            # any value of that shape: only its Shape is read
            self._tokens = self.op.ReduceSum(self.chosen, [2], keepdims=0, name="tokens")
        return self._tokens


def _forget_shapes(value: gs.Variable) -> None:
    """Forget the shapes of what is computed from a value: they were those of a whole text."""
    value.shape = None
    for node in value.outputs:
        for output in node.outputs:
            _forget_shapes(output)


def _largest(graph: gs.Graph, op: Builder, logits: gs.Tensor) -> None:
    """The largest log-probabilities of every row, and those of tracked tokens."""
    numbers = op.Cast(logits, to=np.float32)
    total = op.ReduceLogSumExp(numbers, [2], keepdims=1)
    values, ids = op.TopK(numbers, op.input(K, np.int64, 1), axis=2, outputs=2)
    tracked = op.Gather(numbers, op.input(TRACKED, np.int64, 1), axis=2)
    outputs = {
        TOP: (op.Sub(values, total), "k"),
        ROWS_TOP_IDS: (op.Cast(ids, to=np.int32), "k"),
        TRACKED_LOG_PROBS: (op.Sub(tracked, total), "t"),
    }
    for name, (value, axis) in outputs.items():
        value.name, value.shape = name, ["batch", f"{ROWS_PREFIX}.n", f"{ROWS_PREFIX}.{axis}"]
        graph.outputs.append(value)
        op.report.outputs.append(name)


def _cut(graph: gs.Graph, op: Builder, logits: gs.Tensor) -> None:
    """The logits of some rows only are an output."""
    index = next(i for i, output in enumerate(graph.outputs) if output is logits)
    part = op.Gather(logits, op.input(WHOLE, np.int64, 1), axis=1, dtype=logits.dtype)
    logits.name, logits.shape = f"{ROWS_PREFIX}.all", None  # frees the name for the part
    part.name, part.shape = LOGITS, ["batch", f"{ROWS_PREFIX}.m", "vocab"]
    graph.outputs[index] = part
