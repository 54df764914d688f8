"""`Backward`: adds the nodes that go from the cotangents of a graph's values to those of the values before them.

1. A cotangent of a value is the derivative of the differentiated number with respect to it; it has the value's shape.
2. Nodes are gone through backwards. The rule of a node's operator makes the cotangents of its active inputs from those
   of its outputs; a value that several nodes read has the sum.
3. Where a rule's cotangent is wider than its value (a broadcast), it is summed: over the axes that the written shapes
   tell, else over those that `Shape` tells while the graph runs.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from mionnx.errors import GradientError
from mionnx.graph.builder import ONE_DTYPE
from mionnx.graph.dataflow import Axes, Facts, attributes, reads, subgraphs

INT64 = TensorProto.INT64
NARROW_FLOATS = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
Upstream = Sequence[str | None]  # the cotangents of a node's outputs; None of one that nothing active reads
Rule = Callable[["Backward", NodeProto, Upstream], Mapping[int, str]]  # index of an input -> its cotangent
SubgraphRule = Callable[["Backward", NodeProto, Upstream], Mapping[str, Sequence[str]]]  # value -> its cotangents


class FreshNames:
    """Names and constants that a graph and its subgraphs share."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.count = prefix, 0
        self.tensors: dict[tuple[Any, ...], TensorProto] = {}

    def fresh(self, what: str) -> str:
        """A name that nothing has."""
        self.count += 1
        return f"{self.prefix}.{what}_{self.count}"

    def constant(self, numbers: Any, kind: int) -> str:
        """The name of a constant of an element type; equal ones share it."""
        array = np.asarray(numbers).astype(helper.tensor_dtype_to_np_dtype(kind))
        key = (kind, array.shape, array.tobytes())
        if key not in self.tensors:
            self.tensors[key] = numpy_helper.from_array(array, f"{self.prefix}.constant_{len(self.tensors)}")
        return self.tensors[key].name


