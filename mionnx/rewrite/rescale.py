"""Rewrite: values that a narrow dtype cannot hold are divided by a power of two, and all others stay as they are.

1. Values that must have one exponent are a class: what is added up, and what only moves from one to the other. The
   residual stream is one. A class has the exponent that is wanted of it, else what its first node gives by itself.
2. A power enters where it costs least: in a constant factor, in the weight of a norm, in front of a product on what it
   reads (so that the product cannot overflow either), else behind the node.
3. A norm takes any power away, with its epsilon times 4^e.
4. A node that has no type with what it reads gets the true value: a product in front takes the power back. Where that
   value would not fit the narrow dtype, the rescale is refused, and the node named.
5. The model's inputs and outputs keep their values.
6. `check_types` proves the result; no list of families, no tolerance.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx
from onnx import GraphProto, NodeProto, helper

from mionnx.graph.exponents import power, renamed
from mionnx.rewrite.exponent_types import ALIKE_OPERANDS, KEEPS, ExponentError, check_types, natural, set_epsilon, title
from mionnx.rewrite.float_graph import NORM_OPERATORS, FloatGraph, epsilon_of

FRONT = {"MatMul": 0, "Gemm": 0, "MatMulNBits": 0, "Conv": 0, "Einsum": 0, "Div": 0}  # the operand that is scaled


@dataclass(frozen=True)
class Rescaled:
    """A rescaled graph.

    Attributes:
        exponents: hook point -> e, of those that hold 2^e times their value.
        steps: what was done, a line each.
    """

    graph: FloatGraph
    exponents: Mapping[str, int]
    steps: list[str]


class Classes:
    """Values that must have one exponent."""

    def __init__(self, graph: FloatGraph) -> None:
        self._parents: dict[str, str] = {}
        for node in graph.flow.nodes:
            linked = [*self._linked(graph, node)]
            for other in linked[1:]:
                if (one := self.of(other)) != (first := self.of(linked[0])):
                    self._parents[one] = first

    @staticmethod
    def _linked(graph: FloatGraph, node: NodeProto) -> Iterator[str]:
        operands = node.input[ALIKE_OPERANDS[node.op_type]] if node.op_type in ALIKE_OPERANDS else node.input[:1]
        if node.op_type in ALIKE_OPERANDS or node.op_type in KEEPS:
            moving = [name for name in operands if name in graph.carrying]
            yield from moving
            yield from (name for name in node.output if name in graph.carrying and moving)

    def of(self, value: str) -> str:
        """The first member of a value's class."""
        while value in self._parents:
            value = self._parents[value]
        return value


def rescale(
    graph: FloatGraph,
    powers: Mapping[str, int],
    largest: Mapping[str, float] | None = None,
    limit: float = float("inf"),
) -> Rescaled:
    """Give the classes of some values an exponent, and prove that the numbers stay the same.

    Args:
        powers: value -> its exponent.
        largest: value -> its true magnitude, to refuse true values beyond the limit.

    Raises:
        ExponentError: what cannot have a type, with the node.
    """
    writer = _Writer(graph, largest or {}, limit)
    for value, exponent in powers.items():
        earlier = writer.of_class.setdefault(writer.classes.of(value), exponent)
        if earlier != exponent:
            raise ExponentError(
                f"{value} is to hold 2^{exponent} times its value, and is added to what holds 2^{earlier}"
            )
    proto = writer.written()
    again = FloatGraph(proto, graph.hooks)
    exponents = {name: one for name in graph.hooks if (one := writer.exponents.get(name, 0))}
    check_types(graph, again, exponents)
    return Rescaled(again, exponents, writer.steps)


