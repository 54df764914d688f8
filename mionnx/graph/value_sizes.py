"""Bounds of the sizes of all values in a graph, found before anything runs.

The graph is followed node by node with the shapes of its inputs (`mionnx.graph.known_value`), into branches, loops and
functions too.

1. No value takes more than `VALUE` bytes and 2 times the weights. All that are made of constants alone take at most
   `TOTAL` and 3 times the weights, all others `TOTAL` and 16 times.
2. A size that follows from neither constants nor shapes is refused. In the branch of an `If` that is not taken, and
   where the shapes of the inputs are not known, only what is made of constants alone must have a bound: a runtime
   computes it while it opens the graph.
3. A `Loop` has a trip count that follows from constants and shapes, of at most `TRIPS` with those around it; what it
   carries keeps its shape.
4. Products of constants take at most `PRODUCTS` multiplications.
5. Operators whose cost the sizes of their inputs and outputs do not bound are not applied to constants alone.
"""

import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx

from mionnx.errors import ModelError
from mionnx.graph.known_value import Dims, Known, infer, label, of_shape, of_tensor

VALUE, TOTAL = 2**28, 2**30  # bytes that any graph may take besides its weights
TRIPS = 2**20
PRODUCTS = 2**36
# Pools, attention (which has a matrix of scores inside), recurrences, cubes: no exporter writes them on constants alone
COSTLY = re.compile(
    r".*Attention.*|(?!.*Global).*Pool|.*(RNN|LSTM|GRU)|LRN|Det|Inverse|.*DFT|STFT|NonMaxSuppression|RoiAlign"
)
VISITS = 2**16  # nodes, those of functions as often as they are called
STEPS = 32  # after which what a loop carries must keep its shape
LIST_ATTRIBUTES = {"value_ints": "int64", "value_floats": "float32", "value_int": "int64", "value_float": "float32"}
Scope = MutableMapping[str, Known]


def check_sizes(proto: onnx.ModelProto, shapes: Mapping[str, Dims], weights: int, all_values: bool = True) -> Scope:
    """Check that all values are bounded (or those of constants alone); returns name -> what is known of a value."""
    return _Walk(proto, weights).check(shapes, all_values)


@dataclass(frozen=True)
class _Place:
    """Place of a node: whether it surely runs, how often at most, how deep."""

    certain: bool
    times: int = 1
    depth: int = 0


