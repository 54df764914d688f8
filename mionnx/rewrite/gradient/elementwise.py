"""Rules of operators that work on each number alone, and of broadcasting arithmetic.

With y = f(x) and its cotangent dy, `dx = dy * f'(x)`; where it is cheaper, f' is written in y.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import pi, sqrt

from onnx import NodeProto

from mionnx.errors import GradientError
from mionnx.rewrite.gradient.backward import Backward, Rule, Upstream

OfOne = Callable[[Backward, str, str, str], str]  # (op, x, y, dy) -> dx


def of_one(function: OfOne) -> Rule:
    """The rule of an operator of one input."""

    def rule(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
        return {0: function(op, node.input[0], node.output[0], str(upstream[0]))}

    return rule


def summed(op: Backward, node: NodeProto, parts: Mapping[int, Callable[[], str]]) -> Mapping[int, str]:
    """The cotangents of a broadcasting operator's active inputs, each summed to its shape."""
    wide = op.facts.shapes.get(node.output[0])
    return {i: op.unbroadcast(make(), node.input[i], wide) for i, make in parts.items() if op.is_active(node.input[i])}


def _add(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return summed(op, node, dict.fromkeys(range(len(node.input)), lambda: str(upstream[0])))


def _sub(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    return summed(op, node, {0: lambda: str(upstream[0]), 1: lambda: op.Neg(upstream[0])})


def _mul(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, y = node.input
    return summed(op, node, {0: lambda: op.Mul(upstream[0], y), 1: lambda: op.Mul(upstream[0], x)})


def _div(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    y, dy = node.input[1], upstream[0]
    # d(x / y)/dy = -x / y^2, which is the negative output over y
    parts = {0: lambda: op.Div(dy, y), 1: lambda: op.Neg(op.Div(op.Mul(dy, node.output[0]), y))}
    return summed(op, node, parts)


def _extreme(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """Max, Min: where several inputs are the extreme one, each has its share, as in torch."""
    y = node.output[0]
    hits = [op.Cast(op.Equal(x, y), to=op.facts.type(y)) for x in node.input]
    share = op.Div(upstream[0], op.sum(hits))
    return summed(op, node, {i: partial(op.Mul, share, hit) for i, hit in enumerate(hits)})


def _where(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    test, dy = node.input[0], upstream[0]
    # the other side's entries get 0
    return summed(op, node, {1: lambda: op.Where(test, dy, 0.0), 2: lambda: op.Where(test, 0.0, dy)})


def _pow(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, p = node.input
    if op.is_active(p):
        raise GradientError("there is no gradient by an exponent")
    exponent = op.facts.number(p)
    # squares, as in every written-out norm, need no second power
    if exponent is not None and exponent.size == 1 and float(exponent.ravel()[0]) == 2:
        return {0: op.Mul(upstream[0], op.Mul(x, 2.0))}
    power = op.CastLike(p, x)  # an exponent may have another dtype than its base
    return summed(op, node, {0: lambda: op.Mul(upstream[0], op.Mul(op.Pow(x, op.Sub(power, 1.0)), power))})


def _gelu(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    exact = op.attribute(node, "approximate", "none") == "none"
    return {0: op.Mul(upstream[0], (_gelu_slope if exact else _gelu_tanh_slope)(op, node.input[0]))}


def _gelu_slope(op: Backward, x: str) -> str:
    """Phi(x) + x phi(x), with the normal distribution and its density."""
    cumulative = op.Mul(op.Add(op.Erf(op.Mul(x, 1 / sqrt(2))), 1.0), 0.5)
    density = op.Mul(op.Exp(op.Mul(op.Mul(x, x), -0.5)), 1 / sqrt(2 * pi))
    return str(op.Add(cumulative, op.Mul(x, density)))


def _gelu_tanh_slope(op: Backward, x: str) -> str:
    """The slope of 0.5 x (1 + tanh(r (x + 0.044715 x^3))), r = sqrt(2 / pi)."""
    r = sqrt(2 / pi)
    square = op.Mul(x, x)
    t = op.Tanh(op.Mul(x, op.Add(op.Mul(square, r * 0.044715), r)))
    steep = op.Add(op.Mul(square, 3 * r * 0.044715), r)  # the slope of the argument: r (1 + 3 * 0.044715 x^2)
    rest = op.Sub(1.0, op.Mul(t, t))  # tanh' = 1 - tanh^2
    return str(op.Add(op.Mul(op.Add(t, 1.0), 0.5), op.Mul(op.Mul(op.Mul(x, 0.5), rest), steep)))


def _swish(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    """The slope of x s(a x) is s + a x s (1 - s), with the sigmoid s."""
    x, alpha = node.input[0], op.attribute(node, "alpha", 1.0)
    s = op.Sigmoid(op.Mul(x, alpha))
    inner = op.Mul(op.Mul(x, alpha), op.Sub(1.0, s))
    return {0: op.Mul(upstream[0], op.Mul(s, op.Add(inner, 1.0)))}


def _leaky(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, alpha = node.input[0], op.attribute(node, "alpha", 0.01)
    return {0: op.Where(op.Greater(x, 0.0), upstream[0], op.Mul(upstream[0], alpha))}  # alpha at 0, as in torch


def _elu(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[int, str]:
    x, alpha = node.input[0], op.attribute(node, "alpha", 1.0)
    below = op.Mul(upstream[0], op.Add(node.output[0], alpha))  # below 0 y = alpha (e^x - 1), so y' = y + alpha
    return {0: op.Where(op.Greater(x, 0.0), upstream[0], below)}


OF_ONE: dict[str, OfOne] = {
    "Abs": lambda op, x, y, dy: op.Mul(dy, op.Sign(x)),  # 0 at 0, as in torch
    "Cast": lambda op, x, y, dy: op.Cast(dy, to=op.facts.type(x)),
    "CastLike": lambda op, x, y, dy: op.Cast(dy, to=op.facts.type(x)),
    "Clip": lambda op, x, y, dy: op.Where(op.Equal(x, y), dy, 0.0),  # the bounds themselves pass, as in torch
    "Cos": lambda op, x, y, dy: op.Neg(op.Mul(dy, op.Sin(x))),
    # erf' = 2 / sqrt(pi) exp(-x^2)
    "Erf": lambda op, x, y, dy: op.Mul(dy, op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2 / sqrt(pi))),
    "Exp": lambda op, x, y, dy: op.Mul(dy, y),
    "Identity": lambda op, x, y, dy: dy,
    "Log": lambda op, x, y, dy: op.Div(dy, x),
    "Neg": lambda op, x, y, dy: op.Neg(dy),
    "Reciprocal": lambda op, x, y, dy: op.Neg(op.Mul(dy, op.Mul(y, y))),
    "Relu": lambda op, x, y, dy: op.Where(op.Greater(x, 0.0), dy, 0.0),  # 0 at 0, as in torch
    "Sigmoid": lambda op, x, y, dy: op.Mul(dy, op.Mul(y, op.Sub(1.0, y))),
    "Sin": lambda op, x, y, dy: op.Mul(dy, op.Cos(x)),
    "Softplus": lambda op, x, y, dy: op.Mul(dy, op.Sigmoid(x)),
    "Sqrt": lambda op, x, y, dy: op.Div(op.Mul(dy, 0.5), y),
    "Tanh": lambda op, x, y, dy: op.Sub(dy, op.Mul(dy, op.Mul(y, y))),
}
ELEMENTWISE_RULES: dict[str, Rule] = {
    **{name: of_one(function) for name, function in OF_ONE.items()},
    "Add": _add,
    "Div": _div,
    "Elu": _elu,
    "Gelu": _gelu,
    "LeakyRelu": _leaky,
    "Max": _extreme,
    "Min": _extreme,
    "Mul": _mul,
    "Pow": _pow,
    "Sub": _sub,
    "Sum": _add,
    "Swish": _swish,
    "Where": _where,
}
