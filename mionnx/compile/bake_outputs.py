"""Rewrite: the inputs of a metric, and of captures and gradients in part, become part of the graph.

1. Tokens, a reference and the numbers of a seed become constants, the same for every row; so do heads.
2. The position that a metric reads is worked out in the graph, in each row's own text; in a call without it the metric
   is 0.
3. Numbers at a hook point count for nothing at padding.
4. The targets of the loss are the call's own next tokens; padding, and the last token, predict nothing.
5. Positions of a capture are looked up among the tokens of a call, each in its row's own text. A call computes its own
   tokens only: at a position that stands in none of its columns the output is NaN (-1 where it holds whole numbers).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from mionnx.bind.bound_spec import BoundSpec
from mionnx.bind.plan import BoundCapture
from mionnx.bind.values import heads_of
from mionnx.compile.token_facts import TokenFacts, replace_input
from mionnx.errors import GradientError
from mionnx.graph.axes import sequence_axis
from mionnx.graph.builder import Builder, Graph, Tensor, write
from mionnx.graph.edited_graph import edit, to_proto
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.report import Report
from mionnx.machine.softmax import log_softmax
from mionnx.rewrite.plan import METRIC, METRIC_ANSWER, METRIC_REFERENCE, METRIC_SEED, METRIC_VERSUS, METRIC_WEIGHTS
from mionnx.spec.metric import READS_ALL, Answers, MetricSpec

REST = 2**62  # the end of a slice that goes to the end


def bake_metric(graph: Graph, bound: BoundSpec, calls: TokenFacts, report: Report) -> None:
    """Turn the inputs of a bound spec's metric into constants and nodes."""
    metric = bound.spec.metric
    if metric is None:
        return
    op = Builder(graph, METRIC, f"{METRIC}.baked", report)
    by: dict[str, Tensor] = {}
    if metric.of is not None:
        point = HookPoint.parse(metric.of)
        seed = op.constant(_of_value(metric, bound.hooks.dims(point)))
        texts = calls.of_texts(bound.hooks.axes(point))
        by[METRIC_SEED] = seed if texts is None else op.Mul(seed, op.Cast(texts, to=np.float32))
    elif metric.name in READS_ALL:
        if bound.plan.outputs.last:
            raise _last_alone(metric, "every position")
        if bound.model.metadata.bidirectional:
            raise GradientError(f"metric {metric} is of the masks of one call; compiled graphs serve any text")
        by[METRIC_ANSWER], by[METRIC_WEIGHTS] = _next_tokens(op, calls)
    else:
        by[METRIC_WEIGHTS] = weights = _weights(op, calls, metric, bound.plan.outputs.last)
        for name, tokens in ((METRIC_ANSWER, metric.answer), (METRIC_VERSUS, metric.versus)):
            if tokens is not None:
                by[name] = op.Expand(op.constant([[_one(name, tokens)]]), op.Shape(weights))
        for name, array in ((METRIC_REFERENCE, metric.reference), (METRIC_SEED, metric.cotangent)):
            if array is not None:
                by[name] = op.constant(_of_logits(name, array, bound.model.metadata.sizes.vocab_size))
    tensors = graph.tensors()
    for name, tensor in by.items():
        replace_input(graph, tensors[name], tensor)


def _last_alone(metric: MetricSpec, where: str) -> GradientError:
    return GradientError(f"metric {metric} reads {where}, and last_logits=True computes the last alone")


def _weights(op: Builder, calls: TokenFacts, metric: MetricSpec, last: bool) -> Tensor:
    """[batch, n]: 1 at the position that is read, 0 elsewhere."""
    position = metric.position
    if position is None:
        raise GradientError("a seed for every logit is a matter of one call; compiled graphs serve any length")
    if isinstance(position, str):
        raise GradientError(f"metric {metric} reads position {position!r}: a compiled graph takes numbers")
    if last and position != -1:
        raise _last_alone(metric, f"position {position}")
    at = op.constant([[position]]) if position >= 0 else op.Add(calls.length, [position])
    read = op.Cast(op.Equal(calls.positions, at), to=np.float32)
    # Only the last column's logits are computed: 1 if it is the one that is read.
    return op.ReduceMax(read, [1], keepdims=1) if last else read


