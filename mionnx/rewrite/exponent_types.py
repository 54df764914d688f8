"""Types of a rescaled graph: a value of exponent e holds 2^e times its true value; a rule for each operator.

Rounding commutes with powers of two while nothing is subnormal or infinite, so a graph whose nodes all have a type
computes the same bits, shifted:

- Add, Sub, Sum, Concat, Where, Max, Min, Clip, ScatterND, ScatterElements: all operands alike, and so the result;
- Mul, MatMul, Gemm, Einsum: the sum; Div: the difference; Pow by a whole number n: n times; Sqrt: half of an even one;
  Reciprocal: its negative; ReduceSumSquare: twice;
- what moves numbers, turns them, sums them up or takes their sign: that of the first operand;
- norms: that of their weight, whatever comes in, if epsilon is epsilon * 4^e;
- anything else: 0 in, 0 out.
"""

from collections.abc import Callable, Mapping, Sequence

from onnx import NodeProto

from mionnx.errors import ModelError
from mionnx.graph.exponents import power_of
from mionnx.rewrite.float_graph import MOVING_OPERATORS, NORM_OPERATORS, FloatGraph, epsilon_of

ALIKE_OPERANDS: Mapping[str, slice] = {
    **dict.fromkeys(("Add", "Sub", "Sum", "Concat", "Max", "Min", "Clip"), slice(None)),
    "Where": slice(1, 3),
    **dict.fromkeys(("ScatterND", "ScatterElements"), slice(0, None, 2)),
}
KEEPS = MOVING_OPERATORS | {"RotaryEmbedding", "Neg", "Abs", "Relu", "LeakyRelu", "Cast", "CumSum", "Trilu", "ReduceL2"}
KEEPS |= {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "TopK"}
SUMS = frozenset(("Mul", "MatMul", "Einsum"))
FIRST = frozenset(("MatMulNBits", "Conv", "GroupedMatMul"))  # linear in what they read first; weights have exponent 0


class ExponentError(ModelError):
    """A node without a type: its operands have other exponents than its operator allows."""


def natural(graph: FloatGraph, node: NodeProto, exponents: Sequence[int]) -> int | None:
    """The exponent of a node's result from those of its inputs; None where they have no type together."""
    kind, first = node.op_type, exponents[0] if exponents else 0
    if kind in ALIKE_OPERANDS:
        operands = [one for name, one in zip(node.input, exponents, strict=True) if name][ALIKE_OPERANDS[kind]]
        return operands[0] if len({*operands}) == 1 else None
    if kind in KEEPS:
        return first
    if kind in SUMS:
        return sum(exponents)
    if kind in FIRST:
        return None if any(exponents[1:]) else first
    if kind in NORM_OPERATORS:
        later = [one for name, one in zip(node.input[1:], exponents[1:], strict=True) if name]
        return later[0] if later and len({*later}) == 1 else None if later else 0
    rule = _OTHERS.get(kind)
    if rule is not None:
        return rule(graph, node, exponents)
    return None if any(exponents) else 0


def _gemm(graph: FloatGraph, node: NodeProto, exponents: Sequence[int]) -> int | None:
    product = exponents[0] + exponents[1]
    biased = len(node.input) > 2 and bool(node.input[2])
    return None if biased and exponents[2] != product else product


def _power(graph: FloatGraph, node: NodeProto, exponents: Sequence[int]) -> int | None:
    number = graph.flow.facts.number(node.input[1])
    if not any(exponents):
        return 0
    integral = number is not None and number.size == 1 and float(number.ravel()[0]).is_integer()
    return exponents[0] * int(number.ravel()[0]) if integral and number is not None and not exponents[1] else None


def _root(graph: FloatGraph, node: NodeProto, exponents: Sequence[int]) -> int | None:
    return None if exponents[0] % 2 else exponents[0] // 2


