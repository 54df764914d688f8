"""`ValuePaths`: the way from one value to another through a graph, and what it does with each number of the first.

A path is the chain of nodes that passes a value on. Where a node reads several values of a text, it goes along the one
that is passed on most directly: of x * rsqrt(mean(x^2)) along x. What a chain does with single numbers is found from
one token: where each goes (`Reshape`, `Transpose`, `Split`, ...), what it is multiplied with, and what is added to it.
Behind a norm, a clip or another curve numbers are only followed.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from mionnx.errors import ModelError
from mionnx.graph import onnx_file, validate
from mionnx.graph.dataflow import Dataflow, attributes
from mionnx.graph.hooked_model import HookedModel
from mionnx.graph.value_sizes import Scope, check_sizes
from mionnx.graph.weight_value import weight_value

ONE_TOKEN = (1, 1, 0)  # batch, seq, past
SHAPED = frozenset("Cast CastLike DequantizeLinear Flatten Identity QuantizeLinear Reshape Squeeze Unsqueeze".split())  # noqa: SIM905
MOVING = SHAPED | frozenset(("Concat", "Expand", "Gather", "GatherND", "Slice", "Split", "Transpose"))
PICKING = frozenset(("Gather", "GatherND"))
AFFINE = frozenset(("Add", "Sub", "Mul", "Div"))
NOWHERE = -1  # the place of a number that is another value's
DETOUR = 1000  # of a node that passes nothing on as it is, or reads several values of the text


class PathStep(NamedTuple):
    """A node, and which of its inputs and outputs a path goes through."""

    node: onnx.NodeProto
    read: str
    output: str


@dataclass(frozen=True)
class Followed:
    """The numbers of a value, followed along a path to another value.

    Attributes:
        places: [axes of the last value, for one token]; which number of the first each comes from.
        factor: what each is multiplied with, in the same shape; None where all stay as they are.
        added: what is added to each, in the same shape; None for nothing.
        chosen: what each of several experts adds, of which the text chooses, [experts, *axes]; None for nothing.
        end: the last value up to which this is all; a norm, a clip or a gate follows it. Empty where nothing does.
    """

    places: NDArray[np.int64]
    factor: NDArray[Any] | None = None
    added: NDArray[Any] | None = None
    chosen: NDArray[Any] | None = None
    end: str = ""

    def moved(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Followed":
        """The same numbers at other places."""
        factor, added = (None if one is None else change(one) for one in (self.factor, self.added))
        chosen = None if self.chosen is None else np.stack([change(one) for one in self.chosen])
        return replace(self, places=change(self.places), factor=factor, added=added, chosen=chosen)

    def scaled(self, factor: NDArray[Any]) -> "Followed":
        """The numbers times a constant."""
        own = np.broadcast_to(factor, self.places.shape) if self.factor is None else self.factor * factor
        added, chosen = (None if one is None else one * factor for one in (self.added, self.chosen))
        return replace(self, factor=own, added=added, chosen=chosen)

    def shifted(self, term: NDArray[Any]) -> "Followed":
        """The numbers plus a constant."""
        return replace(
            self, added=np.broadcast_to(term if self.added is None else self.added + term, self.places.shape)
        )


class ValuePaths:
    """The paths of one hooked model's graph."""

    def __init__(self, model: HookedModel) -> None:
        self.model, self.flow = model, Dataflow(model.proto)

    @cached_property
    def facts(self) -> Scope:
        """Shapes of all values of a text of one token, and the numbers that sizes follow from."""
        return check_sizes(self.model.proto, validate.input_shapes(self.model.proto, *ONE_TOKEN), validate.UNBOUNDED)

    def back(
        self, value: str, reached: Callable[[str], bool], without: Collection[tuple[str, str]] = ()
    ) -> list[PathStep] | None:
        """The most direct path from a value before this one that is wanted; None where there is none.

        `without` has steps, as what they read and give, that no path takes.
        """
        waiting: list[tuple[int, int, str]] = [(0, 0, value)]
        after: dict[str, PathStep] = {}
        costs = {value: 0}
        while waiting:
            cost, _, name = heapq.heappop(waiting)
            if cost > costs[name]:
                continue
            if name != value and reached(name):
                return self._chain(name, value, after)
            node = self.flow.producer(name)
            if node is None:
                continue
            operands = self._operands(node)
            total = cost + (1 if len(operands) == 1 and node.op_type in MOVING | AFFINE else DETOUR)
            for entry in operands:
                if (entry, name) not in without and total < costs.get(entry, total + 1):
                    costs[entry], after[entry] = total, PathStep(node, entry, name)
                    heapq.heappush(waiting, (total, len(after), entry))
        return None

    def _operands(self, node: onnx.NodeProto) -> list[str]:
        """The inputs of a node that it passes on: all that are no weights, no shapes and no indices."""
        names = node.input[:1] if node.op_type in MOVING and node.op_type != "Concat" else node.input
        return [name for name in dict.fromkeys(names) if name in self.flow.varying]

    @staticmethod
    def _chain(first: str, last: str, after: dict[str, PathStep]) -> list[PathStep]:
        steps, name = list[PathStep](), first
        while name != last:
            steps.append(after[name])
            name = steps[-1].output
        return steps

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value of a text of one token."""
        fact = self.facts.get(name)
        if fact is None or fact.shape is None or None in fact.shape:
            raise ModelError(f"the shape of {name!r} does not follow from the graph: its weight cannot be told apart")
        return tuple(dim or 0 for dim in fact.shape)

    def follow(self, start: str, steps: Sequence[PathStep], experts: int | None = None) -> Followed:
        """Follow each number of a value's last axis along a path; of a product of several experts, what each adds."""
        return _alone(self._followed(start, steps, experts), steps)

    def _followed(self, start: str, steps: Sequence[PathStep], experts: int | None = None) -> Followed:
        begin = next((i for i in reversed(range(len(steps))) if self._picks_rows(steps[i])), -1) + 1
        shape = self.shape(steps[begin - 1].output if begin else start)
        followed = Followed(np.broadcast_to(np.arange(shape[-1]), shape))
        for step in steps[begin:]:
            rows = None if experts is None or followed.end else self._chosen_rows(step)
            if rows is not None and rows.shape == (experts, followed.places.shape[-1]):
                shape = followed.places.shape
                followed = replace(followed, chosen=np.stack([np.broadcast_to(row, shape) for row in rows]))
            else:
                followed = self._step(followed, step)
        return followed

    def through(self, value: str, reached: Callable[[str], bool]) -> list[PathStep] | None:
        """As `back`, along a path whose numbers arrive: of values that are joined and parted again, the right one."""
        wrong = set[tuple[str, str]]()
        while (steps := self.back(value, reached, wrong)) is not None:
            joins = [step for step in steps if step.node.op_type == "Concat"]
            if not joins or not self._lost(steps):
                return steps
            wrong.add((joins[-1].read, joins[-1].output))
        return None

    def _lost(self, steps: Sequence[PathStep]) -> bool:
        """Whether no number of the first value reaches the last one, which is another part of what a step joins."""
        try:
            return bool((self._followed(steps[0].read, steps).places == NOWHERE).all())
        except ModelError:  # said where the path is followed
            return False

    def follow_all(self, start: str, steps: Sequence[PathStep]) -> Followed:
        """Follow every number of a value for one token along a path."""
        shape = self.shape(start)
        followed = Followed(np.arange(int(np.prod(shape))).reshape(shape))
        for step in steps:
            followed = self._step(followed, step)
        return _alone(followed, steps)

    def _picks_rows(self, step: PathStep) -> bool:
        """Whether a node picks rows by the text: of each, all numbers of the last axis."""
        node = step.node
        picked = node.op_type == "Gather" and node.input[1] in self.flow.varying
        return picked and self.facts[node.input[1]].data is None and attributes(node).get("axis", 0) == 0

    def _step(self, followed: Followed, step: PathStep) -> Followed:
        node = step.node
        if node.op_type in MOVING:
            return followed.moved(lambda array: self._moved(step, array))
        others = [self._before_spread(name) for name in node.input if name != step.read and name]
        if node.op_type in AFFINE and not followed.end and not {*others} & self.flow.varying and len(node.input) == 2:
            constant = self.constant(others[0]) if others else np.zeros(())
            subtrahend = node.op_type in ("Sub", "Div") and node.input[1] == step.read
            if np.broadcast_shapes(constant.shape, followed.places.shape) == followed.places.shape and not subtrahend:
                if node.op_type in ("Mul", "Div"):
                    return followed.scaled(constant if node.op_type == "Mul" else 1 / constant)
                return followed.shifted(constant if node.op_type == "Add" else -constant)
        if self.shape(step.output) != followed.places.shape:
            raise ModelError(f"{step.output!r} is made by {node.op_type}: what it passes on cannot be told apart")
        if node.op_type == "Add" and any(name in self.flow.varying and not self._rows_of(name) for name in others):
            raise ModelError(
                f"{step.output!r} is a sum of several parts that depend on the text: no one weight gives it"
            )
        return followed if followed.end else replace(followed, end=step.read)

    def _before_spread(self, name: str) -> str:
        """What is spread over all tokens of a text, where that is a constant; else the value itself."""
        node = self.flow.producer(name)
        spread = node is not None and node.op_type == "Expand" and node.input[0] not in self.flow.varying
        return node.input[0] if node is not None and spread else name

    def _rows_of(self, name: str) -> str:
        """The constant whose rows a value is, which the text picks (biases of experts); empty where it is none."""
        node = self.flow.producer(name)
        while node is not None and node.op_type in SHAPED:
            node = self.flow.producer(node.input[0])
        picked = node is not None and node.op_type in PICKING and node.input[0] not in self.flow.varying
        return node.input[0] if node is not None and picked else ""

    def _chosen_rows(self, step: PathStep) -> NDArray[Any] | None:
        """The rows [experts, n] of a constant, one of which is added in a step; None where none is."""
        others = [name for name in step.node.input if name != step.read]
        source = self._rows_of(others[0]) if step.node.op_type == "Add" and len(others) == 1 else ""
        return self.constant(source) if source else None

    def _moved(self, step: PathStep, array: NDArray[Any]) -> NDArray[Any]:
        node, settings = step.node, attributes(step.node)
        if node.op_type in SHAPED:
            return array.reshape(self.shape(step.output))
        if node.op_type == "Transpose":
            return array.transpose(settings.get("perm"))
        if node.op_type == "Expand":
            return np.broadcast_to(array, self.shape(step.output))
        if node.op_type == "Gather":
            return np.take(array, self._numbers(node.input[1]), axis=settings.get("axis", 0))
        if node.op_type == "Concat":
            axis, place = settings["axis"], list(node.input).index(step.read)
            sizes = [self.shape(name)[axis] for name in node.input]
            width = [(0, 0)] * array.ndim
            width[axis] = sum(sizes[:place]), sum(sizes[place + 1 :])
            return np.pad(array, width, constant_values=NOWHERE)
        if node.op_type == "GatherND":
            places, axis = self._numbers(node.input[1]), settings.get("batch_dims", 0)
            if axis or places.shape[-1] != 1:
                raise ModelError(f"{step.output!r} is made by GatherND: what it passes on cannot be told apart")
            return np.take(array, places[..., 0], axis=0)
        if node.op_type == "Split":
            axis = settings.get("axis", 0)
            ends = np.cumsum([self.shape(name)[axis] for name in node.output])
            return np.split(array, ends[:-1], axis=axis)[list(node.output).index(step.output)]
        begins, ends = (self._numbers(name).reshape(-1) for name in node.input[1:3])
        optional = [self._numbers(name).reshape(-1) if name else None for name in node.input[3:5]]
        axes = optional[0] if optional and optional[0] is not None else np.arange(len(begins))
        strides = optional[1] if len(optional) > 1 and optional[1] is not None else np.ones(len(begins), int)
        slices = [slice(None)] * array.ndim
        for axis, begin, end, stride in zip(axes, begins, ends, strides, strict=True):
            slices[int(axis)] = slice(int(begin), int(end), int(stride))
        return array[tuple(slices)]

    def _numbers(self, name: str) -> NDArray[Any]:
        fact = self.facts.get(name)
        return self.constant(name) if fact is None or fact.data is None else fact.data

    def constant(self, name: str) -> NDArray[Any]:
        """The numbers of a value that follows from weights alone, whatever computes it."""
        if name in self.flow.varying:
            raise ModelError(f"{name!r} depends on the text: its numbers are those of no weight")
        try:
            return weight_value(self.flow, self.model.folder, name)
        except ModelError:
            nodes = [self.flow.nodes[i] for i in sorted(self.flow.ancestors([name]))]
        if not nodes:  # whole numbers, as the order in which a packed matrix reads its inputs
            return onnx_file.weight(self.model.proto, self.model.folder, name)
        values: dict[str, NDArray[Any]] = {}
        for node in nodes:
            for entry in node.input:
                if entry and entry not in values:
                    values[entry] = onnx_file.weight(self.model.proto, self.model.folder, entry)
            results = _evaluated(self.model.proto, node, values)
            values |= dict(zip(node.output, results, strict=True))
        return values[name]


def _alone(followed: Followed, steps: Sequence[PathStep]) -> Followed:
    """What was followed, unless the last value holds numbers of others too."""
    if (followed.places == NOWHERE).any():
        raise ModelError(f"{steps[-1].output!r} joins several values: what it passes on cannot be told apart")
    return followed


def _evaluated(proto: onnx.ModelProto, node: onnx.NodeProto, values: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """The outputs of a node of constants, by onnx's own evaluator."""
    inputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in dict.fromkeys(node.input) if name]
    outputs = [onnx.helper.make_value_info(name, onnx.TypeProto()) for name in node.output]
    graph = onnx.helper.make_graph([node], "one", inputs, outputs)
    one = onnx.helper.make_model(graph, opset_imports=proto.opset_import)
    results: Any = ReferenceEvaluator(one).run(None, {value.name: values[value.name] for value in inputs})
    return [np.asarray(array) for array in results]
