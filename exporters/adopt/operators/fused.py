"""Fused operators before their expansion, by the names of their values at the end of an adoption."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from exporters.adopt.flow import SIZE_OPERATORS, makers_of, walk
from mionnx.graph.fused_operators import CALL
from mionnx.graph.operator_table import expansion_of

Read = tuple[ir.Node, int]  # a node, and the place of an input of it


@dataclass(frozen=True)
class Fused:
    """A fused operator."""

    domain: str
    name: str
    attributes: tuple[ir.Attr, ...]
    inputs: tuple[ir.Value | None, ...]  # the values that it read
    # For each of these, what reads it among the nodes that stand for the operator. Hook points may be put between the
    # two, so that the operator has to read what these nodes read in the end.
    reads: tuple[tuple[Read, ...], ...]
    outputs: tuple[ir.Value | None, ...]  # the values that it made, as the nodes make them that stand for it

    @classmethod
    def of(cls, node: ir.Node, replacements: Mapping[int, ir.Value], nodes: Iterable[ir.Node]) -> "Fused":
        """Take down a node, `replacements` of whose outputs (place -> value) are made by others, `nodes`."""
        places = [
            (one, place) for one in nodes if one.op_type not in SIZE_OPERATORS for place in range(len(one.inputs))
        ]
        reads = tuple(
            tuple(read for read in places if value is not None and read[0].inputs[read[1]] is value)
            for value in node.inputs
        )
        read = [bool(value.uses()) or value.is_graph_output() for value in node.outputs]
        outputs = tuple(replacements.get(place) if is_read else None for place, is_read in enumerate(read))
        return cls(node.domain, node.op_type, tuple(node.attributes.values()), tuple(node.inputs), reads, outputs)

    @property
    def lengths(self) -> list[ir.Value]:
        """Its inputs without a reader among the nodes in its place."""
        pairs = zip(self.inputs, self.reads, strict=True)
        return [value for value, reads in pairs if value is not None and not reads]

    def proto(self) -> onnx.NodeProto | None:
        """The operator by the names of today; None if its values are not in the graph any more."""
        inputs = [self._input(place) for place in range(len(self.inputs))]
        outputs = [value if value is not None and _stands(value) else None for value in self.outputs]
        if None in inputs or not any(value is not None for value in outputs):
            return None
        names = ["" if value is None else str(value.name) for value in outputs]
        while names and not names[-1]:  # optional outputs at the end are left out
            names.pop()
        node = onnx.helper.make_node(self.name, [str(name) for name in inputs], names, domain=self.domain)
        node.attribute.extend(ir.to_proto(attribute) for attribute in self.attributes)
        return node

    def _input(self, place: int) -> str | None:
        """The name of an input, empty if left out; None if it is not one value of the graph."""
        value = self.inputs[place]
        if value is None:
            return ""
        # hook points may stand between an input and its readers by now: all readers must read one and the same value
        values = {node.inputs[at] for node, at in self.reads[place] if node.graph is not None} or {value}
        (one, *others) = values
        return str(one.name) if one is not None and not others and _stands(one) else None


def _stands(value: ir.Value) -> bool:
    node = value.producer()
    return node.graph is not None if node is not None else value.is_graph_input() or value.is_initializer()


def supporting(fused: Iterable[Fused]) -> list[ir.Value]:
    """The values that fused operators alone read, if nodes of `CALL` compute them from the call."""
    lengths: dict[ir.Value, None] = {}
    for one in fused:
        if expansion_of((one.domain, one.name)) is not None:
            lengths |= dict.fromkeys(value for value in one.lengths if _is_length(value))
    return list(lengths)


def _is_length(value: ir.Value) -> bool:
    nodes = list(walk([value.producer()], makers_of))
    return bool(nodes) and all(node.op_type in CALL for node in nodes)