@dataclass
class _Writer:
    """The nodes of the rescaled graph, one after another."""

    graph: FloatGraph
    largest: Mapping[str, float]
    limit: float
    steps: list[str] = field(default_factory=list)
    of_class: dict[str, int] = field(default_factory=dict)
    exponents: dict[str, int] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)
    behind: list[NodeProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.classes = Classes(self.graph)
        self.proto = onnx.ModelProto()
        self.proto.CopyFrom(self.graph.proto)
        self.constants = {tensor.name for tensor in self.body.initializer}
        self.moved: dict[tuple[str, int], str] = {}
        self.names: dict[str, str] = {}  # inputs of the model -> what nodes read in their place

    @property
    def body(self) -> GraphProto:
        """The graph that is written."""
        return self.proto.graph

    def written(self) -> onnx.ModelProto:
        """The whole graph."""
        for value in self.body.input:
            exponent = self.of_class.get(self.classes.of(value.name), 0)
            if value.name in self.graph.carrying and exponent:
                self.names[value.name] = self.shifted(value.name, exponent)
        outputs = {value.name for value in self.body.output}
        for origin in self.graph.flow.nodes:
            node = NodeProto.FromString(origin.SerializeToString())
            renamed(node, self.names)
            self.write(node)
            for at, name in enumerate(node.output):
                if name in outputs and self.exponents.get(name):
                    self.give_back(node, at, name)
        del self.body.node[:]
        self.body.node.extend(self.nodes)
        return self.proto

    def give_back(self, node: NodeProto, at: int, name: str) -> None:
        """Let an output of the model have its true value."""
        self.refuse_wide(node, name)
        inner = f"{name}:scaled"
        node.output[at] = self.names[name] = inner
        exponent = self.exponents[inner] = self.exponents.pop(name)
        self.add_power(inner, -exponent, name)
        self.steps.append(f"taken back for the output {name}")

    def add_power(self, value: str, exponent: int, into: str) -> None:
        """A product with a power of two."""
        factor = power(self.body, exponent, self.constants)
        self.nodes.append(helper.make_node("Mul", [value, factor], [into], f"{into}:power"))

    def shifted(self, value: str, exponent: int) -> str:
        """A value times 2^exponent, which readers share."""
        if not exponent:
            return value
        if (value, exponent) not in self.moved:
            into = self.moved[value, exponent] = f"{value}:by {exponent}"
            self.add_power(value, exponent, into)
            self.exponents[into] = self.exponents.get(value, 0) + exponent
        return self.moved[value, exponent]

    def write(self, node: NodeProto) -> None:
        """Write one node, so that its results have the exponents of their classes."""
        results = [name for name in node.output if name in self.graph.carrying]
        want = next((self.of_class[one] for name in results if (one := self.classes.of(name)) in self.of_class), None)
        if node.op_type in ALIKE_OPERANDS:
            want = self.alike(node, want)
        elif node.op_type == "Gemm" and len(node.input) > 2 and node.input[2]:
            self.bias(node, want)
        elif node.op_type in NORM_OPERATORS:
            self.norm(node, want or 0)
        exponent = natural(self.graph, node, self.operands(node))
        if exponent is None or self.inside(node):
            self.take_back(node)
            exponent = natural(self.graph, node, self.operands(node)) or 0
        if want is not None and want != exponent:
            self.enter(node, want - exponent, results)
            exponent = want
        self.nodes.append(node)
        self.nodes += self.behind
        self.behind.clear()
        for name in results:
            self.of_class.setdefault(self.classes.of(name), exponent)
        self.exponents |= {name: exponent for name in results if exponent}

    def operands(self, node: NodeProto) -> list[int]:
        """The exponents of a node's inputs."""
        return [self.exponents.get(name, 0) for name in node.input]

    def inside(self, node: NodeProto) -> bool:
        """Whether a subgraph of a node reads a scaled value."""
        at = self.graph.flow.producers.get(node.output[0], None)
        reads = () if at is None else self.graph.flow.reads[at]
        return any(self.exponents.get(name, 0) for name in reads if name not in node.input)

    def alike(self, node: NodeProto, want: int | None) -> int:
        """Give all operands one exponent."""
        places = range(len(node.input))[ALIKE_OPERANDS[node.op_type]]
        carrying = [self.exponents.get(node.input[i], 0) for i in places if node.input[i] in self.graph.carrying]
        carrying += [self.exponents.get(node.input[i], 0) for i in places if node.input[i] in self.exponents]
        exponent = next(iter(carrying), 0) if want is None else want
        for i in places:
            if (node.input[i] and self.graph.is_float(node.input[i])) or node.input[i] in self.exponents:
                node.input[i] = self.shifted(node.input[i], exponent - self.exponents.get(node.input[i], 0))
        return exponent

    def bias(self, node: NodeProto, want: int | None) -> None:
        """Scale a product's bias, and what it reads so that both fit."""
        first, second, third = self.operands(node)[:3]
        exponent = first + second if want is None else want
        node.input[0] = self.shifted(node.input[0], exponent - first - second)
        node.input[2] = self.shifted(node.input[2], exponent - third)
        if exponent != first + second:
            self.steps.append(f"in front of the product {title(node)}")

    def norm(self, node: NodeProto, want: int) -> None:
        """Take a power away in a norm, and put one into its weights."""
        exponent = self.exponents.get(node.input[0], 0)
        if exponent:
            set_epsilon(node, epsilon_of(node) * 4.0**exponent)
            self.steps.append(f"epsilon of {title(node)} times 4^{exponent}")
        if not want:
            return
        for i in range(1, len(node.input)):
            if node.input[i]:
                node.input[i] = self.shifted(node.input[i], want - self.exponents.get(node.input[i], 0))
        self.steps.append(f"weight of the norm {title(node)}")

    def take_back(self, node: NodeProto) -> None:
        """Let a node read true values."""
        reads = dict.fromkeys([*node.input, *self.graph.flow.reads[self.graph.flow.producers[node.output[0]]]])
        names = {}
        for name in reads:
            if exponent := self.exponents.get(name, 0):
                self.refuse_wide(node, name)
                names[name] = self.shifted(name, -exponent)
                self.steps.append(f"taken back in front of {title(node)}")
        renamed(node, names)

    def refuse_wide(self, node: NodeProto, name: str) -> None:
        """Refuse a true value that the narrow dtype cannot hold."""
        largest = self.largest.get(name, self.largest.get(self.graph.origin(name), 0.0))
        if largest > self.limit:
            raise ExponentError(
                f"{title(node)} has no type with {name} as 2^{self.exponents[name]} times its value, and the value "
                f"itself, {largest:,.0f}, is beyond {self.limit:,.0f}: it is not rescaled"
            )

    def enter(self, node: NodeProto, exponent: int, results: list[str]) -> None:
        """Put a power into a node's result; see rule 2."""
        fixed = [i for i, name in enumerate(node.input) if name not in self.graph.varying and self.graph.is_float(name)]
        if node.op_type == "Mul":
            at = fixed[0] if fixed else len(node.input) - 1
            self.steps.append(f"{'constant factor' if fixed else 'one factor'} of {title(node)}")
        elif node.op_type in FRONT:
            at = FRONT[node.op_type]
            self.steps.append(f"in front of the product {title(node)}")
        else:
            for name in results:
                place = [*node.output].index(name)
                node.output[place] = f"{name}:unscaled"
                factor = power(self.body, exponent, self.constants)
                self.behind.append(helper.make_node("Mul", [f"{name}:unscaled", factor], [name], f"{name}:power"))
            self.steps.append(f"behind {title(node)}")
            return
        node.input[at] = self.shifted(node.input[at], exponent)
