"""Rules of sums, means, extremes and norms over axes, and of running sums."""

from collections.abc import Mapping
from typing import Any

from onnx import NodeProto

from mionnx.rewrite.gradient.backward import Backward, Given, Rule


def _axes(op: Backward, node: NodeProto) -> Any:
    """The axes of a reduction, as a name or a list; None for all of them."""
    if len(node.input) > 1 and node.input[1]:
        return node.input[1]
    return op.attribute(node, "axes", None)


def _kept(op: Backward, node: NodeProto, value: str) -> str:
    """A reduction's result or cotangent, with the reduced axes as axes of 1."""
    axes = _axes(op, node)
    if op.attribute(node, "keepdims", 1) or (axes is None and op.attribute(node, "noop_with_empty_axes", 0)):
        return value
    return str(op.Unsqueeze(value, [*range(op.facts.rank(node.input[0]))] if axes is None else axes))


def _sum(op: Backward, node: NodeProto, given: Given) -> Mapping[int, str]:
    return {0: op.Expand(_kept(op, node, str(given[0])), op.Shape(node.input[0]))}


def _mean(op: Backward, node: NodeProto, given: Given) -> Mapping[int, str]:
    x, y = node.input[0], node.output[0]
    count = op.CastLike(op.Div(op.Size(x), op.Size(y)), x)
    return {0: op.Expand(op.Div(_kept(op, node, str(given[0])), count), op.Shape(x))}


def _sum_of_squares(op: Backward, node: NodeProto, given: Given) -> Mapping[int, str]:
    return {0: op.Mul(_kept(op, node, str(given[0])), op.Mul(node.input[0], 2.0))}


def _length(op: Backward, node: NodeProto, given: Given) -> Mapping[int, str]:
    """The root of a sum of squares: dx = dy x / y."""
    share = op.Div(_kept(op, node, str(given[0])), _kept(op, node, node.output[0]))
    return {0: op.Mul(node.input[0], share)}


def _extreme(op: Backward, node: NodeProto, given: Given) -> Mapping[int, str]:
    """Several numbers that are the extreme one share its cotangent, as in torch's amax."""
    x, axes = node.input[0], _axes(op, node)
    hits = op.Cast(op.Equal(x, _kept(op, node, node.output[0])), to=op.facts.type(x))
    count = op.ReduceSum(hits, *([] if axes is None else [axes]), keepdims=1)
    return {0: op.Mul(hits, op.Div(_kept(op, node, str(given[0])), count))}


def _log_sum_exp(op: Backward, node: NodeProto, given: Given) -> Mapping[int, str]:
    share = op.Exp(op.Sub(node.input[0], _kept(op, node, node.output[0])))
    return {0: op.Mul(_kept(op, node, str(given[0])), share)}


def _running_sum(op: Backward, node: NodeProto, given: Given) -> Mapping[int, str]:
    reverse, exclusive = op.attribute(node, "reverse", 0), op.attribute(node, "exclusive", 0)
    return {0: op.CumSum(given[0], node.input[1], reverse=1 - reverse, exclusive=exclusive)}


REDUCTIONS: dict[str, Rule] = {
    "CumSum": _running_sum,
    "ReduceL2": _length,
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _extreme,
    "ReduceMean": _mean,
    "ReduceMin": _extreme,
    "ReduceSum": _sum,
    "ReduceSumSquare": _sum_of_squares,
}
