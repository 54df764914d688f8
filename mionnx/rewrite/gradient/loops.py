"""The rule of `Scan`: the states before each step are kept, and another `Scan` goes through the steps backwards.

1. The forward `Scan` gives the states before each step as further outputs.
2. The backward one carries the cotangents of the states, and of what the body takes from outside; it reads the kept
   states, the scanned inputs and the cotangents of the scanned outputs, in the opposite direction.
3. Its body computes the step again and goes back through it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, helper

from mionnx.graph.dataflow import attributes, from_outside
from mionnx.rewrite.gradient.backward import Backward, Upstream
from mionnx.rewrite.gradient.subgraph import Copy, activity, copy_of, declared, infer_inside, prune


@dataclass(frozen=True)
class Loop:
    """A `Scan` node as it came, with its body as it came."""

    node: NodeProto
    body: GraphProto

    @cached_property
    def reading(self) -> int:
        """Number of scanned inputs."""
        return int(attributes(self.node)["num_scan_inputs"])

    @cached_property
    def inputs(self) -> list[str]:
        """The values that it reads: first states, then scanned inputs."""
        return [*self.node.input]

    @property
    def states(self) -> int:
        return len(self.inputs) - self.reading

    @property
    def writing(self) -> int:
        """Number of scanned outputs."""
        return len(self.body.output) - self.states

    def setting(self, name: str, count: int) -> list[int]:
        """An attribute with a number for each scanned input or output."""
        return [*attributes(self.node).get(f"scan_{name}", [0] * count)]


def scan_rule(op: Backward, node: NodeProto, upstream: Upstream) -> Mapping[str, Sequence[str]]:
    """The cotangents of a `Scan`'s inputs, and of what its body takes from outside."""
    loop = Loop(node, GraphProto.FromString(attributes(node)["body"].SerializeToString()))  # the node changes below
    befores = _keep_states(op, loop)
    inner = _inside(op, loop)
    outside = [name for name in from_outside(loop.body) if op.is_active(name)]
    active = [i for i in range(loop.states, len(loop.inputs)) if op.is_active(loop.inputs[i])]
    live = [k for k in range(loop.writing) if upstream[loop.states + k]]
    body = _backwards(op, loop, inner, outside, active, live)
    # the cotangents of the last states; strict=False since `upstream` has those of the scanned outputs too
    first = [one or op.zeros(name) for one, name in zip(upstream, loop.inputs[: loop.states], strict=False)]
    scanned = [*befores, *loop.inputs[loop.states :], *(str(upstream[loop.states + k]) for k in live)]
    results = op.Scan(
        *first,
        *(op.zeros(name) for name in outside),
        *scanned,
        outputs=len(body.output),
        body=body,
        num_scan_inputs=len(scanned),
        **_directions(loop, active, live),
    )
    cotangents: dict[str, list[str]] = defaultdict(list)
    # in the order of the backward body's outputs
    values = [*loop.inputs[: loop.states], *outside, *(loop.inputs[i] for i in active)]
    for value, one in zip(values, [results] if isinstance(results, str) else results, strict=True):
        # what follows from a node by itself is one type for all its outputs: that of its first input
        op.facts.types[one] = op.facts.type(value)
        # a list: one value may be a state and be read from outside too
        cotangents[value].append(one)
    return cotangents


def _directions(loop: Loop, active: Sequence[int], live: Sequence[int]) -> dict[str, list[int]]:
    """The axes and directions of the backward loop: each the opposite of the forward one's."""
    in_axes, in_ways = (loop.setting(name, loop.reading) for name in ("input_axes", "input_directions"))
    out_axes, out_ways = (loop.setting(name, loop.writing) for name in ("output_axes", "output_directions"))
    directions = {
        # 0 is forwards, 1 backwards; the kept states come first, and were written forwards along axis 0
        "scan_input_axes": [*[0] * loop.states, *in_axes, *(out_axes[k] for k in live)],
        "scan_input_directions": [*[1] * loop.states, *(1 - way for way in in_ways), *(1 - out_ways[k] for k in live)],
        "scan_output_axes": [in_axes[i - loop.states] for i in active],
        "scan_output_directions": [1 - in_ways[i - loop.states] for i in active],
    }
    # onnx cannot tell the type of an empty list; a loop may scan nothing out
    return {name: numbers for name, numbers in directions.items() if numbers}


