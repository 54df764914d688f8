"""Rewrite: one text forwards, many rows of numbers back, and the mean of each over positions.

1. The text is computed once, as a batch of one. The cotangent of the value at a hook point is the input `METRIC_SEED`,
   [rows, seq, width]: nodes behind it compute all rows at once, those before it one.
2. Some rules differ from those of a gradient. `Reshape`, `Tile` and gathering go back to a first axis of any length,
   `RotaryEmbedding` turns rows beside heads, since its angles are those of one text, and the zeros that stand for an
   idle part of a `Split` have rows of their own.
3. What leaves the graph of a gradient [rows, seq, width] is its product with the input `METRIC_WEIGHTS`, [1, seq]:
   [rows, 1, width], `mean_name`.
"""

from collections.abc import Mapping, Sequence

import onnx
from onnx import NodeProto, helper

from mionnx.errors import GradientError
from mionnx.graph.report import Report
from mionnx.rewrite.gradient.backward import Backward, Rule, Upstream
from mionnx.rewrite.gradient.differentiate import differentiate
from mionnx.rewrite.gradient.rules import RULES, SETS
from mionnx.rewrite.gradient.shaping import added_at, scattered
from mionnx.rewrite.gradient.subgraph import prune
from mionnx.rewrite.plan import METRIC_SEED, METRIC_WEIGHTS, Gradients, gradient_name

ROWS = "mionnx_rows"  # a length of its own: ONNX Runtime shares buffers between lengths of one name


def mean_name(value: str) -> str:
    """The name of the mean over positions of a gradient."""
    return f"{gradient_name(value)}.mean"


def _reshape(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    rest = op.Slice(op.Shape(node.input[0]), [1], [op.rank(node.input[0])], [0])
    return {0: op.Reshape(upstream[0], op.Concat([-1], rest, axis=0))}


def _rotary(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    if op.rank(node.input[0]) != 4:
        raise GradientError("a rotation of heads in one axis takes no rows of its own")
    shape = op.Shape(node.input[0])
    beside = op.Reshape(upstream[0], op.Concat([1, -1], op.Slice(shape, [2], [4], [0]), axis=0))
    turned = RULES["RotaryEmbedding"](op, node, [beside])[0]
    return {0: op.Reshape(turned, op.Concat([-1], op.Slice(shape, [1], [4], [0]), axis=0))}


def _gather(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    (x, index), axis, dy = node.input, op.attribute(node, "axis", 0), str(upstream[0])
    if axis % op.rank(x) == 0:
        raise GradientError("rows are gathered from the batch")
    return {0: scattered(op, x, dy, index, axis, op.rank(index), _shape_in_rows(op, x, dy))}


def _gather_nd(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """Behind the axes that the index chooses from, the batch among them, lengths are those of the rows."""
    (x, index), dy = node.input, str(upstream[0])
    chosen = op.facts.shapes.get(index, ("?",))[-1]
    if op.attribute(node, "batch_dims", 0) or not isinstance(chosen, int):
        raise GradientError("rows are gathered from the batch")
    rest = op.Slice(op.Shape(dy), [op.rank(index) - 1], [op.rank(index) + op.rank(x)], [0])
    shape = op.Concat(op.Slice(op.Shape(x), [0], [chosen], [0]), rest, axis=0)
    return {0: added_at(op, "ScatterND", str(shape), index, dy)}


def _tile(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """As of a gradient, but the batch, which nothing repeats, has as many rows as there are."""
    x, rank = node.input[0], op.rank(node.input[0])
    pairs = op.Concat(op.Unsqueeze(node.input[1], [1]), op.Unsqueeze(op.Shape(x), [1]), axis=1)
    lengths = op.Concat([-1], op.Slice(op.Reshape(pairs, [-1]), [2], [2 * rank], [0]), axis=0)
    split = op.Reshape(upstream[0], lengths)
    return {0: op.ReduceSum(split, [*range(1, 2 * rank - 1, 2)], keepdims=0)}


def _shape_in_rows(op: Backward, x: str, dy: str) -> str:
    return str(op.Concat(op.length(dy, 0), op.Slice(op.Shape(x), [1], [op.rank(x)], [0]), axis=0))


def _split(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    parts = [one or _zeros(op, node, name, upstream) for one, name in zip(upstream, node.output, strict=True)]
    return {0: op.Concat(*parts, axis=op.attribute(node, "axis", 0))}


def _zeros(op: Backward, node: NodeProto, part: str, upstream: Upstream) -> str:
    """Zeros for a part that nothing active reads, as many rows as another part has."""
    other = next(one for one in upstream if one)
    return op.filled_to(0, _shape_in_rows(op, part, other), op.facts.type(part))


IN_ROWS: Mapping[str, Rule] = {
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Tile": _tile,
    "RotaryEmbedding": _rotary,
    "Split": _split,
}


def add_rows(proto: onnx.ModelProto, gradients: Gradients, varying: Sequence[str], report: Report) -> onnx.ModelProto:
    """Put means of gradients in the place of a graph's outputs; `varying` as for `differentiate`."""
    rules = {**SETS[gradients.rules], **IN_ROWS}
    by = [node.source for node in gradients.by]
    done = differentiate(proto, gradients.of, by, seed=METRIC_SEED, rules=rules, varying=varying)
    graph, kind = done.graph, _of_one_text(done.graph)
    graph.input.append(helper.make_tensor_value_info(METRIC_WEIGHTS, kind, [1, None]))
    del graph.value_info[:]  # their lengths are those of one batch for all values
    del graph.output[:]
    for name in by:
        mean = mean_name(name)
        node = helper.make_node("MatMul", [METRIC_WEIGHTS, gradient_name(name)], [mean], f"{mean}:MatMul")
        graph.node.append(node)
        graph.output.append(helper.make_tensor_value_info(mean, kind, None))
        report.add(name, node.name)
    live = prune([*graph.node], [output.name for output in graph.output])
    del graph.node[:]
    graph.node.extend(live)
    read = {name for node in live for name in node.input}
    for entries in (graph.input, graph.initializer):
        needed = [entry for entry in entries if entry.name in read]
        del entries[:]
        entries.extend(needed)
    report.outputs += [output.name for output in graph.output]
    return done


def _of_one_text(graph: onnx.GraphProto) -> int:
    """Declare inputs as those of a batch of one, and the cotangent with rows; its element type."""
    kind = 0
    for value in graph.input:
        tensor = value.type.tensor_type
        dims = tensor.shape.dim
        if value.name == METRIC_SEED:
            kind = tensor.elem_type
            dims[0].ClearField("dim_value")
            dims[0].dim_param = ROWS
        elif dims and (batch := dims[0].dim_param):
            for dim in dims:
                if dim.dim_param == batch:
                    dim.dim_value = 1
    return kind