class _Walk:
    """One pass through a model."""

    def __init__(self, proto: onnx.ModelProto, weights: int) -> None:
        self.proto = proto
        # weights bound what a graph may honestly make: turned, cast or unpacked copies of them, and activations
        self.value, self.most = VALUE + 2 * weights, {True: TOTAL + 3 * weights, False: TOTAL + 16 * weights}
        self.opsets = _opsets(proto.opset_import)
        self.functions = {(function.domain, function.name): function for function in proto.functions}
        self.spent = {True: 0, False: 0}
        self.visits = self.products = 0
        self.memo: dict[object, list[Known]] = {}

    def check(self, shapes: Mapping[str, Dims], all_values: bool) -> Scope:
        """Follow the whole graph."""
        graph, scope = self.proto.graph, dict[str, Known]()
        for value in graph.input:
            scope[value.name] = of_shape(value.type.tensor_type.elem_type, shapes.get(value.name), False)
        for tensor in graph.initializer:
            fact = of_tensor(tensor)
            # an initializer that is an input too is a default: a call may give other numbers
            scope[tensor.name] = replace(fact, data=None) if tensor.name in scope else fact
        self.nodes(graph.node, scope, _Place(all_values))
        return scope

    def nodes(self, nodes: Sequence[onnx.NodeProto], scope: Scope, place: _Place) -> None:
        """Follow nodes in order, and put what is known of their outputs into the scope."""
        if place.depth > 64:
            raise ModelError("graphs and functions are nested more than 64 deep: refused")
        for node in nodes:
            self.visits += 1
            if self.visits > VISITS:
                raise ModelError(f"the functions of the graph expand to more than {VISITS:,} nodes: refused")
            inputs = [scope.get(name, Known()) if name else None for name in node.input]
            outputs = self.node(node, inputs, scope, place)
            for name, fact in zip(node.output, outputs, strict=False):
                self._count(node, fact, place)
                if name:
                    scope[name] = fact

    def _count(self, node: onnx.NodeProto, fact: Known, place: _Place) -> None:
        if fact.most is None:
            if place.certain or fact.constant:
                raise ModelError(
                    f"{node.op_type} node {label(node)} makes a value whose size follows from neither constants nor "
                    "shapes: it has no bound, refused"
                )
            return
        spent = self.spent[fact.constant] = self.spent[fact.constant] + fact.nbytes * place.times
        if fact.nbytes > self.value or spent > self.most[fact.constant]:
            what = f"{fact.most:,} elements" if fact.nbytes > self.value else f"{spent:,} bytes with those before"
            raise ModelError(f"{node.op_type} node {label(node)} would make {what}: refused")

    def node(
        self, node: onnx.NodeProto, inputs: Sequence[Known | None], scope: Scope, place: _Place
    ) -> Sequence[Known]:
        """Facts about a node's outputs."""
        if (node.domain, node.op_type) in self.functions:
            return self._function(self.functions[node.domain, node.op_type], node, inputs, place)
        if node.domain in ("", "ai.onnx") and node.op_type in ("Constant", "If", "Loop", "Scan"):
            return getattr(self, f"_{node.op_type.lower()}")(node, inputs, scope, place)
        # layers repeat: nodes with equal operator, attributes and facts have equal outputs, and are inferred once
        attributes = b"".join(attribute.SerializeToString(deterministic=True) for attribute in node.attribute)
        # x * x is not x * y, even of equal facts
        names = tuple(dict.fromkeys(node.input)) if len({*node.input}) < len(node.input) else ()
        version, facts = self.opsets.get(node.domain), [fact and fact.key for fact in inputs]
        key = (node.domain, version, node.op_type, attributes, len(node.output), names, *facts)
        constant = all(fact.constant for fact in inputs if fact is not None)
        if key not in self.memo:
            self.memo[key] = self._inferred(node, inputs, place.certain or constant)
        if constant and self.memo[key]:
            self._count_products(node, inputs, self.memo[key][0], place)
        return self.memo[key]

    def _inferred(self, node: onnx.NodeProto, inputs: Sequence[Known | None], needed: bool) -> list[Known]:
        try:
            return infer(node, inputs, self.opsets)
        except ModelError:
            raise
        except Exception as error:  # onnx's errors share no base class
            if needed:
                reason = str(error).strip().splitlines()[-1:] or [""]
                raise ModelError(f"{node.op_type} node {label(node)}: its size is not known: {reason[0]}") from error
            return [Known() for _ in node.output]

    def _count_products(
        self, node: onnx.NodeProto, inputs: Sequence[Known | None], output: Known, place: _Place
    ) -> None:
        """Count a constant node's multiplications, those of equal nodes too: a runtime computes each."""
        if COSTLY.fullmatch(node.op_type):
            raise ModelError(f"{node.op_type} node {label(node)} is of constants alone, and may take hours: refused")
        self.products += _products(node, inputs, output) * place.times
        if self.products > PRODUCTS:
            raise ModelError(f"{node.op_type} node {label(node)}: constants of {self.products:,} products: refused")

    def _constant(
        self, node: onnx.NodeProto, inputs: Sequence[Known | None], scope: Scope, place: _Place
    ) -> list[Known]:
        attribute = node.attribute[0]
        if attribute.name == "value":
            return [of_tensor(attribute.t)]
        if attribute.name not in LIST_ATTRIBUTES:
            raise ModelError(f"Constant node {label(node)} is a {attribute.name}: refused, no exporter writes such")
        content = onnx.helper.get_attribute_value(attribute)
        return [of_tensor(onnx.numpy_helper.from_array(np.asarray(content, LIST_ATTRIBUTES[attribute.name])))]

    def _function(
        self, function: onnx.FunctionProto, node: onnx.NodeProto, inputs: Sequence[Known | None], place: _Place
    ) -> list[Known]:
        arguments = {attribute.name: attribute for attribute in [*function.attribute_proto, *node.attribute]}
        scope = {name: fact for name, fact in zip(function.input, inputs, strict=False) if fact is not None}
        nodes = [_with_attributes(inner, arguments) for inner in function.node]
        outside = self.opsets
        self.opsets = outside | _opsets(function.opset_import)
        self.nodes(nodes, scope, replace(place, depth=place.depth + 1))
        self.opsets = outside
        return [scope.get(name, Known()) for name in function.output]

    def _if(self, node: onnx.NodeProto, inputs: Sequence[Known | None], scope: Scope, place: _Place) -> list[Known]:
        condition = inputs[0]
        taken = None if condition is None or condition.data is None else bool(condition.data.reshape(-1)[:1].all())
        results = {}
        for attribute in node.attribute:
            runs = place.certain and taken in (None, attribute.name == "then_branch")
            inner: Scope = ChainMap(dict[str, Known](), scope)
            inner.update({tensor.name: of_tensor(tensor) for tensor in attribute.g.initializer})
            self.nodes(attribute.g.node, inner, replace(place, certain=runs, depth=place.depth + 1))
            results[attribute.name] = [inner.get(value.name, Known()) for value in attribute.g.output]
        if taken is not None:
            return results["then_branch" if taken else "else_branch"]
        return [_either(*pair) for pair in zip(results["then_branch"], results["else_branch"], strict=True)]

    def _loop(self, node: onnx.NodeProto, inputs: Sequence[Known | None], scope: Scope, place: _Place) -> list[Known]:
        count = inputs[0] if inputs else None
        trips = None if count is None or count.data is None else max(0, int(count.data.reshape(-1)[0]))
        if trips is None and (place.certain or count is None or count.constant):
            raise ModelError(
                f"Loop node {label(node)} has no trip count that follows from constants and shapes: refused"
            )
        carried = [fact for fact in inputs[2:] if fact is not None]
        first = [of_shape(onnx.TensorProto.INT64, (), False), of_shape(onnx.TensorProto.BOOL, (), False)]
        results = self._steps(node, node.attribute[0].g, first, carried, 1, trips or 0, scope, place)
        last, each = results[: len(carried)], results[len(carried) :]
        return [*last, *(_collected(fact, None, 0, trips or 0) for fact in each)]

    def _scan(self, node: onnx.NodeProto, inputs: Sequence[Known | None], scope: Scope, place: _Place) -> list[Known]:
        facts = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        operands = [one for one in inputs if one is not None]
        states = len(operands) - int(facts["num_scan_inputs"])
        axes = facts.get("scan_input_axes") or [0] * (len(operands) - states)
        lengths = [_length(one, axis) for one, axis in zip(operands[states:], axes, strict=True)]
        trips = next((length for length in lengths if length is not None), None)
        if trips is None and place.certain:
            raise ModelError(f"Scan node {label(node)} runs over an axis whose length has no bound: refused")
        slices = [_slice(one, axis) for one, axis in zip(operands[states:], axes, strict=True)]
        results = self._steps(node, facts["body"], [], operands[:states], 0, trips or 0, scope, place, slices)
        out = facts.get("scan_output_axes") or [0] * (len(results) - states)
        each = [_collected(one, trips, axis, trips or 0) for one, axis in zip(results[states:], out, strict=True)]
        return [*results[:states], *each]

    def _steps(
        self,
        node: onnx.NodeProto,
        body: onnx.GraphProto,
        first: Sequence[Known],
        carried: Sequence[Known],
        skipped: int,
        trips: int,
        scope: Scope,
        place: _Place,
        slices: Sequence[Known] = (),
    ) -> list[Known]:
        """Outputs of a loop's body after `skipped` ones: carried values, then values of one step."""
        # a body that runs no step need not be bounded
        inside = _Place(place.certain and trips > 0, place.times * max(1, trips), place.depth + 1)
        if inside.times > TRIPS:
            raise ModelError(f"{node.op_type} node {label(node)} would take {inside.times:,} steps: refused")
        carried = [replace(fact, data=None) for fact in carried]  # another number in each step
        # the shape after a step may differ from the first; once it repeats it stays, by induction
        for _ in range(STEPS):
            inner: Scope = ChainMap(dict[str, Known](), scope)
            inner.update({tensor.name: of_tensor(tensor) for tensor in body.initializer})
            inner.update(zip([value.name for value in body.input], [*first, *carried, *slices], strict=False))
            self.nodes(body.node, inner, inside)
            results = [inner.get(value.name, Known()) for value in body.output][skipped:]
            after = [replace(fact, data=None) for fact in results[: len(carried)]]
            if [fact.shape for fact in after] == [fact.shape for fact in carried]:
                return [*after, *results[len(carried) :]]
            carried = after
        raise ModelError(f"{node.op_type} node {label(node)} carries a value that grows with every step: refused")


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Domain -> version, the standard domain by one name."""
    return {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in imports}


def _with_attributes(node: onnx.NodeProto, arguments: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """A node of a function, with the call's attributes in place of references."""
    if not node.attribute:
        return node
    own = onnx.NodeProto()
    own.CopyFrom(node)
    del own.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in arguments:
                own.attribute.add().CopyFrom(arguments[attribute.ref_attr_name])
                own.attribute[-1].name = attribute.name
            continue
        own.attribute.add().CopyFrom(attribute)
        for graph in [own.attribute[-1].g] if attribute.HasField("g") else []:
            inner = [_with_attributes(one, arguments) for one in graph.node]
            del graph.node[:]
            graph.node.extend(inner)
    return own