_OTHERS: Mapping[str, Callable[[FloatGraph, NodeProto, Sequence[int]], int | None]] = {
    "Gemm": _gemm,
    "Pow": _power,
    "Sqrt": _root,
    "Div": lambda graph, node, exponents: exponents[0] - exponents[1],
    "Reciprocal": lambda graph, node, exponents: -exponents[0],
    "ReduceSumSquare": lambda graph, node, exponents: 2 * exponents[0],
    **dict.fromkeys(("Shape", "Size"), lambda graph, node, exponents: 0),
}


def check_types(origin: FloatGraph, rescaled: FloatGraph, exponents: Mapping[str, int]) -> dict[str, int]:
    """Prove that a rescaled graph computes the numbers of another one, shifted: every node of it has a type.

    Every node is one of the origin, with the same attributes, or a product with a constant power of two.

    Args:
        exponents: those that hook points are said to have.

    Returns:
        value -> its exponent, of all that are not 0.

    Raises:
        ExponentError: a node has no type, is none of the origin, or a hook point or output has another exponent.
    """
    own = {_key(node): node for node in origin.flow.nodes}
    types: dict[str, int] = {}
    for node, reads in zip(rescaled.flow.nodes, rescaled.flow.reads, strict=True):
        powers = [power_of(name) for name in node.input]
        operands = [types.get(name, 0) if one is None else one for name, one in zip(node.input, powers, strict=True)]
        if any(types.get(name, 0) for name in reads if name not in node.input):
            raise ExponentError(f"{title(node)} reads {describe(node, operands)} inside a subgraph")
        moved = node.op_type == "Mul" and any(one is not None for one in powers)
        if not moved:
            _check_same(own.get(_key(node)), node, operands[0] if operands else 0)
        result = natural(rescaled, node, operands)
        if result is None:
            raise ExponentError(f"{title(node)} has operands of unlike powers of two: {describe(node, operands)}")
        types |= dict.fromkeys([name for name in node.output if name and result], result)
    wrong = [name for name in rescaled.hooks if types.get(name, 0) != exponents.get(name, 0)]
    wrong += [value.name for value in rescaled.proto.graph.output if types.get(value.name)]
    if wrong:
        raise ExponentError(f"{wrong[0]} has the exponent {types.get(wrong[0], 0)}, not {exponents.get(wrong[0], 0)}")
    return types


def _key(node: NodeProto) -> str:
    """The name of a node, or of its result where it has none."""
    return node.name or node.output[0].removesuffix(":unscaled").removesuffix(":scaled")


def _check_same(own: NodeProto | None, node: NodeProto, exponent: int) -> None:
    """Compare a node with that of the origin; the epsilon of a norm is another by 4^e."""
    if own is None or own.op_type != node.op_type:
        raise ExponentError(f"{title(node)} is no node of the model that was rescaled")
    expected = NodeProto.FromString(own.SerializeToString())
    if node.op_type in NORM_OPERATORS:
        set_epsilon(expected, epsilon_of(own) * 4.0**exponent)
    if [one.SerializeToString() for one in expected.attribute] != [one.SerializeToString() for one in node.attribute]:
        raise ExponentError(f"{title(node)} has other attributes than in the model that was rescaled")


def set_epsilon(node: NodeProto, epsilon: float) -> None:
    """Set the number that a norm adds to the mean square."""
    if epsilon == epsilon_of(node):
        return
    for entry in node.attribute:
        if entry.name == "epsilon":
            entry.f = epsilon
            return
    entry = node.attribute.add(name="epsilon", f=epsilon)
    entry.type = 1  # FLOAT


def title(node: NodeProto) -> str:
    """A node for a message: its name and operator."""
    return f"{node.name or node.output[0]} ({node.op_type})"


def describe(node: NodeProto, exponents: Sequence[int]) -> str:
    """A node's operands with their exponents."""
    return ", ".join(f"{name} 2^{one}" for name, one in zip(node.input, exponents, strict=True) if name)