def _keep_states(op: Backward, loop: Loop) -> list[str]:
    """Let the forward loop give the states before each step, scanned along the first axis."""
    node = loop.node
    body = next(one for one in node.attribute if one.type == AttributeProto.GRAPH).g
    befores = [op.names.fresh("before") for _ in range(loop.states)]
    for i, before in enumerate(befores):
        inside = op.names.fresh("before")
        body.node.append(helper.make_node("Identity", [body.input[i].name], [inside]))
        body.output.append(declared(op.facts, inside, loop.inputs[i]))
        op.facts.types[before] = op.facts.type(loop.inputs[i])
    # outputs left out at the end must stand as empty names: the kept states come behind all others
    missing = loop.states + loop.writing - len(node.output)
    node.output.extend([*[""] * missing, *befores])
    for name in ("output_axes", "output_directions"):
        # where such an attribute is written it must have a number for every scanned output, the new ones too
        settings = [*loop.setting(name, loop.writing), *[0] * loop.states]
        for one in [one for one in node.attribute if one.name == f"scan_{name}"]:
            node.attribute.remove(one)
        node.attribute.append(helper.make_attribute(f"scan_{name}", settings))
    return befores


def _inside(op: Backward, loop: Loop) -> Copy:
    """A copy of the body, with the types and shapes that follow from the loop's inputs."""
    names = {value.name: op.names.fresh(value.name) for value in loop.body.input}
    inner = copy_of(loop.body, op.names, op.facts, names)
    axes = loop.setting("input_axes", loop.reading)
    for i, (value, source) in enumerate(zip(loop.body.input, loop.inputs, strict=True)):
        name = names[value.name]
        inner.facts.types[name] = op.facts.type(source)
        if (shape := op.facts.shapes.get(source)) is not None:
            dims = [*shape]
            if i >= loop.states:
                del dims[axes[i - loop.states]]  # a step sees one entry along the scanned axis, without the axis
            declared_dims = inner.facts.shapes.get(name, tuple(dims))
            inner.facts.shapes[name] = tuple(
                # a number that the loop's input tells is more than a name that the body declares
                own if isinstance(own, int) else one
                for own, one in zip(dims, declared_dims, strict=True)
            )
    inner.facts.follow(inner.nodes)
    infer_inside(inner.nodes, inner.facts, op.opset)
    return inner


def _backwards(
    op: Backward, loop: Loop, inner: Copy, outside: Sequence[str], active: Sequence[int], live: Sequence[int]
) -> GraphProto:
    entries = [inner.name(value.name) for value in loop.body.input]
    ends = [inner.name(value.name) for value in loop.body.output]
    sources = [*entries[: loop.states], *(entries[i] for i in active), *outside]
    back = op.inside(inner.facts, activity(inner.nodes, inner.facts, sources, ends) | {*sources, *ends})
    carried = [op.names.fresh("d_state") for _ in range(loop.states)]
    sums = [op.names.fresh("kept") for _ in outside]
    scanned = [op.names.fresh("d_out") for _ in live]
    inputs = [declared(inner.facts, name, entry) for name, entry in zip(carried, entries, strict=False)]
    inputs += [declared(inner.facts, name, value) for name, value in zip(sums, outside, strict=True)]
    # the inputs of the forward body again, under their names in the copy: the step is computed once more from them
    inputs += [declared(inner.facts, entry, entry) for entry in entries]
    inputs += [declared(inner.facts, name, ends[loop.states + k]) for name, k in zip(scanned, live, strict=True)]
    back.facts.tell(value for value in inputs if value.name not in back.facts.shapes)
    starts = [
        *zip(ends, carried, strict=False),
        *((ends[loop.states + k], one) for k, one in zip(live, scanned, strict=True)),
    ]
    gradients = back.run(inner.nodes, _summed(back, starts))
    outputs = [_output(back, gradients, entry, None) for entry in entries[: loop.states]]
    outputs += [_output(back, gradients, value, extra) for value, extra in zip(outside, sums, strict=True)]
    outputs += [_output(back, gradients, entries[i], None) for i in active]
    nodes = prune([*inner.nodes, *back.nodes], [value.name for value in outputs])
    return helper.make_graph(nodes, op.names.fresh("body"), inputs, outputs)


def _summed(back: Backward, starts: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The cotangents at the end of a step; a state that is an output too has the sum."""
    parts: dict[str, list[str]] = defaultdict(list)
    for end, one in starts:
        parts[end].append(one)
    return {end: back.sum(ones) for end, ones in parts.items()}


def _output(back: Backward, gradients: Mapping[str, str], value: str, extra: str | None) -> onnx.ValueInfoProto:
    """An output of the backward body: a value's cotangent, plus that of the other steps."""
    step = gradients.get(value) or back.zeros(value)  # a step that does not read the value
    name = back.names.fresh("out")
    node = helper.make_node("Add", [extra, step], [name]) if extra else helper.make_node("Identity", [step], [name])
    back.nodes.append(node)
    return declared(back.facts, name, value)