def _next_tokens(op: Builder, calls: TokenFacts) -> tuple[Tensor, Tensor]:
    """[batch, seq] of the loss: each token's next one, and how much it counts."""
    ids, real = calls.graph.tensors()["input_ids"], op.Cast(op.GreaterOrEqual(calls.positions, 0), to=np.float32)
    counted = op.Mul(real, _following(op, real))
    # A row with nothing to predict is divided by 1 and counts 0.
    total = op.Max(op.ReduceSum(counted, [1], keepdims=1), op.constant(1.0, np.float32))
    return _following(op, ids), op.Div(counted, total)


def _following(op: Builder, value: Tensor) -> Tensor:
    """[batch, seq]: what stands one token later, and 0 at the last."""
    first = op.Slice(value, [0], [1], [1])
    # Zeros of the same dtype and number of rows.
    return op.Concat(op.Slice(value, [1], [REST], [1]), op.Sub(first, first), axis=1)


def _one(name: str, tokens: Answers) -> int:
    if not isinstance(tokens, int | np.integer):
        raise GradientError(
            f"{name.rsplit('.', 1)[1]}={tokens!r}: a token a row is a matter of one call; a compiled graph serves any "
            "batch, with one token as an id (or a text, of a model that is open)"
        )
    return int(tokens)


def _of_logits(name: str, array: NDArray[Any], vocab: int) -> NDArray[np.float32]:
    """[1, 1, vocab] of a seed, or of a reference's log-probabilities."""
    if array.shape != (vocab,):
        raise GradientError(
            f"{name.rsplit('.', 1)[1]} is {list(array.shape)}; in a compiled graph, which serves any batch, [{vocab}]"
        )
    numbers = log_softmax(array.astype(np.float64)) if name == METRIC_REFERENCE else array
    return numbers[None, None].astype(np.float32)


def _of_value(metric: MetricSpec, dims: Sequence[str | int]) -> NDArray[np.float32]:
    """The numbers of a value's seed, if they fit it in every call."""
    seed = np.asarray(metric.cotangent, np.float32)
    own = (1,) * (len(dims) - seed.ndim) + seed.shape
    if len(own) != len(dims) or any(n not in (1, dim) for n, dim in zip(own, dims, strict=True)):
        raise GradientError(
            f"cotangent is {list(seed.shape)}, and the value at {metric.of} {list(dims)}; in a compiled graph, which "
            "serves any batch and length, it has 1 along those"
        )
    return seed.reshape(own)


def bake_parts(proto: onnx.ModelProto, bound: BoundSpec, report: Report) -> onnx.ModelProto:
    """Turn the inputs of captures and gradients in part into constants and nodes."""
    parts = [one for one in (*bound.captures, *bound.gradients) if one.node.at_positions or one.node.at_heads]
    if not parts:
        return proto
    graph = edit(proto)
    calls = TokenFacts(graph, report, "mionnx.parts")
    for part in parts:
        _bake(graph, part, calls, report)
    graph.toposort()
    return to_proto(graph, proto, {})


def _bake(graph: Graph, part: BoundCapture, calls: TokenFacts, report: Report) -> None:
    node, tensors = part.node, graph.tensors()
    op = Builder(graph, node.hook, f"{node.output}.baked", report)
    if part.request.heads is not None:
        replace_input(graph, tensors[node.heads_input], op.constant(heads_of(part)))
    if part.request.positions is None:
        return
    chosen = calls.chosen(f"{node.output}.chosen", part.request.positions)
    here = op.Equal(op.Unsqueeze(calls.positions, [2]), op.Unsqueeze(chosen, [1]))  # [batch, seq, n]
    counted = op.Cast(here, to=np.int32)
    # Of integers, since ArgMax takes no bool.
    replace_input(graph, tensors[node.columns_input], op.ArgMax(counted, axis=1, keepdims=0))
    present = op.Cast(op.ReduceMax(counted, [1], keepdims=0), to=np.bool_)
    _mark_absent(graph, op, part, tensors[node.fetched], present)


def _mark_absent(graph: Graph, op: Builder, part: BoundCapture, value: Tensor, present: Tensor) -> None:
    """Write NaN, or -1, where a call has no token at a position."""
    axes, name = part.node.axes, value.name
    others = [axis for axis in range(len(axes)) if axis not in (0, sequence_axis(axes))]
    dtype = np.dtype(value.dtype)
    absent = op.constant(-1 if dtype.kind in "iu" else np.array(np.nan), dtype)
    value.name = f"{name}.found"
    marked = op.Where(op.Unsqueeze(present, others) if others else present, value, absent)
    # The output keeps the name that callers ask for.
    named = type(value)(name, dtype=value.dtype, shape=value.shape)
    graph.outputs = [write(marked, named) if output is value else output for output in graph.outputs]