class Backward:
    """Adds nodes to a graph, `op.Mul(a, b)`, and goes back through others.

    It is called as `mionnx.graph.builder.Builder` is, with names of values for inputs. It returns the name of the
    output, or with `outputs=n` a list of them. Equal nodes are added once.
    """

    def __init__(
        self,
        names: FreshNames,
        facts: Facts,
        # Values that the differentiated number depends on, and that depend on what it is differentiated by.
        active: Collection[str],
        rules: Mapping[str, Rule],
        subgraph_rules: Mapping[str, SubgraphRule],
        opset: int,
        rows: bool = False,  # whether a cotangent has rows where its value has a batch of one
    ) -> None:
        self.names, self.facts, self.active, self.rows = names, facts, active, rows
        self.rules, self.subgraph_rules, self.opset = rules, subgraph_rules, opset
        self.nodes: list[NodeProto] = []
        self._known: dict[tuple[Any, ...], list[str]] = {}

    def inside(self, facts: Facts, active: Collection[str]) -> "Backward":
        """The same for a subgraph."""
        return Backward(self.names, facts, active, self.rules, self.subgraph_rules, self.opset, self.rows)

    # adding nodes

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if not operator[:1].isupper():
            raise AttributeError(operator)
        return partial(self._node, operator)

    def _node(self, operator: str, *inputs: Any, outputs: int = 1, **settings: Any) -> Any:
        names = self._inputs(operator, inputs)
        key = (
            # a node with a subgraph is always new: the names in its body are fresh, so it equals no other
            (operator, outputs, *names, repr(sorted(settings.items()))) if operator not in self.subgraph_rules else None
        )
        results = self._known.get(key) if key else None
        if results is None:
            results = [self.names.fresh(operator) for _ in range(outputs)]
            node = helper.make_node(operator, names, results, f"{results[0]}:{operator}", **settings)
            self.nodes.append(node)
            self.facts.follow([node])  # rules ask for the types of values that rules have added
            if key:
                self._known[key] = results
        return results if outputs > 1 else results[0]

    def _inputs(self, operator: str, inputs: Sequence[Any]) -> list[str]:
        # the condition of a Where is bool, whatever it chooses from; numbers beside no value are axes, lengths or
        # places
        peers = inputs[operator == "Where" :] if operator in ONE_DTYPE else ()
        kind = next((self.facts.type(one) for one in peers if isinstance(one, str) and one), INT64)
        return ["" if one is None else one if isinstance(one, str) else self._constant(one, kind) for one in inputs]

    def _constant(self, value: Any, kind: int) -> str:
        name = self.names.constant(value, kind)
        self.facts.types.setdefault(name, kind)
        return name

    def constant(self, value: Any, like: str) -> str:
        """A constant of the element type of a value."""
        return self._constant(value, self.facts.type(like))

    def filled(self, value: float, like: str, kind: int | None = None) -> str:
        """One number everywhere, in the shape of a value."""
        return self.filled_to(value, self.Shape(like), kind or self.facts.type(like))

    def filled_to(self, value: float, shape: str, kind: int) -> str:
        return str(self.ConstantOfShape(shape, value=helper.make_tensor("value", kind, [1], [value])))

    def zeros(self, like: str) -> str:
        """Zeros in the shape of a value."""
        return self.filled(0, like)

    def length(self, value: str, axis: int) -> str:
        """The length of a value along an axis, int64 [1]."""
        return str(self.Gather(self.Shape(value), [axis], axis=0))

    def sum(self, parts: Sequence[str]) -> str:
        """The sum of some values."""
        total = parts[0]
        for part in parts[1:]:
            total = self.Add(total, part)
        return total

    def attribute(self, node: NodeProto, name: str, default: Any) -> Any:
        return attributes(node).get(name, default)

    def is_active(self, name: str) -> bool:
        """Whether a value needs a cotangent."""
        return name in self.active

    # shapes

    def unbroadcast(self, cotangent: str, value: str, wide: Axes | None) -> str:
        """Sum a cotangent, of axes `wide` where they are known, over those along which its value was broadcast."""
        axes = _broadcast_axes(self.facts.shapes.get(value), wide)
        if axes is None:
            return self._summed_to(cotangent, value, wide)
        if not axes:
            return cotangent
        own = self.facts.shapes[value]
        ahead = len(wide or ()) - len(own)
        # only axes that the value lacks: they go in the sum itself, with no Squeeze behind it
        if len(axes) == ahead:
            return str(self.ReduceSum(cotangent, axes, keepdims=0))
        total = self.ReduceSum(cotangent, axes, keepdims=1)
        return str(self.Squeeze(total, [*range(ahead)]) if ahead else total)

    def _summed_to(self, cotangent: str, value: str, axes: Axes | None) -> str:
        """The same, over the axes that the run finds."""
        own, wide = self.Shape(value), self.Shape(cotangent)
        if self.rows:
            shape = self.facts.shapes.get(value, ())
            if axes is None or len(axes) != len(shape) or axes[0] != shape[0]:
                raise GradientError(f"rows and heads of {value} are one axis, or only the run tells its axes")
            own = self.Concat(self.length(cotangent, 0), self.Slice(own, [1], [len(shape)], [0]), axis=0)
        # axes of 1 ahead, as broadcasting aligns shapes at their ends
        ahead = self.filled_to(1, self.Sub(self.Shape(wide), self.Shape(own)), INT64)
        differ = self.Not(self.Equal(self.Concat(ahead, own, axis=0), wide))
        broadcast = self.Squeeze(self.NonZero(differ), [0])
        total = self.ReduceSum(cotangent, broadcast, keepdims=1, noop_with_empty_axes=1)
        return str(self.Reshape(total, own, allowzero=1))

    def rank(self, name: str) -> int:
        """The number of axes of a value."""
        shape = self.facts.shapes.get(name)
        if shape is None:
            raise GradientError(f"the number of axes of {name} is not written down in the graph")
        return len(shape)

    def turned(self, name: str) -> str:
        """A value with its last two axes exchanged; one that was exchanged already as it was before."""
        rank = self.rank(name)
        perm = [*range(rank - 2), rank - 1, rank - 2]
        # exchanged twice: back to the value itself, of a turned weight the one in the file, with no copy
        maker = self.facts.makers.get(name)
        if maker is not None and maker.op_type == "Transpose" and list(self.attribute(maker, "perm", [])) == perm:
            return str(maker.input[0])
        return str(self.Transpose(name, perm=perm))

    # going back

    def run(self, nodes: Sequence[NodeProto], cotangents: Mapping[str, str]) -> dict[str, str]:
        """Go back through nodes; returns the cotangents of every active value."""
        parts: dict[str, list[str]] = defaultdict(list, {name: [one] for name, one in cotangents.items()})
        gradients: dict[str, str] = {}

        # called at a value's maker: in reversed order all its readers have been seen, and its parts are complete
        def settle(name: str) -> str | None:
            if name in parts and name not in gradients:
                gradients[name] = self.sum(parts[name])
            return gradients.get(name)

        for node in reversed(nodes):
            upstream = [settle(name) if self.is_active(name) else None for name in node.output]
            if any(upstream) and any(self.is_active(name) for name in reads(node)):
                for value, one in self._back_through(node, upstream):
                    if self.is_active(value):
                        parts[value].append(one)
        return {name: total for name in list(parts) if (total := settle(name))}

    def _back_through(self, node: NodeProto, upstream: Upstream) -> Iterable[tuple[str, str]]:
        try:
            if subgraphs(node) and node.op_type in self.subgraph_rules:
                several = self.subgraph_rules[node.op_type](self, node, upstream)
                return [(value, one) for value, ones in several.items() for one in ones]
            if node.op_type in self.rules:
                return [(node.input[i], one) for i, one in self.rules[node.op_type](self, node, upstream).items()]
        except GradientError as error:
            raise GradientError(f"{error}, at {node.op_type}, which makes {node.output[0]}") from error
        raise GradientError(f"{node.op_type}, which makes {node.output[0]}, has no rule of differentiation")


def _broadcast_axes(own: Axes | None, wide: Axes | None) -> list[int] | None:
    """The axes of `wide` along which `own` was broadcast; None if the shapes do not tell."""
    if own is None or wide is None:
        return None
    ahead = len(wide) - len(own)
    axes = [*range(ahead)]
    for i, dim in enumerate(own, ahead):
        # `wide[i]` may be the name of a length that is 1 in a run: a sum over that axis then changes nothing
        if dim == 1 and wide[i] != 1:
            axes.append(i)
        # two names of lengths, which may be equal in a run or not
        elif dim != wide[i]:
            return None
    return axes


def numbers(back: Backward, name: str) -> NDArray[Any]:
    """The numbers of a constant."""
    number = back.facts.number(name)
    if number is None:
        raise GradientError(f"only the run knows {name}")
    return number
