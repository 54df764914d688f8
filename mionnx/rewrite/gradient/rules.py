"""The table of rules: operator -> the cotangents of its inputs from those of its outputs."""

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import GraphProto, NodeProto, helper

from mionnx.graph.dataflow import from_outside, subgraphs
from mionnx.rewrite.gradient.backward import Backward, Rule, SubgraphRule, Upstream
from mionnx.rewrite.gradient.elementwise import ELEMENTWISE_RULES
from mionnx.rewrite.gradient.loops import scan_rule
from mionnx.rewrite.gradient.products import PRODUCT_RULES
from mionnx.rewrite.gradient.propagation import FROZEN_NORMS, FROZEN_PATTERNS, SHARES
from mionnx.rewrite.gradient.shaping import SHAPING_RULES
from mionnx.rewrite.gradient.subgraph import activity, copy_of, declared, prune


def _axes(op: Backward, node: NodeProto) -> Any:
    """The axes of a reduction, as a name or a list; None for all of them."""
    if len(node.input) > 1 and node.input[1]:  # of newer opsets; of older ones an attribute
        return node.input[1]
    return op.attribute(node, "axes", None)


def _kept(op: Backward, node: NodeProto, value: str) -> str:
    """A reduction's result or cotangent, with the reduced axes as axes of 1."""
    axes = _axes(op, node)
    if op.attribute(node, "keepdims", 1) or _reduces_nothing(op, node):
        return value
    return str(op.Unsqueeze(value, [*range(op.rank(node.input[0]))] if axes is None else axes))


def _reduces_nothing(op: Backward, node: NodeProto) -> bool:
    return _axes(op, node) is None and bool(op.attribute(node, "noop_with_empty_axes", 0))


def _sum(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return {0: op.Expand(_kept(op, node, str(upstream[0])), op.Shape(node.input[0]))}


def _mean(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, y = node.input[0], node.output[0]
    count = op.CastLike(op.Div(op.Size(x), op.Size(y)), x)  # numbers in a mean, whose axes only the run may know
    return {0: op.Expand(op.Div(_kept(op, node, str(upstream[0])), count), op.Shape(x))}


def _sum_of_squares(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return {0: op.Mul(_kept(op, node, str(upstream[0])), op.Mul(node.input[0], 2.0))}


def _sum_of_sizes(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return {0: op.Mul(_kept(op, node, str(upstream[0])), op.Sign(node.input[0]))}


def _length(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """The root of a sum of squares: dx = dy x / y."""
    share = op.Div(_kept(op, node, str(upstream[0])), _kept(op, node, node.output[0]))
    return {0: op.Mul(node.input[0], share)}


def _extreme(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """Several numbers that are the extreme one share its cotangent, as in torch's amax."""
    if _reduces_nothing(op, node):
        return {0: str(upstream[0])}
    x, axes = node.input[0], _axes(op, node)
    hits = op.Cast(op.Equal(x, _kept(op, node, node.output[0])), to=op.facts.type(x))
    count = op.ReduceSum(hits, *([] if axes is None else [axes]), keepdims=1)
    return {0: op.Mul(hits, op.Div(_kept(op, node, str(upstream[0])), count))}


def _log_sum_exp(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    share = op.Exp(op.Sub(node.input[0], _kept(op, node, node.output[0])))  # the softmax: exp(x - log sum exp x)
    return {0: op.Mul(_kept(op, node, str(upstream[0])), share)}


def _running_sum(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    # a number enters all sums from its place on, so its cotangent is their sum: from the other end
    reverse, exclusive = op.attribute(node, "reverse", 0), op.attribute(node, "exclusive", 0)
    return {0: op.CumSum(upstream[0], node.input[1], reverse=1 - reverse, exclusive=exclusive)}


REDUCTIONS: dict[str, Rule] = {
    "CumSum": _running_sum,
    "ReduceL1": _sum_of_sizes,
    "ReduceL2": _length,
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _extreme,
    "ReduceMean": _mean,
    "ReduceMin": _extreme,
    "ReduceSum": _sum,
    "ReduceSumSquare": _sum_of_squares,
}


def if_rule(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[str, Sequence[str]]:
    """The cotangents of what the branches of an `If` take from outside."""
    taken = dict.fromkeys(name for graph in subgraphs(node) for name in from_outside(graph))
    active = [name for name in taken if op.is_active(name)]
    branches = {one.name: _backwards(op, one.g, active, upstream) for one in node.attribute}
    results = op.If(node.input[0], outputs=len(active), **branches)
    results = [results] if isinstance(results, str) else results  # one output comes as a name
    op.facts.types |= {new: op.facts.type(name) for name, new in zip(active, results, strict=True)}
    return {name: [one] for name, one in zip(active, results, strict=True)}


def _backwards(op: Backward, graph: GraphProto, sources: Sequence[str], upstream: Upstream) -> GraphProto:
    """The backward branch: cotangents of sources from those of the outputs."""
    inner = copy_of(graph, op.names, op.facts)
    ends = [inner.name(value.name) for value in graph.output]
    live = {end: one for end, one in zip(ends, upstream, strict=True) if one}
    back = op.inside(inner.facts, activity(inner.nodes, inner.facts, sources, live) | {*sources})
    gradients = back.run(inner.nodes, {end: one for end, one in live.items() if back.is_active(end)})
    outputs = []
    for name in sources:
        # an output of a branch must be made in it, and a cotangent may be one from outside
        value = back.Identity(gradients.get(name) or back.zeros(name))
        outputs.append(declared(op.facts, value, name))
    nodes = prune([*inner.nodes, *back.nodes], [value.name for value in outputs])
    return helper.make_graph(nodes, op.names.fresh("branch"), [], outputs)


RULES: Mapping[str, Rule] = {**ELEMENTWISE_RULES, **PRODUCT_RULES, **REDUCTIONS, **SHAPING_RULES}
SUBGRAPH_RULES: Mapping[str, SubgraphRule] = {"If": if_rule, "Scan": scan_rule}
# Name of a set of rules -> the rules.
SETS: Mapping[str, Mapping[str, Rule]] = {
    "gradient": RULES,
    "frozen_norm": {**RULES, **FROZEN_NORMS},
    "relp": {**RULES, **FROZEN_NORMS, **SHARES},
    "relp_frozen_pattern": {**RULES, **FROZEN_NORMS, **SHARES, **FROZEN_PATTERNS},
    "frozen_norm_pattern": {**RULES, **FROZEN_NORMS, **FROZEN_PATTERNS},
}
