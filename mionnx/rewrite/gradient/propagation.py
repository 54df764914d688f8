"""Propagation rules in the place of derivatives, as in relevance patching (RelP) and its relatives.

A rule says what share of a value's cotangent each input has, so that input times share adds up to the output where the
derivative does not:

1. The scale that a norm divides by is a constant: norms are linear. So are written-out roots of sums of squares.
2. Activations are the value times a constant: `x f(x)` takes f for the constant, others take y / x.
3. A product of two values gives half to each: gate times up, an expert times its weight.
4. An attention pattern is a constant: it only mixes values.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import pi, sqrt

from onnx import NodeProto

from mionnx.graph.dataflow import reads
from mionnx.rewrite.gradient.backward import Backward, Rule, Upstream
from mionnx.rewrite.gradient.elementwise import ELEMENTWISE_RULES, of_one, summed
from mionnx.rewrite.gradient.products import PRODUCT_RULES, norm_rule

PASSED_ON = ("Identity", "Cast", "CastLike")
SCALING = ("Mul", "Div")  # by what is no function of the input
CURVES = ("Sigmoid", "Tanh", "Erf", "Relu", "Exp", "Softplus", "Neg", "Add", "Sub", "Pow", "Clip", "Reciprocal", "Log")
ALONE = (*PASSED_ON, *SCALING, *CURVES)  # operators that work on each number alone
MOVING = (*PASSED_ON, *SCALING, "Where", "Reshape", "Transpose", "Expand", "Squeeze", "Unsqueeze", "Slice", "Split")
ROOTS = (*PASSED_ON, *SCALING, "Sqrt", "Pow", "Reciprocal", "Add", "Max", "Clip", "Expand", "Unsqueeze", "Reshape")
AVERAGES = ("ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2")


def _steps(op: Backward, name: str, operators: tuple[str, ...]) -> Iterator[NodeProto]:
    """The node before a value, and those before it, while they are of some operators."""
    while maker := op.facts.makers.get(name):
        yield maker
        active = [one for one in reads(maker) if op.is_active(one)]
        if maker.op_type not in operators or len(active) != 1:  # a mixture of two values is no value moved
            return
        (name,) = active


def _root(op: Backward, name: str) -> str:
    """Peel constant factors off a value."""
    maker = op.facts.makers.get(name)
    if maker is None or maker.op_type not in (*PASSED_ON, *SCALING):
        return name
    active = [one for one in maker.input if op.is_active(one)]
    if len(active) != 1 or (maker.op_type == "Div" and active[0] != maker.input[0]):  # 1 / x is no multiple of x
        return name
    return _root(op, active[0])


def _is_curve(op: Backward, name: str, root: str) -> bool:
    """Whether a value is a function of each number of another, and no multiple of it."""
    ends, waiting, curved = set(), [name], False
    while waiting:
        value = waiting.pop()
        # multiples of the root end here, so `x f(a x)` counts as x times a function of x
        if _root(op, value) == root:
            ends.add(root)
            continue
        maker = op.facts.makers.get(value)
        if maker is None or maker.op_type not in ALONE:
            return False
        curved = True
        waiting += [one for one in maker.input if op.is_active(one)]
    return curved and ends == {root}  # a second root would make it a function of two values


def _is_scale(op: Backward, name: str) -> bool:
    """Whether a value is a norm's scale: a root of a sum or mean of squares, or one over it."""
    # a root alone is a curve, and a mean alone is no scale
    kinds = {node.op_type for node in _steps(op, name, ROOTS)}
    return bool(kinds & {"ReduceL2"} or (kinds & {"Sqrt", "Pow"} and kinds & {*AVERAGES}))


