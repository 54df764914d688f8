"""Rewrite: a metric of the logits becomes an output, one number a row, and its gradients, whole or in part.

1. The logits that the graph computes (all positions, or those that are asked for) are read in float32.
2. Each position has a number by the metric's formula; the input of weights, [batch, n], says how much each counts.
3. Tokens, the reference of "kl" and the numbers of "cotangent" are inputs too.
4. "cotangent" of a hook point is the sum of its value times numbers, over all axes but the rows; it has no weights.
   Those of several hook points are added up.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from mionnx.graph.builder import Builder, write
from mionnx.graph.edited_graph import edit, named, to_proto
from mionnx.graph.hook_points import HookPoint
from mionnx.graph.output_head import LOGITS
from mionnx.graph.report import Report
from mionnx.rewrite.capture import part_of
from mionnx.rewrite.gradient.differentiate import differentiate
from mionnx.rewrite.gradient.rows import add_rows
from mionnx.rewrite.gradient.rules import RULES, SETS
from mionnx.rewrite.plan import (
    METRIC,
    METRIC_ANSWER,
    METRIC_REFERENCE,
    METRIC_SEED,
    METRIC_VERSUS,
    METRIC_WEIGHTS,
    GradientNode,
    Gradients,
    gradient_name,
)

HOOK_NAME = re.compile(r"([a-z0-9]+\.)*hook_[a-z_]+")  # names of hook points, and of nothing that an intervention adds


def add_gradients(proto: onnx.ModelProto, gradients: Gradients, report: Report) -> onnx.ModelProto:
    """Add the gradients of a graph that computes the metric."""
    if not gradients.by:  # the metric alone is wanted
        return proto
    if gradients.rows:
        return add_rows(proto, gradients, _varying(proto, gradients.rules), report)
    names = {name for node in proto.graph.node for name in node.output} | {one.name for one in proto.graph.input}
    # where nothing intervenes there is no `{hook}.before`: before and after are one value
    sources = {want: want.source if want.source in names else want.hook for want in gradients.by}
    before = {node.name for node in proto.graph.node}
    by, rules = [*dict.fromkeys(sources.values())], SETS[gradients.rules]
    done = differentiate(proto, METRIC, by, rules=rules, varying=_varying(proto, gradients.rules))
    for node in done.graph.node:
        if node.name not in before:
            report.add(METRIC, node.name)
    return _parts(done, sources, report)


def _varying(proto: onnx.ModelProto, rules: str) -> Sequence[str]:
    """Values that are no constants for propagation rules: what no gradient is asked for varies too."""
    if SETS[rules] is RULES:
        return ()
    names = {name for node in proto.graph.node for name in node.output} | {one.name for one in proto.graph.input}
    return [name for name in names if HOOK_NAME.fullmatch(name)]


def _parts(proto: onnx.ModelProto, sources: dict[GradientNode, str], report: Report) -> onnx.ModelProto:
    report.outputs += [want.fetched for want in sources]
    # whole gradients bear their names already
    if all(want.fetched == gradient_name(source) for want, source in sources.items()):
        return proto
    graph = edit(proto)
    tensors = named(graph)
    names = {gradient_name(source) for source in sources.values()}
    graph.outputs = [output for output in graph.outputs if output.name not in names]
    for want, source in sources.items():
        value = part_of(graph, want, tensors[gradient_name(source)], report)
        if value.name != want.fetched:
            # asked for before interventions, where there are none: one value, and an output for each of its two names
            again = gs.Variable(want.fetched, dtype=value.dtype, shape=value.shape)
            value = write(Builder(graph, want.hook, want.fetched, report).Identity(value), again)
        graph.outputs.append(value)
    return to_proto(graph, proto, {})


Formula = Callable[[Builder, gs.Tensor], gs.Variable]  # logits [batch, n, vocab] -> [batch, n]


def _of(op: Builder, values: gs.Tensor, tokens: str) -> gs.Variable:
    # not GatherElements: onnx's evaluator gathers along 64 entries of an axis at most
    index = op.Unsqueeze(op.input(tokens, np.int64, 2), [2])
    return op.GatherND(values, index, batch_dims=2)


def _kl(op: Builder, logits: gs.Tensor) -> gs.Variable:
    """KL(reference || logits), in nats; the reference is given as log-probabilities."""
    reference = op.input(METRIC_REFERENCE, np.float32, 3)
    terms = op.Mul(op.Exp(reference), op.Sub(reference, op.LogSoftmax(logits, axis=-1)))
    return op.ReduceSum(terms, [2], keepdims=0)


def _dot(op: Builder, values: gs.Tensor) -> gs.Variable:
    """The sum of the values times numbers, one a position."""
    return op.ReduceSum(op.Mul(values, op.input(METRIC_SEED, np.float32, 3)), [2], keepdims=0)


def _cosine(op: Builder, values: gs.Tensor) -> gs.Variable:
    """The cosine with numbers, which are given with length 1."""
    return op.Div(_dot(op, values), op.Sqrt(op.ReduceSum(op.Mul(values, values), [2], keepdims=0)))


FORMULAS: Mapping[str, Formula] = {
    "logit": lambda op, logits: _of(op, logits, METRIC_ANSWER),
    "logit_diff": lambda op, logits: op.Sub(_of(op, logits, METRIC_ANSWER), _of(op, logits, METRIC_VERSUS)),
    "log_probability": lambda op, logits: _of(op, op.LogSoftmax(logits, axis=-1), METRIC_ANSWER),
    "probability": lambda op, logits: _of(op, op.Softmax(logits, axis=-1), METRIC_ANSWER),
    "kl": _kl,
    "loss": lambda op, logits: op.Neg(_of(op, op.LogSoftmax(logits, axis=-1), METRIC_ANSWER)),
    "cotangent": _dot,
    "dot": _dot,
    "cosine": _cosine,
}


# inputs and output of a metric are float32 on models of any dtype
def _plain(op: Builder, value: gs.Tensor) -> gs.Tensor:
    return value if value.dtype == np.float32 else op.Cast(value, to=np.float32)


def _weighed(op: Builder, graph: gs.Graph, name: str, seed: str) -> gs.Variable:
    """The sum of a value times numbers, one a row."""
    value = _plain(op, named(graph)[name])
    rank = len(HookPoint.parse(name).axes or value.shape)
    return op.ReduceSum(op.Mul(value, op.input(seed, np.float32, rank)), [*range(1, rank)], keepdims=0)


def add_metric(graph: gs.Graph, gradients: Gradients, report: Report) -> None:
    """Add the nodes of a metric and its output, float32 [batch]."""
    if gradients.rows:  # what goes back begins at the value itself
        graph.outputs.append(named(graph)[gradients.of])
        return
    op = Builder(graph, gradients.of, METRIC, report)
    if gradients.of == LOGITS:
        value = _plain(op, named(graph)[LOGITS])
        if value.shape is not None and len(value.shape) == 2:  # one row of numbers a text, as that of one position
            value = op.Unsqueeze(value, [1])
        weighted = op.Mul(FORMULAS[gradients.metric](op, value), op.input(METRIC_WEIGHTS, np.float32, 2))
        metric = op.ReduceSum(weighted, [1], keepdims=0)
    else:
        sums = [_weighed(op, graph, name, seed) for name, seed in gradients.seeds.items()]
        metric = reduce(op.Add, sums)
    metric.name, metric.shape = METRIC, ["batch"]
    graph.outputs.append(metric)
    report.outputs.append(METRIC)
