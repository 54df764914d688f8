"""Parts of a graph that are gone through backwards: active values, needed nodes, copies of subgraphs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

from mionnx.graph.dataflow import Facts, made_in, reads
from mionnx.rewrite.gradient.backward import FreshNames

DIFFERENTIABLE = frozenset((TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16))


def activity(nodes: Sequence[NodeProto], facts: Facts, sources: Iterable[str], ends: Iterable[str]) -> set[str]:
    """The floating-point values that follow from sources and lead to ends."""
    # nodes are in execution order: one pass forwards and one backwards find all
    after, before = {*sources}, {*ends}
    for node in nodes:
        if not after.isdisjoint(reads(node)):
            after |= {name for name in node.output if name and facts.type(name) in DIFFERENTIABLE}
    for node in reversed(nodes):
        if not before.isdisjoint(node.output):
            before |= {name for name in reads(node) if name in after}
    return after & before


def prune(nodes: Sequence[NodeProto], ends: Iterable[str]) -> list[NodeProto]:
    """The nodes that some values need."""
    needed, live = {*ends}, []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.output):
            live.append(node)
            needed |= {*reads(node)}
    return live[::-1]


@dataclass(frozen=True)
class Copy:
    """A copied subgraph, to be computed again on the way back; its initializers are among its nodes as `Constant`."""

    nodes: list[NodeProto]
    names: dict[str, str]  # value of the original -> its name in the copy
    facts: Facts

    def name(self, value: str) -> str:
        """A value's name in the copy; one from outside keeps its own."""
        return self.names.get(value, value)


def copy_of(graph: GraphProto, names: FreshNames, outer: Facts, inputs: Mapping[str, str] | None = None) -> Copy:
    """Copy a subgraph's nodes under fresh names; `inputs`: its inputs -> their names in the copy."""
    # what the subgraph declares of its values holds for the copy too, under the new names
    own, renaming = Facts(graph, outer), dict(inputs or {})
    values = [tensor.name for tensor in graph.initializer] + [name for node in graph.node for name in node.output]
    renaming |= {name: names.fresh(name) for name in values if name and name not in renaming}
    nodes = [helper.make_node("Constant", [], [renaming[tensor.name]], value=tensor) for tensor in graph.initializer]
    nodes += [_renamed(node, renaming) for node in graph.node]
    facts = Facts(None, outer)
    facts.types |= {new: own.types[old] for old, new in renaming.items() if old in own.types}
    facts.shapes |= {new: own.shapes[old] for old, new in renaming.items() if old in own.shapes}
    facts.constants |= {new: own.constants[old] for old, new in renaming.items() if old in own.constants}
    facts.follow(nodes)
    return Copy(nodes, renaming, facts)


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """A copy of a node under other names; what its subgraphs make themselves keeps its name."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = ""
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    # an inner graph sees the names around it: those it takes from outside must follow the renaming
    for attribute in copy.attribute:
        if attribute.type == AttributeProto.GRAPH:
            graph, own = attribute.g, made_in(attribute.g)
            # an inner value of the same name hides the outer one
            visible = {old: new for old, new in names.items() if old not in own}
            inner = [_renamed(one, visible) for one in graph.node]
            del graph.node[:]
            graph.node.extend(inner)
            for value in graph.output:
                value.name = visible.get(value.name, value.name)
    return copy


def declared(facts: Facts, name: str, like: str) -> onnx.ValueInfoProto:
    """The declaration of a value that has another one's type and number of axes."""
    shape = facts.shapes.get(like)
    return helper.make_tensor_value_info(name, facts.type(like), None if shape is None else [None] * len(shape))


def infer_inside(nodes: Sequence[NodeProto], facts: Facts, opset: int) -> None:
    """Infer the shapes of a copy's values from those of its inputs."""
    own = {name for node in nodes for name in node.output}
    outside = [name for node in nodes for name in node.input if name and name not in own and name in facts.shapes]
    values = [
        helper.make_tensor_value_info(
            name, facts.type(name), [dim if isinstance(dim, int) else None for dim in facts.shapes[name]]
        )
        for name in dict.fromkeys(outside)
    ]
    graph = helper.make_graph(list(nodes), "inside", values, [])
    inferred = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    )
    facts.tell(value for value in inferred.graph.value_info if value.name not in facts.shapes)
