"""Copies of subgraphs under fresh names: the way back through a branch or a loop computes its values again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import AttributeProto, GraphProto, NodeProto, helper

from mionnx.graph.dataflow import made_in
from mionnx.rewrite.gradient.backward import FreshNames
from mionnx.rewrite.gradient.facts import NodeFacts


@dataclass(frozen=True)
class Copy:
    """A copied subgraph.

    Attributes:
        nodes: its nodes, its initializers among them as `Constant`.
        names: value of the original -> its name in the copy.
        facts: of the copy's values.
    """

    nodes: list[NodeProto]
    names: dict[str, str]
    facts: NodeFacts

    def name(self, value: str) -> str:
        """A value's name in the copy; one from outside keeps its own."""
        return self.names.get(value, value)


def copy_of(graph: GraphProto, names: FreshNames, outer: NodeFacts, given: Mapping[str, str] | None = None) -> Copy:
    """Copy a subgraph's nodes.

    Args:
        graph: the subgraph; left alone.
        outer: what is known around it.
        given: its inputs -> what they are called in the copy.
    """
    known, renaming = NodeFacts(graph, outer), dict(given or {})
    made = [tensor.name for tensor in graph.initializer] + [name for node in graph.node for name in node.output]
    renaming |= {name: names.fresh(name) for name in made if name and name not in renaming}
    nodes = [helper.make_node("Constant", [], [renaming[tensor.name]], value=tensor) for tensor in graph.initializer]
    nodes += [renamed(node, renaming) for node in graph.node]
    facts = NodeFacts(None, outer)
    for old, new in renaming.items():
        _tell(facts, new, known, old)
    facts.follow(nodes)
    return Copy(nodes, renaming, facts)


def _tell(facts: NodeFacts, new: str, known: NodeFacts, old: str) -> None:
    if old in known.types:
        facts.types[new] = known.types[old]
    if old in known.shapes:
        facts.shapes[new] = known.shapes[old]
    if old in known.constants:
        facts.constants[new] = known.constants[old]


def renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """A copy of a node under other names; what its subgraphs make themselves keeps its name."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = ""
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for attribute in copy.attribute:
        if attribute.type == AttributeProto.GRAPH:
            _rename_inside(attribute.g, names)
    return copy


def _rename_inside(graph: GraphProto, names: Mapping[str, str]) -> None:
    own = made_in(graph)
    visible = {old: new for old, new in names.items() if old not in own}
    inner = [renamed(node, visible) for node in graph.node]
    del graph.node[:]
    graph.node.extend(inner)
    for value in graph.output:
        value.name = visible.get(value.name, value.name)


def declared(facts: NodeFacts, name: str, like: str) -> onnx.ValueInfoProto:
    """The declaration of a value that has another one's type and number of axes."""
    shape = facts.shapes.get(like)
    return helper.make_tensor_value_info(name, facts.type(like), None if shape is None else [None] * len(shape))


def infer_inside(nodes: Sequence[NodeProto], facts: NodeFacts, opset: int) -> None:
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
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    inferred = onnx.shape_inference.infer_shapes(model)
    facts.tell(value for value in inferred.graph.value_info if value.name not in facts.shapes)