def _mul(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """A factor of its own function takes all, a norm's scale nothing, two values half each."""
    x, y = node.input
    dy = str(upstream[0])
    parts: dict[int, Callable[[], str]] = {0: lambda: op.Mul(dy, y), 1: lambda: op.Mul(dy, x)}
    factors = [i for i, name in enumerate((x, y)) if op.is_active(name)]
    if len(factors) == 2:  # what a factor follows from decides, not what a node is called
        factors = _sides(op, x, y)
        if len(factors) == 2:
            # half each: x * (y / 2) + y * (x / 2) = x y, where the two derivatives would add up to 2 x y
            half = op.Mul(dy, 0.5)
            parts = {0: lambda: op.Mul(half, y), 1: lambda: op.Mul(half, x)}
    return summed(op, node, {i: parts[i] for i in factors})


def _sides(op: Backward, x: str, y: str) -> list[int]:
    """Indices of the factors with a share, of two."""
    # x x, x times a norm's scale, x f(x): in all of them one factor is taken for constant
    if _root(op, x) == _root(op, y) or _is_scale(op, y) or _is_curve(op, y, _root(op, x)):
        return [0]
    if _is_scale(op, x) or _is_curve(op, x, _root(op, y)):
        return [1]
    return [0, 1]


def _root_of_squares(rule: Rule, op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return {} if _is_scale(op, node.output[0]) else rule(op, node, upstream)


def _share(op: Backward, x: str, y: str, dy: str) -> str:
    """dx = dy y / x, and dy where x is 0: of functions of slope 1 there."""
    # the inner Where keeps a division by 0 out of the branch that is not taken: 0 * inf would be nan
    zero = op.Equal(x, 0.0)
    return str(op.Where(zero, dy, op.Mul(dy, op.Div(y, op.Where(zero, 1.0, x)))))


def _gelu(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """dx = dy Phi(x), or what the approximation has in its place."""
    x = node.input[0]
    if op.attribute(node, "approximate", "none") == "none":
        inner = op.Erf(op.Mul(x, 1 / sqrt(2)))
    else:
        r = sqrt(2 / pi)
        inner = op.Tanh(op.Mul(x, op.Add(op.Mul(op.Mul(x, x), r * 0.044715), r)))
    return {0: op.Mul(upstream[0], op.Mul(op.Add(inner, 1.0), 0.5))}


def _swish(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x = node.input[0]
    return {0: op.Mul(upstream[0], op.Sigmoid(op.Mul(x, op.attribute(node, "alpha", 1.0))))}


def _square(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """x^p takes x^(p - 1) for the constant, unless it is a part of a norm's scale."""
    x, p = node.input
    exponent = op.facts.number(p)
    if exponent is None or exponent.size != 1 or float(exponent.ravel()[0]) < 1:
        return _root_of_squares(ELEMENTWISE_RULES["Pow"], op, node, upstream)
    power = op.Sub(op.CastLike(p, x), 1.0)
    return summed(op, node, {0: lambda: op.Mul(upstream[0], op.Pow(x, power))})


def _mix(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """A product of a softmax, moved and masked, goes back to the other factor alone."""
    # pattern times values: patterns are always the first factor
    if any(one.op_type == "Softmax" for one in _steps(op, node.input[0], MOVING)) and op.is_active(node.input[1]):
        return {i: one for i, one in PRODUCT_RULES["MatMul"](op, node, upstream).items() if i == 1}
    return PRODUCT_RULES["MatMul"](op, node, upstream)


FROZEN_NORMS: Mapping[str, Rule] = {
    "LayerNormalization": partial(norm_rule, frozen=True),
    "RMSNormalization": partial(norm_rule, frozen=True),
    "Sqrt": partial(_root_of_squares, ELEMENTWISE_RULES["Sqrt"]),
    "Pow": partial(_root_of_squares, ELEMENTWISE_RULES["Pow"]),
}
SHARES: Mapping[str, Rule] = {
    "Elu": of_one(_share),
    "Gelu": _gelu,
    "Mul": _mul,
    "Pow": _square,
    "Swish": _swish,
    "Tanh": of_one(_share),
}
FROZEN_PATTERNS: Mapping[str, Rule] = {"MatMul": _mix}