def _products(node: onnx.NodeProto, inputs: Sequence[Known | None], output: Known) -> int:
    """Multiplications of a node, roughly."""
    counts = [fact.most or 0 for fact in inputs if fact is not None]
    if node.op_type == "Einsum":
        return prod(counts)
    if "MatMul" in node.op_type or "Gemm" in node.op_type:
        shape = inputs[0].shape if inputs and inputs[0] is not None else None
        if not shape or None in shape:
            return (output.most or 0) * max(counts, default=1)
        # The inner length is the last axis of the first factor; of one that may be turned the longest bounds it.
        turned = any(attribute.name.startswith("trans") for attribute in node.attribute)
        return (output.most or 0) * (max(dim or 0 for dim in shape) if turned else shape[-1] or 0)
    if "Conv" in node.op_type and len(counts) > 1:
        return (output.most or 0) * counts[1]
    return 0


def _either(one: Known, other: Known) -> Known:
    """Facts about the output of one of two branches."""
    bounds = [fact.most for fact in (one, other) if fact.most is not None]
    same = one.shape if one.shape == other.shape else None
    if same is None and one.shape is not None and other.shape is not None and len(one.shape) == len(other.shape):
        same = tuple(a if a == b else None for a, b in zip(one.shape, other.shape, strict=True))
    most = max(bounds) if len(bounds) == 2 else None  # no bound of one branch, none of both
    return Known(one.dtype or other.dtype, same, most, None, one.constant and other.constant)


def _length(fact: Known, axis: int) -> int | None:
    return fact.shape[axis] if fact.shape is not None and -len(fact.shape) <= axis < len(fact.shape) else None


def _slice(fact: Known, axis: int) -> Known:
    """One step's part of what a Scan runs over."""
    if fact.shape is None or not fact.shape:
        return replace(fact, shape=None, data=None)
    axis %= len(fact.shape)
    return of_shape(fact.dtype, fact.shape[:axis] + fact.shape[axis + 1 :], fact.constant)


def _collected(fact: Known, length: int | None, axis: int, trips: int) -> Known:
    """A loop's output of one value a step; `length` is None if it may end earlier."""
    most = None if fact.most is None else fact.most * trips
    if fact.shape is None:
        return replace(fact, most=most, data=None)
    axis %= len(fact.shape) + 1
    shape = (*fact.shape[:axis], length, *fact.shape[axis:])
    return replace(fact, shape=shape, most=most, data=None)
